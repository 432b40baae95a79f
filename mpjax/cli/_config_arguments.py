"""What several commands do with their arguments: numbers, and files to write."""

from __future__ import annotations

import contextlib
import pathlib
from collections.abc import Iterator, Mapping

from mpjax.train import ConfigError


def whole_number(own: Mapping[str, str], key: str, default: int, least: int) -> int:
  """Returns a command's option as a number.

  Raises:
    ConfigError: if it is not a whole number, or below `least`.
  """
  text = own.get(key, str(default))
  if not text.isdecimal() or int(text) < least:
    raise ConfigError(f"{key}={text}: expected a whole number from {least} on")
  return int(text)


def check_picture(name: str | None) -> None:
  """Raises `ConfigError` for a `--picture` of another kind than those that are drawn."""
  if name is not None and not name.lower().endswith((".png", ".svg")):
    raise ConfigError(f"--picture {name}: expected a file that ends in .png or .svg")


def write_file(flag: str, name: str, text: str, *, new: bool = False) -> None:
  """Writes a file that a flag names.

  Args:
    flag: the flag.
    name: the path of the file.
    text: its content.
    new: whether the file must not exist.

  Raises:
    ConfigError: if it cannot be written.
  """
  with writing(flag, name), pathlib.Path(name).open("x" if new else "w") as file:
    file.write(text)


@contextlib.contextmanager
def writing(flag: str, name: str) -> Iterator[None]:
  """Turns an error of writing a file into a `ConfigError` that begins with the flag that names it."""
  try:
    yield
  except FileExistsError as error:
    raise ConfigError(f"{flag} {name}: exists; it is not overwritten, choose another name") from error
  except OSError as error:
    raise ConfigError(f"{flag} {name}: cannot be written ({error.strerror})") from error
