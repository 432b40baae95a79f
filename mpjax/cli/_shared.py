"""What several commands share: policies and numbers in their arguments, what they print, files they write."""

from __future__ import annotations

import contextlib
import os
import pathlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import rich.console
import rich.markup
import yaml

from mpjax._render.tables import TEXT_WIDTH, Shown, print_shown
from mpjax._types import PolicyLike
from mpjax.policy import bare_dtype_advice, get_policy
from mpjax.train import ConfigError, DataError


@contextlib.contextmanager
def config_errors(key: str = "") -> Iterator[None]:
  """Turns a `ValueError` of its block into a `ConfigError` that begins with the key or flag."""
  try:
    yield
  except (ConfigError, DataError):
    raise
  except ValueError as error:
    raise ConfigError(f"{key}: {error}" if key else str(error)) from error


def split_policies(overrides: Sequence[str]) -> tuple[list[str], list[str]]:
  """Returns the policies of `policy=a,b,c`, each once, and the other overrides.

  A policy that is a mapping or a string of fields stays among the overrides.

  Raises:
    ConfigError: if a name is not a policy.
  """
  policies: list[str] = []
  rest = []
  for override in overrides:
    key, equals, value = override.partition("=")
    if key == "policy" and equals and "=" not in value and not value.lstrip().startswith("{"):
      policies = list(dict.fromkeys(name.strip() for name in value.split(",")))
    else:
      rest.append(override)
  with config_errors("policy"):
    for name in policies:
      get_policy(name)
  return policies, rest


def warn_of_policy(policy: PolicyLike, backend: str | None = None) -> None:
  """Warns on stderr about a bare dtype, which is probably not the policy that the user meant."""
  advice = bare_dtype_advice(policy, backend)
  if advice is not None:
    print(f"warning: {advice}", file=sys.stderr)


def report_console() -> rich.console.Console:
  """Returns a console on standard output; in a file or a pipe it has the width of a report."""
  console = rich.console.Console()
  if console.is_terminal or "COLUMNS" in os.environ:
    return console
  return rich.console.Console(width=TEXT_WIDTH)


def show(shown: Shown, console: rich.console.Console, name: str | None, alarm: str = "") -> None:
  """Prints the answer, the table `name`, or with `all` everything, as `print_shown` does.

  Raises:
    ConfigError: if no table has that name.
  """
  with config_errors("--table"):
    print_shown(shown, console, name, alarm)


def say(console: rich.console.Console, text: str) -> None:
  """Prints a line as it is."""
  console.print(text, highlight=False, markup=False, soft_wrap=True)


@contextlib.contextmanager
def progress(console: rich.console.Console, *, lines: bool = True) -> Iterator[Callable[[str], None]]:
  """Yields a function that takes a line before each piece of work, which a terminal shows meanwhile.

  Args:
    console: where to show it.
    lines: whether each line is printed where there is no terminal.
  """
  if not console.is_terminal:
    yield lambda line: say(console, line) if lines else None
    return
  with console.status("begins") as status:
    yield lambda line: status.update(rich.markup.escape(line))


def write(
  console: rich.console.Console, what: str, flag: str, name: str | None, save: Callable[[str], object]
) -> None:
  """Writes the file that a flag names, if it is given, and says that it is there.

  Raises:
    ConfigError: if it cannot be written; names the flag.
  """
  if not name:
    return
  try:
    save(name)
  except FileExistsError as error:
    raise ConfigError(f"{flag} {name}: exists; it is not overwritten, choose another name") from error
  except OSError as error:
    raise ConfigError(f"{flag} {name}: cannot be written ({error.strerror})") from error
  say(console, f"{what}: {name}")


def write_config(
  console: rich.console.Console, flag: str, name: str | None, policy: str, tree: Mapping[str, Any]
) -> None:
  """Writes a new file with a policy, as YAML, and the rest of a config's tree, as `write` does."""
  # A run of another policy is another run.
  rest = {key: value for key, value in tree.items() if key not in ("policy", "out")}

  def save(path: str) -> None:
    with pathlib.Path(path).open("x") as file:
      file.write(policy + yaml.safe_dump(rest, sort_keys=False))

  write(console, "the config with this policy", flag, name, save)
