"""`mpjax explain`: says what runs in which dtype under a config's policy, and why."""

from __future__ import annotations

import argparse

from mpjax.cli._shared import Screen, load_configs
from mpjax.train.setup._experiment import Experiment, Place
from mpjax.train.setup._saved_run import facts_of


def run(options: argparse.Namespace) -> None:
  """Runs the command: an answer for each policy, one after the other."""
  setups = [
    Experiment(config, facts_of(config, options.config), config.resolve_policy(), Place.of_tools(config))
    for config in load_configs(options)
  ]
  for setup in setups:
    setup.check()
  screen = Screen()
  for setup in setups:
    if setup is not setups[0]:
      screen.say("")
    screen.show(setup.explain(), options)
    if not setup.policy.autocast and setup.policy.compute_dtype.itemsize < 4:
      print(f"\n{setup.policy.label} has autocast: false: a run casts parameters and batch instead")
