"""The commands of mpjax: `mpjax train`, `mpjax plan` and so on, also as `python -m mpjax`."""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Sequence

import mpjax
from mpjax._render.install_text import pip_install
from mpjax.dtypes import did_you_mean

__all__ = ["COMMANDS", "main", "run_command"]

# What each command does, and the extras of the package that it needs.
COMMANDS = {
  "train": ("train what a config says, or resume an unfinished run", "train"),
  "plan": ("say what a training step costs on a device that need not be there", "train,plan"),
  "explain": ("say what runs in which dtype under a policy, and why", "train"),
  "numerics": ("show what a policy does to the numbers of a run, and what to change", "train,numerics"),
  "tune": ("find the cheapest policy that is good enough, and prove it", "train"),
  "export": ("write the parameters of a run as safetensors", "train"),
  "env": ("say which versions, devices and flags are here, for a report of a fault", ""),
  "bench": ("measure mpjax beside what one would use instead (from a checkout)", "bench"),
}


def main(arguments: Sequence[str] | None = None) -> int:
  """Runs `mpjax COMMAND ARGS` and returns its exit status.

  Args:
    arguments: the command and its arguments; those of this process by default.
  """
  arguments = sys.argv[1:] if arguments is None else arguments
  if not arguments or arguments[0] in ("-h", "--help"):
    print(_help(), file=sys.stdout if arguments else sys.stderr)
    return 0 if arguments else 2
  name, *rest = arguments
  if name == "--version":
    print(f"mpjax {mpjax.__version__}")
    return 0
  if name not in COMMANDS:
    expected = f"expected one of {', '.join(COMMANDS)}{did_you_mean(name, COMMANDS)}"
    print(f"error: unknown command {name!r}: {expected}", file=sys.stderr)
    return 2
  return run_command(name, rest, f"mpjax {name}")


def run_command(name: str, arguments: Sequence[str], prog: str) -> int:
  """Runs one command and returns its exit status.

  Args:
    name: one of `COMMANDS`.
    arguments: those of the command.
    prog: how the command was called, as its help shows it.
  """
  try:
    command = importlib.import_module(f"mpjax.cli._{name}_command")
    for library in ("absl", "asyncio"):  # orbax logs what it raises, and a command tells that in one line
      logging.getLogger(library).setLevel(logging.CRITICAL)
    status: int = command.run(arguments, prog)
  except ModuleNotFoundError as error:
    package = (error.name or "").partition(".")[0]
    if package in ("", "mpjax"):
      raise
    extras = COMMANDS[name][1]
    print(f"error: {prog} needs {package}: {pip_install(extras)}", file=sys.stderr)
    return 2
  except KeyboardInterrupt:  # while packages are imported; a command has a line of its own for it
    print("interrupted", file=sys.stderr)
    return 130
  return status


def _help() -> str:
  width = max(map(len, COMMANDS))
  lines = [f"  {name:{width}}  {text}" for name, (text, _) in COMMANDS.items()]
  return "\n".join(
    [
      "usage: mpjax COMMAND ...",
      "",
      "Mixed precision for JAX: one policy from the plan to the trained model.",
      "",
      "commands:",
      *lines,
      "",
      "mpjax COMMAND --help says more of each; mpjax --version prints the version.",
      "example: mpjax train gpt_stdlib policy=fp16 train.steps=200 out=runs/x",
    ]
  )
