"""Shell completion by argcomplete: commands, flags, configs, keys and policies."""

from __future__ import annotations

import argparse
import functools
import pathlib
import sys
from collections.abc import Callable, Iterable

from mpjax.cli import COMMANDS
from mpjax.cli._parsers import ADD, KEYS, takes_config
from mpjax.policies import presets
from mpjax.registry._names import config_keys, examples


def complete() -> None:
  """Answers the shell and ends the process; fails without argcomplete (extra `train`)."""
  try:
    import argcomplete
  except ModuleNotFoundError:
    sys.exit(1)
  files = argcomplete.completers.FilesCompleter(("yaml", "yml"))
  argcomplete.autocomplete(make_parser(files), always_complete_options=False)


def make_parser(files: Callable[..., Iterable[str]]) -> argparse.ArgumentParser:
  """Returns a parser of all commands, with completers on its arguments.

  Args:
    files: completes the name of a file.
  """
  parser = argparse.ArgumentParser("mpjax")
  parser.add_argument("--version", action="store_true")
  commands = parser.add_subparsers()
  for name in COMMANDS:
    command = commands.add_parser(name)
    if name == "bench":
      continue
    ADD[name](command)
    for action in command._actions:
      if action.dest == "config":
        _set_completer(action, lambda prefix, **_: [*examples(), *files(prefix)])
      elif action.dest == "overrides":
        _set_completer(action, functools.partial(_pairs, name))
  return parser


def _set_completer(action: argparse.Action, completer: Callable[..., list[str]]) -> None:
  """Sets the completer of an argument, as argcomplete expects it."""
  action.completer = completer  # type: ignore[attr-defined]


def _pairs(command: str, prefix: str, **_unused: object) -> list[str]:
  """Returns the completions `key=` and `key=value` of a word."""
  keys = [*KEYS.get(command, ()), *(config_keys() if takes_config(command) else ())]
  key, equals, value = prefix.partition("=")
  if not equals:
    return [f"{key}=" for key in keys]
  before, comma, _last = value.rpartition(",")  # of several policies
  return [f"{key}={before}{comma}{value}" for value in _values(command, key)]


def _values(command: str, key: str) -> list[str]:
  """Returns the values of a key that can be completed."""
  if key == "policy":
    return list(presets())
  if key == "target" and key in KEYS.get(command, ()):
    folder = pathlib.Path(__file__).parents[1] / "formats" / "devices"
    return sorted(file.stem for file in folder.glob("*.yaml"))
  if key == "dtype" and key in KEYS.get(command, ()):
    return ["fp32", "bf16", "fp16", "fp8"]
  return []
