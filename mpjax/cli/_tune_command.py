"""`mpjax tune`: finds the cheapest policy that is good enough for a config."""

from __future__ import annotations

import argparse
import json
import pathlib
from collections.abc import Sequence

import yaml

from mpjax.cli._config_arguments import whole_number, write_file
from mpjax.cli._exit_status import config_errors
from mpjax.cli._policy_arguments import split_policies
from mpjax.cli._show import progress, report_console, say, show
from mpjax.cli._subject import open_subject, run_or_config
from mpjax.planner import get_target
from mpjax.train import ConfigError, Planner, load_config, load_plugins
from mpjax.train.config._config_file import read_tree
from mpjax.tuning import TuneResult, tune
from mpjax.tuning._tune import parse_tolerance

_STEPS, _BATCHES = 10, 2


def run(options: argparse.Namespace) -> None:
  """Runs the command."""
  own, (policies, overrides) = options.own, split_policies(options.overrides)
  if fixed := [o for o in overrides if o.startswith(("policy=", "policy."))]:
    raise ConfigError(
      f"{fixed[0]}: tune chooses the policy; name those to choose from as policy=bf16,fp16,fp32"
    )
  path, checkpoint = run_or_config(options.config, own.get("checkpoint"))
  steps = whole_number(own, "steps", 0 if checkpoint else _STEPS, 0)
  batches = whole_number(own, "batches", _BATCHES, 1)
  with config_errors():  # before anything is computed
    parse_tolerance(options.tolerance)
    target = get_target(own.get("target"))
  load_plugins(options.plugin)
  config = load_config(path, [*overrides, "policy=fp32"])
  console = report_console()
  layout = Planner(config, target).layout
  with progress(console, lines=True) as advance:
    advance("loading the data and the model")
    subject = open_subject(config, checkpoint)
    if steps:
      advance(f"training {steps} steps in float32")
    for _ in range(steps):
      subject.train()
    with config_errors():
      result = tune(
        subject.step.with_layout(layout),
        subject.state,
        [subject.next_batch() for _ in range(batches)],
        target=target,
        tolerance=options.tolerance,
        candidates=policies or None,
        objective=options.objective,
        progress=advance,
      )
  show(result, console, options.table)
  if options.out:
    write_file("--out", options.out, _config_text(path, overrides, result), new=True)
    say(console, f"the config with this policy: {options.out}")
  if options.json:
    write_file("--json", options.json, json.dumps(result.to_dict(), indent=1) + "\n")
    say(console, f"data: {options.json}")


def _config_text(path: pathlib.Path, overrides: Sequence[str], result: TuneResult) -> str:
  """Returns the config as YAML: first the policy that was found."""
  tree = read_tree(path, overrides)
  for key in ("policy", "out"):  # a run of another policy is another run
    tree.pop(key, None)
  text = f"# {path.name} with the policy that `mpjax tune` found for {result.target}.\n"
  return text + result.yaml + yaml.safe_dump(tree, sort_keys=False)
