"""`mpjax explain`: what runs in which dtype under a config's policy, and why."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from mpjax.cli._config_arguments import add_config, parse, warn_of_policy
from mpjax.cli._exit_status import guarded
from mpjax.train import load_config, make_setup
from mpjax.train._meshes import on_devices_here


def run(arguments: Sequence[str], prog: str) -> int:
  """Runs the command and returns its exit status."""
  parser = argparse.ArgumentParser(
    prog=prog,
    description="Say what runs in which dtype under a config's policy, by module, and why. Computes nothing.",
    epilog=f"example: {prog} gpt_stdlib policy=fp16",
  )
  add_config(parser)
  options = parse(parser, list(arguments))

  def explain() -> None:
    config = load_config(options.config, options.overrides)
    warn_of_policy(config.policy)
    setup = make_setup(on_devices_here(config))
    print(setup.explain())
    if not setup.policy.autocast and setup.policy.compute_dtype.itemsize < 4:
      print("\nautocast: false in the policy: a run casts parameters and batch instead")

  return guarded(explain)
