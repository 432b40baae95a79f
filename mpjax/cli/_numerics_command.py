"""`mpjax numerics`: shows what a policy does to the numbers of a training step, and what to change."""

from __future__ import annotations

import argparse
import pathlib

import jax
import numpy as np
import yaml

from mpjax import formats
from mpjax._mistakes import config_errors
from mpjax._types import PyTree
from mpjax.cli._shared import Checkpoint, Screen, load_configs, open_subject, run_or_config
from mpjax.numerics import find_nonfinite, inspect_numerics
from mpjax.policy import get_policy
from mpjax.train import Config, ConfigError
from mpjax.train.config._config_file import read_tree


def run(options: argparse.Namespace) -> None:
  """Runs the command."""
  if options.formats:
    print(formats.format_table())
    return
  own, screen = options.own, Screen()
  path, checkpoint, steps = run_or_config(options)
  config, *more = load_configs(options)
  if more:
    raise ConfigError("policy: expected one policy")
  if options.hunt is not None:
    _hunt(config, checkpoint, screen, options)
    return
  page = pathlib.Path(options.html or _page(path, config, checkpoint))
  doing = f"compiling the training step, and training {steps} steps"
  with screen.progress() as advance:
    advance(doing if steps else "building the model and reading its state")
    setup, state, batches = open_subject(config, checkpoint, steps, own.get("batches", 2))
  recipe, used = config.resolve_policy().fp8, setup.policy.fp8
  if recipe and used and recipe.recipe != used.recipe:
    screen.say(
      f"fp8: the checkpoint has no amax histories, so tensors are scaled by their own amax ({used.recipe})"
    )
  name = path.parent.name if path.name == "config.yaml" else path.stem
  parameters = sum(leaf.size for leaf in jax.tree.leaves(state.arrays))
  total = len(batches) * setup.step.options.accumulate
  with screen.progress() as advance, config_errors():
    report = inspect_numerics(
      setup.step,
      state,
      batches,
      keep=own.get("keep", 0.999),
      title=f"{name} ({config.model.kind} of {parameters:,} parameters)",
      progress=lambda line: advance(f"inspected {line} of {total}" if line.startswith("batch ") else line),
    )
  screen.show(report, options, alarm="^problem")
  if options.html is None:
    page.parent.mkdir(parents=True, exist_ok=True)
  screen.write("page", "--html", str(page), report.save_html)
  screen.write("data", "--json", options.json, report.save_json)
  if options.apply:
    assert report.advice is not None
    policy = dict(report.advice.policy)
    if recipe and get_policy(policy).fp8 is not None:  # delayed scaling was inspected without its histories
      policy["fp8"] = config.resolve_policy().to_dict()["fp8"]
    lines = [f"# {path} with the policy that `mpjax numerics` advises."]
    lines += [f"# {key}: {buys}" for key, buys in report.advice.lines]
    text = "\n".join(lines) + "\n" + yaml.safe_dump({"policy": policy}, sort_keys=False)
    screen.write_config("--apply", options.apply, text, read_tree(path, options.overrides))


def _page(path: pathlib.Path, config: Config, checkpoint: Checkpoint | None) -> pathlib.Path:
  """Returns the file of the page; it is in the run directory if the parameters are a run's."""
  policy = config.resolve_policy()
  label = policy.label if policy.label.isidentifier() else "custom"
  if checkpoint is None:
    return pathlib.Path("runs/numerics") / f"{path.stem}-{label}.html"
  is_own = checkpoint.run.config.resolve_policy() == policy
  return checkpoint.run.directory / ("numerics.html" if is_own else f"numerics-{label}.html")


def _hunt(config: Config, checkpoint: Checkpoint | None, screen: Screen, options: argparse.Namespace) -> None:
  if checkpoint is None:
    raise ConfigError("--hunt: expected a checkpoint, too, as in checkpoint=runs/x")
  setup, state, [like] = open_subject(config, checkpoint)
  file, batch = _load_batch(options.hunt, checkpoint.run.directory, like)
  screen.say(f"batch {file}, checkpoint of step {int(state.step)}, policy {setup.policy.label}")
  with screen.console.status("computing the step operation by operation"):
    report = find_nonfinite(setup.step, state, setup.place(batch))
  screen.show(report, options)


def _load_batch(file: str, run: pathlib.Path, like: PyTree) -> tuple[str, dict[str, np.ndarray]]:
  """Returns the name of an npz file, by default that of the newest batch that stopped a run, and its arrays.

  Raises:
    ConfigError: if there is none, or it cannot be read as a batch like `like`.
  """
  if not file:
    files = list(run.glob("nonfinite_batch_*.npz"))
    if not files:
      raise ConfigError(
        f"{run} holds no nonfinite_batch_*.npz, which a run writes when it stops with non-finite gradients: "
        "name a batch, as in --hunt batch.npz"
      )
    file = str(max(files, key=lambda file: (len(file.name), file.name)))  # by the number of its step
  try:
    with np.load(file, allow_pickle=False) as archive:
      batch = {name: archive[name] for name in archive.files}
  except Exception as error:  # a damaged archive can raise anything
    raise ConfigError(f"--hunt {file}: cannot be read as a batch ({error})") from error
  rows = lambda tree: {name: f"{x.dtype}{list(x.shape[1:])}" for name, x in tree.items()}
  if rows(batch) != rows(like):
    raise ConfigError(f"--hunt {file}: holds rows of {rows(batch)}, expected rows of {rows(like)}")
  return file, batch
