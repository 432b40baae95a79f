"""The commands of mpjax: `mpjax train`, `mpjax plan` and so on, also as `python -m mpjax`.

Help, the version and most errors about arguments do not import JAX, which takes most of a second.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib
import logging
import pathlib
import sys
from collections.abc import Sequence

from mpjax._render.plain_text import pip_install
from mpjax._version import __version__
from mpjax.cli._commands import COMMANDS, parse
from mpjax.train._errors import Interrupt, outcome_of

__all__ = ["COMMANDS", "main", "run_command"]

_HELP = """\
usage: mpjax COMMAND ...

Mixed precision for JAX: try a policy, look at what it does, train with it.

examples:
  mpjax train                                train a small GPT on this machine
  mpjax train gpt_stdlib policy=fp16         the same with another policy
  mpjax explain gpt_stdlib policy=bf16,fp16  compare what runs in which dtype
  mpjax plan gpt_stdlib target=h200 --fit    find the largest batch on an H200
  mpjax numerics runs/gpt_stdlib-fp16        look at the numbers of a run

commands:
{commands}

mpjax COMMAND --help describes a command; mpjax --version prints the version."""


def main(arguments: Sequence[str] | None = None) -> int:
  """Runs `mpjax COMMAND ARGS` and returns its exit status.

  Args:
    arguments: the command and its arguments; those of this process by default.
  """
  arguments = sys.argv[1:] if arguments is None else arguments
  if not arguments or arguments[0] in ("-h", "--help"):
    lines = [f"  {name:8}  {command.does}" for name, command in COMMANDS.items()]
    print(_HELP.format(commands="\n".join(lines)), file=sys.stdout if arguments else sys.stderr)
    return 0 if arguments else 2
  name, *rest = arguments
  if name == "--version":
    print(f"mpjax {__version__}")
    return 0
  if name not in COMMANDS:
    near = "".join(f"; did you mean {command!r}?" for command in difflib.get_close_matches(name, COMMANDS, 1))
    print(f"error: unknown command {name!r}: expected one of {', '.join(COMMANDS)}{near}", file=sys.stderr)
    return 2
  return run_command(name, rest, f"mpjax {name}")


def run_command(name: str, arguments: Sequence[str], prog: str) -> int:
  """Runs one of `COMMANDS` and returns its exit status; its help shows `prog`, as the user called it."""
  try:
    if name == "bench":  # it parses its own arguments
      return _bench(arguments, prog)
    options = parse(name, arguments, prog)
    # A run counts a signal from here on, also while JAX is imported.
    with Interrupt() if name == "train" else contextlib.nullcontext() as options.interrupt:
      command = importlib.import_module(f"mpjax.cli._{name}_command")
      for library in ("absl", "asyncio"):  # used by orbax; they log errors that they also raise
        logging.getLogger(library).setLevel(logging.CRITICAL)
      return command.run(options) or 0
  except ModuleNotFoundError as error:
    package = (error.name or "").partition(".")[0]
    if package in ("", "mpjax"):
      raise
    print(f"error: {prog} needs {package}: {pip_install(COMMANDS[name].extras)}", file=sys.stderr)
    return 2
  except BaseException as error:
    outcome = outcome_of(error)
    if outcome is None:
      raise
    status, line = outcome
    print(line, file=sys.stderr)
    return status


def _bench(arguments: Sequence[str], prog: str) -> int:
  """Runs the `benchmarks` of the checkout around the package or in this folder; the wheel has none."""
  for root in (pathlib.Path(__file__).resolve().parents[2], pathlib.Path.cwd()):
    if (root / "pyproject.toml").is_file() and (root / "benchmarks" / "__main__.py").is_file():
      sys.path.insert(0, str(root))
      status: int = importlib.import_module("benchmarks.__main__").main(list(arguments), prog)
      return status
  print(f"error: {prog}: run it from a checkout of mpjax, which has the folder benchmarks/", file=sys.stderr)
  return 2
