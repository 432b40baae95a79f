"""The arguments `[CONFIG] [key=value ...]`, the same for every command. Does not import JAX."""

from __future__ import annotations

import argparse
import importlib.util
import os
import pathlib
from collections.abc import Mapping
from typing import Any

from mpjax._render.install_text import pip_install
from mpjax.train import ConfigError

DEFAULT = "gpt_stdlib"
_OVERRIDES = "dotted keys that override the file"


def require_file(flag: str, name: str, *, is_new: bool = False) -> None:
  """Raises `ConfigError` if a file cannot be written. Called before anything is computed.

  Args:
    flag: the flag that names the file.
    name: the path of the file.
    is_new: whether the file must not exist.
  """
  file = pathlib.Path(name)
  # `Path.is_dir` raises for a name that is too long.
  if os.path.isdir(file) or not os.path.isdir(file.parent):
    raise ConfigError(f"{flag} {name}: expected a file in a folder that exists")
  there = os.path.lexists(file)
  if is_new and there:
    raise ConfigError(f"{flag} {name}: exists; it is not overwritten, choose another name")
  try:
    file.open("ab").close()
    if not there:
      file.unlink()
  except OSError as error:
    raise ConfigError(f"{flag} {name}: cannot be written ({error.strerror})") from error


def require_files(options: argparse.Namespace, *flags: str, new: str = "") -> None:
  """Raises `ConfigError` if files that flags name cannot be written, or a `--picture` cannot be drawn.

  Args:
    options: the command's options.
    flags: names of flags, without the dashes.
    new: the flag whose file must not exist.
  """
  for flag in flags:
    if (name := getattr(options, flag)) is not None:
      require_file(f"--{flag}", name, is_new=flag == new)
  if "picture" not in flags or options.picture is None:
    return
  if pathlib.Path(options.picture).suffix.lower() not in (".png", ".svg"):
    raise ConfigError(f"--picture {options.picture}: expected a file that ends in .png or .svg")
  if importlib.util.find_spec("matplotlib") is None:
    raise ConfigError(f"--picture needs matplotlib: {pip_install('plan')}")


def write_file(flag: str, name: str, text: str) -> None:
  """Writes a file that a flag names; raises `ConfigError` if it cannot be written."""
  try:
    pathlib.Path(name).write_text(text)
  except OSError as error:
    raise ConfigError(f"{flag} {name}: cannot be written ({error.strerror})") from error


def add_config(parser: argparse.ArgumentParser, *, also: str = "", overrides: str = _OVERRIDES) -> None:
  """Adds the arguments to a parser.

  Args:
    parser: the command's parser.
    also: what else the config may be, for its help.
    overrides: the help of the `key=value` arguments.
  """
  text = f"a YAML file{also}, or the name of an example that comes with mpjax (default: {DEFAULT})"
  parser.add_argument("config", nargs="?", default=DEFAULT, help=text)
  parser.add_argument("overrides", nargs="*", metavar="key=value", help=overrides)
  add_plugin(parser)


def add_plugin(parser: argparse.ArgumentParser) -> None:
  """Adds `--plugin` to a parser, for `mpjax.train.load_plugins`."""
  parser.add_argument(
    "--plugin",
    action="append",
    default=[],
    metavar="FILE.py|package.module",
    help="first run this code, which registers models, data and optimisers of your own; may be repeated",
  )


class _By(argparse.Action):
  """Chooses a table by another word for it."""

  def __call__(
    self, parser: argparse.ArgumentParser, options: argparse.Namespace, word: Any, option: str | None = None
  ) -> None:
    options.table = self.const[word]


def add_tables(parser: argparse.ArgumentParser, by: Mapping[str, str] | None = None) -> None:
  """Adds `--table NAME`, `--all` and `--by WHAT` to a parser, for `mpjax.cli._show.show`.

  Args:
    parser: a command's parser.
    by: the tables of `--by`.
  """
  which = parser.add_mutually_exclusive_group()
  which.add_argument("--table", metavar="NAME", help="print one of the tables that the answer names")
  which.add_argument("--all", action="store_const", const="all", dest="table", help="print every table")
  if by:
    said = ", or ".join(f"--table {table}" for table in by.values())
    which.add_argument("--by", action=_By, const=by, choices=by, help=f"the same as {said}")


def with_default(options: argparse.Namespace) -> argparse.Namespace:
  """Returns parsed arguments with the default config if the first argument is a `key=value`."""
  if "=" in options.config and not pathlib.Path(options.config).exists():
    options.config, options.overrides = DEFAULT, [options.config, *options.overrides]
  return options


def whole_number(own: Mapping[str, str], key: str, default: int, least: int) -> int:
  """Returns a command's option as a number.

  Raises:
    ConfigError: if it is not a whole number, or below `least`.
  """
  text = own.get(key, str(default))
  if not text.isdecimal() or int(text) < least:
    raise ConfigError(f"{key}={text}: expected a whole number from {least} on")
  return int(text)
