"""What several commands share: from their arguments to configs and states, what they print and write."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import json
import os
import pathlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import rich.console
import rich.markup
import yaml

from mpjax._mistakes import ConfigError, config_errors
from mpjax._render.tables import TEXT_WIDTH, Shown, print_shown
from mpjax._types import PyTree
from mpjax.policy import bare_dtype_advice, get_policy
from mpjax.step import TrainState
from mpjax.train import Config, load_config, load_plugins, make_setup
from mpjax.train.config._config_file import find_config
from mpjax.train.setup._experiment import Place, Setup
from mpjax.train.setup._saved_run import SavedRun


def split_policies(overrides: Sequence[str]) -> tuple[list[str], list[str]]:
  """Returns the policies of `policy=a,b,c`, each once, and the other overrides.

  A policy that is a mapping or a string of fields stays among the overrides. Raises `ConfigError` for an
  unknown name.
  """
  policies: list[str] = []
  rest = []
  for override in overrides:
    key, equals, value = override.partition("=")
    if key == "policy" and equals and "=" not in value and not value.lstrip().startswith("{"):
      policies = list(dict.fromkeys(name.strip() for name in value.split(",")))
    else:
      rest.append(override)
  with config_errors("policy: "):
    for name in policies:
      get_policy(name)
  return policies, rest


def load_configs(options: argparse.Namespace, backend: str | None = None) -> list[Config]:
  """Runs plug-ins and loads a command's config: under each policy of `policy=a,b`, or its own.

  Warns on stderr of a bare dtype, which is probably not the policy that the user meant.
  """
  load_plugins(options.plugin)
  policies, overrides = split_policies(options.overrides)
  named = [[f"policy={name}"] for name in policies] or [[]]
  configs = [load_config(options.config, [*policy, *overrides]) for policy in named]
  for config in configs:
    if advice := bare_dtype_advice(config.policy, backend):
      print(f"warning: {advice}", file=sys.stderr)
  return configs


def run_or_config(options: argparse.Namespace) -> tuple[pathlib.Path, Checkpoint | None, int]:
  """Returns the config file and the checkpoint of a command line, and how many steps to train from there.

  A run directory is both. Raises `ConfigError` if there is no such config or run, or two runs are given.
  """
  config, named = options.config, options.own.get("checkpoint")
  if pathlib.Path(config).is_dir():
    if named is not None:
      raise ConfigError(f"checkpoint={named} and the run directory {config}: expected one of them")
    named = config
  path = find_config(config)
  return path, None if named is None else Checkpoint(named), options.own.get("steps", 0 if named else 10)


class Checkpoint:
  """A checkpoint of a run, `which`: the newest of a run directory, or a folder in its `checkpoints/`."""

  def __init__(self, named: str):
    self.named, path, self.which = named, pathlib.Path(named), "latest"
    if path.name.isdecimal() and path.parent.name == "checkpoints":
      path, self.which = path.parent.parent, path.name
    self.run = SavedRun(path)

  def restore(self, setup: Setup, iterator: Any) -> tuple[Setup, TrainState]:
    """Returns a step, and the state as it takes it; moves the iterator to the batches after it."""
    config, theirs = setup.config, self.run.config
    models = [(each.model, each.data.kind) for each in (theirs, config)]
    if models[0] != models[1]:
      raise ConfigError(
        f"checkpoint={self.named} is of another model or data than the config's ({theirs.model.kind} of "
        f"{theirs.data.kind}): give the run directory in place of the config"
      )
    # The run's own policy and optimiser decide the shape of the saved state; the devices are those here.
    original = self.run.experiment(setup.at)
    restored = self.run.restore(self.which, original)
    if restored.loop["fingerprint"] == setup.info.fingerprint and config.data == theirs.data:
      iterator.set_state(restored.data)
    same_optimizer = (config.optimizer, config.train.average) == (theirs.optimizer, theirs.train.average)
    if setup.policy == original.policy and same_optimizer:
      return setup, restored.state
    # A run under another policy has no amax histories for delayed scaling.
    setup = dataclasses.replace(setup, policy=setup.policy.without_histories())
    return setup, setup.step.adopt(restored.state, original.step, warn=False)


def open_subject(
  config: Config, checkpoint: Checkpoint | None, steps: int = 0, count: int = 1
) -> tuple[Setup, TrainState, list[PyTree]]:
  """Returns a config's step, its first state or a checkpoint's, and `count` batches from there on, placed.

  The config's policy may differ from that of the checkpoint's run. Takes `steps` steps first.

  Raises:
    ConfigError: if there is no such checkpoint, or it belongs to another model.
    DataError: if data is missing or cannot be used.
  """
  setup = make_setup(config, Place.of_tools(config))
  iterator = setup.data.train()
  if checkpoint is None:
    state = setup.first_state()
  else:
    setup, state = checkpoint.restore(setup, iterator)
  batches = map(setup.place, iterator)
  for batch in itertools.islice(batches, steps):
    state, _ = setup.step(state, batch)
    jax.block_until_ready(state.step)
  return setup, state, list(itertools.islice(batches, count))


class Screen:
  """Standard output, where a command shows its answer; in a file or a pipe it has the width of a report."""

  def __init__(self) -> None:
    self.console = rich.console.Console()
    if not (self.console.is_terminal or "COLUMNS" in os.environ):
      self.console = rich.console.Console(width=TEXT_WIDTH)

  def show(self, shown: Shown, options: argparse.Namespace, alarm: str = "") -> None:
    """Prints the answer, the table that `--table` names, or with `--all` everything."""
    with config_errors("--table: "):
      print_shown(shown, self.console, "all" if options.all else options.table, alarm)

  def say(self, text: str) -> None:
    """Prints a line as it is."""
    self.console.print(text, highlight=False, markup=False, soft_wrap=True)

  @contextlib.contextmanager
  def progress(self, *, lines: bool = True) -> Iterator[Callable[[str], None]]:
    """Yields a function that takes a line before each piece of work, which a terminal shows meanwhile.

    Elsewhere each is printed if `lines`.
    """
    if not self.console.is_terminal:
      yield lambda line: self.say(line) if lines else None
      return
    with self.console.status("begins") as status:
      yield lambda line: status.update(rich.markup.escape(line))

  def write(self, what: str, flag: str, name: str | None, save: Callable[[pathlib.Path], object]) -> None:
    """Writes the file that a flag names, if it is given, and says that it is there.

    Raises:
      ConfigError: if it cannot be written; names the flag.
    """
    if not name:
      return
    try:
      save(pathlib.Path(name))
    except FileExistsError as error:
      raise ConfigError(f"{flag} {name}: exists; it is not overwritten, choose another name") from error
    except OSError as error:
      raise ConfigError(f"{flag} {name}: cannot be written ({error.strerror})") from error
    self.say(f"{what}: {name}")

  def write_json(self, name: str | None, data: object) -> None:
    """Writes the file that `--json` names."""
    self.write("data", "--json", name, lambda path: path.write_text(json.dumps(data, indent=1) + "\n"))

  def write_config(self, flag: str, name: str | None, policy: str, tree: Mapping[str, Any]) -> None:
    """Writes a new file with a policy, as YAML, and the rest of a config's tree."""
    # A run of another policy is another run.
    rest = {key: value for key, value in tree.items() if key not in ("policy", "out")}

    def save(path: pathlib.Path) -> None:
      with path.open("x") as file:
        file.write(policy + yaml.safe_dump(rest, sort_keys=False))

    self.write("the config with this policy", flag, name, save)
