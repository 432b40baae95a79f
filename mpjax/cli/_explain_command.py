"""`mpjax explain`: says what runs in which dtype under a config's policy, and why."""

from __future__ import annotations

import argparse
import os

import rich.console

from mpjax._render.text_sections import TEXT_WIDTH
from mpjax.casting import side_by_side
from mpjax.cli._exit_status import guarded
from mpjax.cli._policy_arguments import split_policies, warn_of_policy
from mpjax.cli._show import show
from mpjax.train import load_config, load_plugins, make_setup
from mpjax.train._meshes import on_devices_here

_BY = {"module": "modules", "reason": "float32"}  # the tables of `--by`


def run(options: argparse.Namespace) -> int:
  """Runs the command and returns its exit status."""

  def explain() -> None:
    load_plugins(options.plugin)
    policies, overrides = split_policies(options.overrides)
    setups = []
    for override in [[f"policy={name}"] for name in policies] or [[]]:
      config = load_config(options.config, [*override, *overrides])
      warn_of_policy(config.policy)
      setups.append(make_setup(on_devices_here(config)))
    console = rich.console.Console()
    if not console.is_terminal and "COLUMNS" not in os.environ:
      console = rich.console.Console(width=TEXT_WIDTH)
    show(side_by_side([setup.explain() for setup in setups]), console, _BY.get(options.by, options.table))
    for setup in setups:
      if not setup.policy.autocast and setup.policy.compute_dtype.itemsize < 4:
        print(f"\n{setup.policy.label} has autocast: false: a run casts parameters and batch instead")

  return guarded(explain)
