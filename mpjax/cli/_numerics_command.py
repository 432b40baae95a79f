"""`mpjax numerics`: shows what a policy does to the numbers of a training step, and what to change."""

from __future__ import annotations

import argparse
import pathlib

import jax
import rich.console
import yaml

from mpjax import formats
from mpjax.cli._shared import (
  config_errors,
  progress,
  report_console,
  say,
  show,
  warn_of_policy,
  write,
  write_config,
)
from mpjax.cli._subject import load_batch, locate, open_subject, run_or_config
from mpjax.numerics import find_nonfinite, inspect_numerics
from mpjax.policy import get_policy
from mpjax.train import Config, ConfigError, load_config, load_plugins
from mpjax.train.config._config_file import read_tree

# What a line says that stays.
_SAID = {"compiling": "compiling the inspection: the step under the policy, and in float32"}


def run(options: argparse.Namespace) -> None:
  """Runs the command."""
  if options.formats:
    print(formats.format_table())
    return
  load_plugins(options.plugin)
  own, overrides = options.own, options.overrides
  path, checkpoint = run_or_config(options.config, own.get("checkpoint"))
  config = load_config(path, overrides)
  warn_of_policy(config.policy)
  console = report_console()
  if options.hunt is not None:
    _hunt(config, checkpoint, options.hunt, console, options.table)
    return
  page = pathlib.Path(options.html or _page(path, config, checkpoint))
  batches, steps = own.get("batches", 2), own.get("steps", 0 if checkpoint else 10)
  doing = f"compiling the training step, and training {steps} steps"
  with progress(console) as advance:
    advance(doing if steps else "building the model and reading its state")
    subject = open_subject(config, checkpoint)
  recipe, used = config.resolve_policy().fp8, subject.setup.step.policy.fp8
  if recipe and used and recipe.recipe != used.recipe:
    say(
      console,
      f"fp8: the checkpoint has no amax histories, so tensors are scaled by their own amax ({used.recipe})",
    )
  name = path.parent.name if path.name == "config.yaml" else path.stem
  parameters = sum(leaf.size for leaf in jax.tree.leaves(subject.state.arrays))
  title = f"{name} ({config.model.kind} of {parameters:,} parameters)"
  with progress(console, lines=False) as advance:
    subject.train(steps, advance)
  total = batches * subject.setup.step.accumulate
  with progress(console) as advance, config_errors():
    report = inspect_numerics(
      subject.setup.step,
      subject.state,
      (subject.next_batch() for _ in range(batches)),
      keep=own.get("keep", 0.999),
      title=title,
      progress=lambda line: advance(
        f"inspected {line} of {total}" if line.startswith("batch ") else _SAID.get(line, line)
      ),
    )
  show(report, console, options.table, alarm="^problem")
  if options.html is None:
    page.parent.mkdir(parents=True, exist_ok=True)
  write(console, "page", "--html", str(page), report.save_html)
  write(console, "data", "--json", options.json, report.save_json)
  if options.apply:
    assert report.advice is not None
    policy = dict(report.advice.policy)
    if recipe and get_policy(policy).fp8 is not None:  # delayed scaling was inspected without its histories
      policy["fp8"] = config.resolve_policy().to_dict()["fp8"]
    lines = [f"# {path} with the policy that `mpjax numerics` advises."]
    lines += [f"# {key}: {buys}" for key, buys in report.advice.lines]
    text = "\n".join(lines) + "\n" + yaml.safe_dump({"policy": policy}, sort_keys=False)
    write_config(console, "--apply", options.apply, text, read_tree(path, overrides))


def _page(path: pathlib.Path, config: Config, checkpoint: str | None) -> pathlib.Path:
  """Returns the file of the page; it is in the run directory if the parameters are a run's."""
  policy = config.resolve_policy()
  label = policy.label if policy.label.isidentifier() else "custom"
  if checkpoint is None:
    return pathlib.Path("runs/numerics") / f"{path.stem}-{label}.html"
  run, _ = locate(checkpoint)
  is_own = run.config.resolve_policy() == policy
  return run.directory / ("numerics.html" if is_own else f"numerics-{label}.html")


def _hunt(
  config: Config, checkpoint: str | None, file: str, console: rich.console.Console, table: str | None
) -> None:
  if checkpoint is None:
    raise ConfigError("--hunt: expected a checkpoint, too, as in checkpoint=runs/x")
  subject = open_subject(config, checkpoint)
  step = subject.setup.step
  file, batch = load_batch(file, checkpoint, subject.next_batch())
  say(console, f"batch {file}, checkpoint of step {int(subject.state.step)}, policy {step.policy.label}")
  with console.status("computing the step operation by operation"):
    report = find_nonfinite(step, subject.state, subject.setup.place(batch))
  show(report, console, table)
