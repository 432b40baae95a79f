"""`mpjax tune`: finds the cheapest policy that is good enough for a config."""

from __future__ import annotations

import argparse
import json
import pathlib

from mpjax.cli._shared import (
  config_errors,
  progress,
  report_console,
  show,
  split_policies,
  write,
  write_config,
)
from mpjax.cli._subject import open_subject, run_or_config
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
  path, checkpoint = run_or_config(options.config, own.get("checkpoint"))
  batches, steps = own.get("batches", 2), own.get("steps", 0 if checkpoint else 10)
  with config_errors():  # before anything is computed
    parse_tolerance(options.tolerance)
    target = get_target(own.get("target"))
  load_plugins(options.plugin)
  config = load_config(path, [*overrides, "policy=fp32"])
  console = report_console()
  layout = Planner(config, target).layout
  with progress(console) as advance:
    advance("loading the data and the model")
    subject = open_subject(config, checkpoint)
    if steps:
      advance(f"training {steps} steps in float32")
    subject.train(steps, lambda _: None)
    with config_errors():
      result = tune(
        subject.setup.step.with_layout(layout),
        subject.state,
        [subject.next_batch() for _ in range(batches)],
        target=target,
        tolerance=options.tolerance,
        candidates=policies or None,
        objective=options.objective,
        progress=advance,
      )
  show(result, console, options.table)
  comment = f"# {path.name} with the policy that `mpjax tune` found for {result.target}.\n"
  write_config(console, "--out", options.out, comment + result.yaml, read_tree(path, overrides))
  data = json.dumps(result.to_dict(), indent=1) + "\n"
  write(console, "data", "--json", options.json, lambda name: pathlib.Path(name).write_text(data))
