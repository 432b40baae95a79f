# PYTHON_ARGCOMPLETE_OK
"""The commands of mpjax: `mpjax train`, `mpjax plan` and so on, also as `python -m mpjax`.

Help, the version, completion and errors about flags do not import JAX, which takes most of a second.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import sys
from collections.abc import Sequence

from mpjax._render.install_text import pip_install
from mpjax._version import __version__
from mpjax.cli._exit_status import outcome_of
from mpjax.cli._parsers import parse
from mpjax.registry._names import nearest
from mpjax.train._interrupt import Interrupt

__all__ = ["COMMANDS", "main", "run_command"]

# What each command does, and which extras it needs.
COMMANDS = {
  "train": ("train a config's model, or resume an unfinished run", "train"),
  "explain": ("say what runs in which dtype under a policy, and why", "train"),
  "plan": ("say what a training step costs on a device that you need not have", "train,plan"),
  "numerics": ("show what a policy does to the numbers of a run, and what to change", "train,numerics"),
  "tune": ("find the cheapest policy that is good enough", "train"),
  "export": ("write the parameters of a run as safetensors", "train"),
  "env": ("show versions, devices and flags, for a bug report", ""),
  "bench": ("measure mpjax against its alternatives (in a checkout)", "bench"),
}
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

mpjax COMMAND --help describes a command; mpjax --version prints the version.
For completion with Tab: eval "$(register-python-argcomplete mpjax)\""""


def main(arguments: Sequence[str] | None = None) -> int:
  """Runs `mpjax COMMAND ARGS` and returns its exit status.

  Args:
    arguments: the command and its arguments; those of this process by default.
  """
  if "_ARGCOMPLETE" in os.environ:  # a shell asks for completions
    importlib.import_module("mpjax.cli._completion").complete()
  arguments = sys.argv[1:] if arguments is None else arguments
  if not arguments or arguments[0] in ("-h", "--help"):
    print(_help(), file=sys.stdout if arguments else sys.stderr)
    return 0 if arguments else 2
  name, *rest = arguments
  if name == "--version":
    print(f"mpjax {__version__}")
    return 0
  if name not in COMMANDS:
    near = "".join(f"; did you mean {command!r}?" for command in nearest(name, COMMANDS))
    print(f"error: unknown command {name!r}: expected one of {', '.join(COMMANDS)}{near}", file=sys.stderr)
    return 2
  return run_command(name, rest, f"mpjax {name}")


def run_command(name: str, arguments: Sequence[str], prog: str) -> int:
  """Runs one command and returns its exit status.

  Args:
    name: one of `COMMANDS`.
    arguments: the arguments of the command.
    prog: the command as the user called it; its help shows this.
  """
  try:
    if name == "bench":  # it parses its own arguments
      return importlib.import_module("mpjax.cli._bench_command").run(arguments, prog)
    options = parse(name, arguments, prog)
    # A run counts a signal from here on, also while JAX is imported.
    with Interrupt() if name == "train" else contextlib.nullcontext() as options.interrupt:
      command = importlib.import_module(f"mpjax.cli._{name}_command")
      _silence()
      return command.run(options) or 0
  except ModuleNotFoundError as error:
    package = (error.name or "").partition(".")[0]
    if package in ("", "mpjax"):
      raise
    extras = COMMANDS[name][1]
    print(f"error: {prog} needs {package}: {pip_install(extras)}", file=sys.stderr)
    return 2
  except BaseException as error:
    outcome = outcome_of(error)
    if outcome is None:
      raise
    status, line = outcome
    print(line, file=sys.stderr)
    return status


def _silence() -> None:
  """Keeps libraries from logging errors that they also raise, since a command reports these in one line."""
  for library in ("absl", "asyncio"):  # used by orbax
    logging.getLogger(library).setLevel(logging.CRITICAL)


def _help() -> str:
  width = max(map(len, COMMANDS))
  lines = [f"  {name:{width}}  {text}" for name, (text, _) in COMMANDS.items()]
  return _HELP.format(commands="\n".join(lines))
