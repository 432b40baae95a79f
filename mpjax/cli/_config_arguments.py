"""The arguments that name a config: `[CONFIG] [key=value ...]`, the same for every command."""

from __future__ import annotations

import argparse
import pathlib
import sys

from mpjax._precision_warning import bare_dtype_advice
from mpjax._types import PolicyLike

DEFAULT = "gpt_stdlib"
_OVERRIDES = "dotted keys that override the file"


def add_config(parser: argparse.ArgumentParser, *, also: str = "", overrides: str = _OVERRIDES) -> None:
  """Adds the arguments to a parser.

  Args:
    parser: the command's.
    also: what the config may be besides a file, for its help.
    overrides: what the `key=value` arguments are, for their help.
  """
  text = f"a YAML file{also}, or the name of an example that comes with mpjax (default: {DEFAULT})"
  parser.add_argument("config", nargs="?", default=DEFAULT, help=text)
  parser.add_argument("overrides", nargs="*", metavar="key=value", help=overrides)


def parse(parser: argparse.ArgumentParser, arguments: list[str]) -> argparse.Namespace:
  """Parses a command's arguments, options anywhere among them; without a config it is the default."""
  options = parser.parse_intermixed_args(arguments)
  if "=" in options.config and not pathlib.Path(options.config).exists():
    options.config, options.overrides = DEFAULT, [options.config, *options.overrides]
  return options


def warn_of_policy(policy: PolicyLike, backend: str | None = None) -> None:
  """Prints a line on stderr for a policy that is probably not the one that was meant: a bare dtype."""
  advice = bare_dtype_advice(policy, backend)
  if advice is not None:
    print(f"warning: {advice}", file=sys.stderr)
