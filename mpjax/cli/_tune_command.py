"""`mpjax tune`: finds the cheapest policy that is good enough for a config, and proves it by training."""

from __future__ import annotations

import argparse
import json
import math
import pathlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, get_args

import jax
import rich.console
import rich.progress
import yaml

from mpjax._render.install_text import pip_install
from mpjax.cli._config_arguments import (
  command_options,
  require_file,
  run_or_config,
  whole_number,
)
from mpjax.cli._exit_status import guarded
from mpjax.cli._parsers import KEYS
from mpjax.cli._policy_arguments import split_policies
from mpjax.cli._show import report_console, show
from mpjax.cli._subject import Subject, locate, open_subject
from mpjax.cli._tune_proof import prove
from mpjax.planner import get_target
from mpjax.train import Config, ConfigError, Planner, load_config, load_plugins
from mpjax.train.config._config import Recompute
from mpjax.train.config._config_file import find_config, read_tree
from mpjax.train.setup._meshes import mesh_sizes, on_devices_here
from mpjax.tuning import TuneResult, tune
from mpjax.tuning._tune import parse_tolerance

_STEPS, _BATCHES = 10, 2


def run(options: argparse.Namespace) -> int:
  """Runs the command and returns its exit status."""
  return guarded(lambda: _tune(options))


def _tune(options: argparse.Namespace) -> None:
  own, overrides = command_options(options.overrides, KEYS["tune"])
  policies, overrides = split_policies(overrides)
  if fixed := [o for o in overrides if o.startswith(("policy=", "policy."))]:
    raise ConfigError(
      f"{fixed[0]}: tune chooses the policy; name those to choose from as policy=bf16,fp16,fp32"
    )
  path, checkpoint = run_or_config(options.config, own.get("checkpoint"))
  steps = whole_number(own, "steps", 0 if checkpoint else _STEPS, 0)
  batches = whole_number(own, "batches", _BATCHES, 1)
  _check(options)
  try:
    target = get_target(own.get("target"))
  except ValueError as error:
    raise ConfigError(str(error)) from error
  load_plugins(options.plugin)
  path = find_config(path)
  config = load_config(path, [*overrides, "policy=fp32"])
  console = report_console()
  planner = Planner(config, target)
  layout = planner.layout
  trials = (
    locate(checkpoint)[0] / "tune.jsonl" if checkpoint else pathlib.Path(f"runs/tune/{path.stem}.jsonl")
  )
  trials.parent.mkdir(parents=True, exist_ok=True)
  with _progress(console) as say:
    subject = _subject(config, checkpoint, steps, say)
    try:
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
        progress=say,
      )
    except ConfigError:
      raise
    except ValueError as error:
      raise ConfigError(str(error)) from error
  show(result, console, options.table)
  report: dict[str, Any] = result.to_dict()
  if options.out:
    _write_config(path, overrides, result, pathlib.Path(options.out))
    _print(console, f"the config with this policy: {options.out}")
  if options.picture:
    result.save_picture(options.picture)
    _print(console, f"picture: {options.picture}")
  if options.prove:
    config = on_devices_here(config)
    if result.policy.across_devices and math.prod(mesh_sizes(config.mesh, len(jax.devices())).values()) == 1:
      crossing = " and ".join(result.policy.across_devices)
      _print(console, f"the proof runs on one device, without transfers: it does not test {crossing}")
    with _progress(console) as say:
      proof = prove(
        config if result.recompute is None else _recomputing(config, result.recompute),
        result.policy,
        result.chosen.label,
        steps=options.prove,
        seeds=range(config.seed, config.seed + options.seeds),
        say=say,
      )
    _print(console, f"\n{proof}")
    report["proof"] = proof.to_dict()
  if options.json:
    pathlib.Path(options.json).write_text(json.dumps(report, indent=1) + "\n")
    _print(console, f"data: {options.json}")


def _recomputing(config: Config, recompute: str) -> Config:
  return config.model_copy(update={"train": config.train.model_copy(update={"recompute": recompute})})


def _subject(config: Any, checkpoint: str | None, steps: int, say: Any) -> Subject:
  """Opens the config's step, and trains `steps` steps in float32."""
  say("loading the data and the model")
  subject = open_subject(config, checkpoint)
  if steps:
    say(f"training {steps} steps in float32")
    for _ in range(steps):
      subject.train()
  return subject


def _check(options: argparse.Namespace) -> None:
  """Raises for wrong arguments and for files that cannot be written, before anything is computed."""
  try:
    parse_tolerance(options.tolerance)
  except ValueError as error:
    raise ConfigError(str(error)) from error
  for flag in ("prove", "seeds", "minutes"):
    value = getattr(options, flag)
    if value is not None and not value > 0:
      raise ConfigError(f"--{flag} {value}: expected a positive number")
  for flag in ("out", "json", "picture"):
    name = getattr(options, flag)
    if name is None:
      continue
    require_file(f"--{flag}", name, is_new=flag == "out")
  if options.picture:
    if pathlib.Path(options.picture).suffix.lower() not in (".png", ".svg"):
      raise ConfigError(f"--picture {options.picture}: expected a file that ends in .png or .svg")
    try:
      import matplotlib  # noqa: F401
    except ImportError:
      raise ConfigError(f"--picture needs matplotlib: {pip_install('plan')}") from None


def _write_config(
  path: pathlib.Path, overrides: Sequence[str], result: TuneResult, out: pathlib.Path
) -> None:
  """Writes the config as a new file: first the policy that was found, with its comments."""
  tree = read_tree(path, overrides)
  for key in ("policy", "out"):  # a run of another policy is another run
    tree.pop(key, None)
  if result.recompute is not None:
    tree["train"] = (tree.get("train") or {}) | {"recompute": result.recompute}
  text = f"# {path.name} with the policy that `mpjax tune` found for {result.target}.\n"
  try:
    out.write_text(text + result.yaml + yaml.safe_dump(tree, sort_keys=False))
  except OSError as error:
    raise ConfigError(f"--out {out}: cannot be written ({error.strerror})") from error


@contextmanager
def _progress(console: rich.console.Console) -> Iterator[Any]:
  """Shows what is being tried: one changing line on a terminal, a line for each trial elsewhere."""
  bar = rich.progress.Progress(
    rich.progress.SpinnerColumn(),
    rich.progress.TextColumn("{task.description}", markup=False),
    rich.progress.TimeElapsedColumn(),
    console=console,
    transient=True,
    disable=not console.is_terminal,
  )
  with bar:
    task = bar.add_task("begins", total=None)

    def say(line: str) -> None:
      if not console.is_terminal:
        _print(console, line)
      bar.update(task, description=line)

    yield say


def _print(console: rich.console.Console, text: str) -> None:
  console.print(text, highlight=False, markup=False, soft_wrap=True)
