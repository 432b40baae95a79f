"""`mpjax tune`: finds the cheapest policy that is good enough for a config."""

from __future__ import annotations

import argparse

from mpjax._mistakes import config_errors
from mpjax.cli._shared import Screen, open_subject, run_or_config, split_policies
from mpjax.planner import get_target
from mpjax.train import ConfigError, Planner, load_config, load_plugins
from mpjax.train.config._config_file import read_tree
from mpjax.tuning import tune
from mpjax.tuning._tune import parse_tolerance


def run(options: argparse.Namespace) -> None:
  """Runs the command."""
  own, (policies, overrides) = options.own, split_policies(options.overrides)
  if fixed := [o for o in overrides if o.startswith(("policy=", "policy."))]:
    raise ConfigError(
      f"{fixed[0]}: tune chooses the policy; name those to choose from as policy=bf16,fp16,fp32"
    )
  path, checkpoint, steps = run_or_config(options)
  with config_errors():  # before anything is computed
    parse_tolerance(options.tolerance)
    target = get_target(own.get("target"))
  load_plugins(options.plugin)
  config = load_config(path, [*overrides, "policy=fp32"])
  screen = Screen()
  layout = Planner(config, target).layout
  with screen.progress() as advance:
    advance("loading the data and the model")
    if steps:
      advance(f"training {steps} steps in float32")
    setup, state, batches = open_subject(config, checkpoint, steps, own.get("batches", 2))
    with config_errors():
      result = tune(
        setup.step.with_layout(layout),
        state,
        batches,
        target=target,
        tolerance=options.tolerance,
        candidates=policies or None,
        objective=getattr(options, "for") or "time",
        progress=advance,
      )
  screen.show(result, options)
  comment = f"# {path.name} with the policy that `mpjax tune` found for {result.target}.\n"
  screen.write_config("--out", options.out, comment + result.yaml, read_tree(path, overrides))
  screen.write_json(options.json, result.to_dict())
