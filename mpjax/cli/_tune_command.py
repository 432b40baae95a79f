"""`mpjax tune`: finds the cheapest policy that is good enough for a config, and proves it by training."""

from __future__ import annotations

import argparse
import json
import pathlib
from collections.abc import Sequence
from typing import Any, get_args

import yaml

from mpjax.cli._config_arguments import require_files, whole_number, write_file
from mpjax.cli._exit_status import config_errors
from mpjax.cli._policy_arguments import split_policies
from mpjax.cli._show import progress, report_console, say, show
from mpjax.cli._subject import locate, open_subject, run_or_config
from mpjax.cli._tune_proof import proof_text, prove
from mpjax.planner import get_target
from mpjax.train import ConfigError, Planner, load_config, load_plugins
from mpjax.train.config._config import MeshConfig, Recompute
from mpjax.train.config._config_file import read_tree
from mpjax.train.setup._experiment import Place
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
  _check(options)
  with config_errors():
    target = get_target(own.get("target"))
  load_plugins(options.plugin)
  config = load_config(path, [*overrides, "policy=fp32"])
  console = report_console()
  planner = Planner(config, target)
  layout = planner.layout
  trials = (
    locate(checkpoint)[0] / "tune.jsonl" if checkpoint else pathlib.Path(f"runs/tune/{path.stem}.jsonl")
  )
  trials.parent.mkdir(parents=True, exist_ok=True)
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
        minutes=options.minutes,
        trials=trials,
        plan_of=lambda policy, recompute: planner.plan(policy, recompute=recompute, compile=False),
        recompute=[choice for choice in get_args(Recompute) if choice != config.train.recompute],
        progress=advance,
      )
  show(result, console, options.table)
  report: dict[str, Any] = result.to_dict()
  if options.out:
    write_file("--out", options.out, _config_text(path, overrides, result))
    say(console, f"the config with this policy: {options.out}")
  if options.picture:
    result.save_picture(options.picture)
    say(console, f"picture: {options.picture}")
  if options.prove:
    mesh = Place.of_tools(config).mesh
    is_one = mesh is not None and mesh.size == 1
    if is_one:
      config = config.model_copy(update={"mesh": MeshConfig(data=1)})
    if result.policy.across_devices and is_one:
      crossing = " and ".join(result.policy.across_devices)
      say(console, f"the proof runs on one device, without transfers: it does not test {crossing}")
    if result.recompute is not None:
      config = config.model_copy(
        update={"train": config.train.model_copy(update={"recompute": result.recompute})}
      )
    with progress(console, lines=True) as advance:
      proof = prove(
        config,
        result.policy,
        result.chosen.label,
        steps=options.prove,
        seeds=range(config.seed, config.seed + options.seeds),
        say=advance,
      )
    say(console, f"\n{proof_text(proof)}")
    report["proof"] = proof
  if options.json:
    write_file("--json", options.json, json.dumps(report, indent=1) + "\n")
    say(console, f"data: {options.json}")


def _check(options: argparse.Namespace) -> None:
  """Raises for wrong arguments and for files that cannot be written, before anything is computed."""
  with config_errors():
    parse_tolerance(options.tolerance)
  for flag in ("prove", "seeds", "minutes"):
    value = getattr(options, flag)
    if value is not None and not value > 0:
      raise ConfigError(f"--{flag} {value}: expected a positive number")
  require_files(options, "out", "json", "picture", new="out")


def _config_text(path: pathlib.Path, overrides: Sequence[str], result: TuneResult) -> str:
  """Returns the config as YAML: first the policy that was found, with its comments."""
  tree = read_tree(path, overrides)
  for key in ("policy", "out"):  # a run of another policy is another run
    tree.pop(key, None)
  if result.recompute is not None:
    tree["train"] = (tree.get("train") or {}) | {"recompute": result.recompute}
  text = f"# {path.name} with the policy that `mpjax tune` found for {result.target}.\n"
  return text + result.yaml + yaml.safe_dump(tree, sort_keys=False)
