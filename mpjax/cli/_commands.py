"""What each command takes: a row of `COMMANDS`, from which its help, its parser and its advice are made.

Does not import JAX, so that help and errors about arguments are fast and need no extra.
"""

from __future__ import annotations

import argparse
import difflib
import pathlib
import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from mpjax._gone import instead
from mpjax._mistakes import ConfigError

_CONFIG = "a YAML file, or the name of an example that comes with mpjax (default: gpt_stdlib)"
_OVERRIDES = "dotted keys that override the file"
_SEVERAL = f"{_OVERRIDES}; policy=a,b,c for several policies"


_PLUGIN = {
  "--plugin FILE.py|package.module...": "first run this code, which registers models, data and optimisers of "
  "your own; may be repeated"
}
_TABLES = {"--table NAME": "print one of the tables that the answer names", "--all": "print every table"}
_ONE_OF = {"--all": "--table", "--cheapest": "--fit"}  # flags that exclude another
_TARGET = {"target=DEVICE": "target=h200 or target=v5e:2x4 for a device"}
# How a value is written, what reads it, and its name.
_VALUES: dict[str, tuple[str, Any, str]] = {
  "N": (r"\d+", int, "a whole number"),
  "COUNT": (r"[1-9]\d*", int, "a whole number from 1 on"),
  "SHARE": (r"0?\.\d+", float, "a share between 0 and 1, such as 0.999"),
}
_TRAINED = {
  "checkpoint=RUN": "checkpoint=RUN or RUN/checkpoints/STEP for trained parameters",
  "steps=N": "steps=N: first train N steps (10 without a checkpoint)",
  "batches=COUNT": "batches=N: look at N batches (2)",
}


class Command(NamedTuple):
  """A command.

  Attributes:
    does: what it does.
    more: what its own help adds.
    example: some of its arguments.
    extras: the extras of the package that it needs.
    first: its first argument: `config`, which has a default; `directory`; or nothing.
    first_help: what that may be.
    overrides: what the `key=value` arguments after it are.
    takes: the help of each of its own keys, `steps=N`, and of its flags. A flag's value may be left out
      (`--hunt [FILE]`) or be one of several (`--plugin FILE...`); N is a whole number.
  """

  does: str
  more: str = ""
  example: str = ""
  extras: str = "train"
  first: str = "config"
  first_help: str = _CONFIG
  overrides: str = _OVERRIDES
  takes: Mapping[str, str] = MappingProxyType({})

  @property
  def keys(self) -> dict[str, str]:
    """The command's own keys, each with what its value is."""
    return {key: value for key, sign, value in (written.partition("=") for written in self.takes) if sign}

  @property
  def flags(self) -> dict[str, tuple[str, str]]:
    """The value of each of the command's flags, and its help; with a first argument also `--plugin`."""
    takes = {**(_PLUGIN if self.first else {}), **self.takes}
    parts = ((*written.partition(" ")[::2], text) for written, text in takes.items())
    return {flag: (value, text) for flag, value, text in parts if flag.startswith("--")}


COMMANDS = {
  "train": Command(
    "train a config's model, or resume an unfinished run",
    "Each of several processes runs the command; Slurm, Kubernetes, Cloud TPU and Open MPI need no flags.",
    "gpt_stdlib policy=fp16 train.steps=200 out=runs/x",
    takes={
      "--coordinator HOST:PORT": "address of process 0, with a port that is free there",
      "--num-processes N": "number of processes",
      "--process-id N": "number of this process, from 0",
    },
  ),
  "explain": Command(
    "say what runs in which dtype under a policy, and why",
    "Tables have the details. Computes nothing.",
    "gpt_stdlib policy=bf16,fp16",
    overrides=_SEVERAL,
    takes=_TABLES,
  ),
  "plan": Command(
    "say what a training step costs on a device that you need not have",
    "Memory by part, matrix units, collectives, an estimate of the time and a lower bound of it.",
    "gpt_stdlib policy=fp32,bf16,fp16 target=h200",
    "train,plan",
    overrides=_SEVERAL,
    takes={
      **_TARGET,
      "--fit": "find the largest batch that fits, for each policy",
      "--cheapest": "find the policy, recompute and gather that fit into memory with the shortest time",
      "--memory SIZE": "memory to fit, such as 80GB or 16GiB; the target's by default",
      "--analytic": "do not compile: faster, less exact",
      "--tokens": "also tokens (or images) a second and model FLOPs utilisation",
      **_TABLES,
      "--json FILE": "write the plans as JSON",
    },
  ),
  "numerics": Command(
    "show what a policy does to the numbers of a run, and what to change",
    "Magnitudes, losses in each format, errors against float32 by module, and a better policy.",
    "runs/x policy=fp16 batches=4",
    "train,numerics",
    first_help=f"a run directory, {_CONFIG}",
    takes={
      **_TRAINED,
      "keep=SHARE": "keep=0.999: the share of gradients that a loss scale should keep",
      "--html FILE": "file of the page; by default in the run directory, or in runs/numerics",
      "--json FILE": "write the report as JSON",
      "--apply FILE": "write the config with the advised policy",
      "--hunt [BATCH.npz]": "find the first operation that gives NaN or infinity on a saved batch, by "
      "default the newest of the checkpoint's run",
      **_TABLES,
      "--formats": "print the table of number formats, and stop",
    },
  ),
  "tune": Command(
    "find the cheapest policy that is good enough",
    "Compares the cost on the target and the error of the gradients; tries policies by module if no preset "
    "is good enough.",
    "gpt_stdlib target=h200 --out tuned.yaml",
    first_help=f"a run directory, {_CONFIG}",
    overrides=f"{_OVERRIDES}; policy=a,b,c: choose only among these",
    takes={
      **_TARGET,
      **_TRAINED,
      "--for time|memory": "cost to minimise (time)",
      "--tolerance ERROR": "largest error of the gradient: 0.01 (of its norm) or '0.2 noise'; default "
      "'0.1 noise'",
      "--out FILE": "write the config with the policy",
      **_TABLES,
      "--json FILE": "write all trials as JSON",
    },
  ),
  "export": Command(
    "write the parameters of a run as safetensors",
    example="runs/x dtype=bf16",
    first="directory",
    first_help="a run directory",
    overrides="by default the compute dtype, the best step and the average",
    takes={
      "dtype=DTYPE": "dtype=bf16",
      "step=STEP": "step=best|latest|N",
      "weights=WHICH": "weights=average|last",
      "out=FILE": "out=FILE",
    },
  ),
  "env": Command(
    "show versions, devices and flags, for a bug report",
    example="--json > env.json",
    extras="",
    first="",
    takes={"--json": "print JSON"},
  ),
  "bench": Command("measure mpjax against its alternatives (in a checkout)", extras="bench"),
}


def parse(name: str, arguments: Sequence[str], prog: str) -> argparse.Namespace:
  """Returns the parsed arguments of a command. Options may be anywhere; the config has a default.

  `own` holds the values of the command's own keys, and `overrides` the other `key=value` arguments. Ends with
  status 0 after the help, or 2 after one line about a wrong argument.
  """
  command = COMMANDS[name]
  description = f"{command.does[0].upper()}{command.does[1:]}. {command.more}"
  parser = argparse.ArgumentParser(prog, description=description, epilog=f"example: {prog} {command.example}")
  add_arguments(parser, command)
  options, unknown = parser.parse_known_intermixed_args(arguments)
  if unknown and not unknown[0].startswith("-"):
    parser.error(f"unrecognized arguments: {' '.join(unknown)}")
  if unknown:
    flag = unknown[0].partition("=")[0]
    near = [f": did you mean {close}?" for close in difflib.get_close_matches(flag, command.flags, 1, 0.7)]
    usual = f": {prog} --help says what it takes, such as {command.example}"
    parser.exit(2, f"error: {prog} has no option {flag}{instead(flag, name) or (near or [usual])[0]}\n")
  if not command.first:
    return options
  pairs = with_default(options).overrides
  options.own, options.overrides = {}, []
  for pair in pairs:
    key, equals, text = pair.partition("=")
    if equals and key in command.keys:
      options.own[key] = _value(pair, command.keys[key], text)
    elif command.first == "directory":
      raise ConfigError(f"unknown key {key!r}: expected {', '.join(command.keys)}")
    else:
      options.overrides.append(pair)
  return options


def _value(pair: str, kind: str, text: str) -> Any:
  pattern, read, expected = _VALUES.get(kind, (".*", str, "text"))
  if not re.fullmatch(pattern, text):
    raise ConfigError(f"{pair}: expected {expected}")
  return read(text)


def add_arguments(parser: argparse.ArgumentParser, command: Command) -> None:
  """Adds the arguments of a command to a parser."""
  if command.first:
    nargs, default = ("?", "gpt_stdlib") if command.first == "config" else (None, None)
    parser.add_argument(command.first, nargs=nargs, default=default, help=command.first_help)
    own = [text for written, text in command.takes.items() if not written.startswith("--")]
    text = "; ".join([command.overrides, *own])
    parser.add_argument("overrides", nargs="*", metavar="key=value", help=text)
  groups: dict[str, Any] = {}
  for flag, (value, text) in command.flags.items():
    if (one := _ONE_OF.get(flag, flag)) not in groups:
      groups[one] = parser.add_mutually_exclusive_group()
    group = groups[one]
    if not value:
      group.add_argument(flag, help=text, action="store_true")
    elif value.endswith("..."):
      group.add_argument(flag, help=text, metavar=value[:-3], action="append", default=[])
    elif value.startswith("["):
      group.add_argument(flag, help=text, metavar=value[1:-1], nargs="?", const="")
    elif "|" in value:
      group.add_argument(flag, help=text, choices=value.split("|"))
    else:
      group.add_argument(flag, help=text, metavar=value, type=int if value == "N" else str)


def with_default(options: argparse.Namespace) -> argparse.Namespace:
  """Returns parsed arguments with the default config if the first argument is a `key=value`."""
  first = getattr(options, "config", "")
  if "=" in first and not pathlib.Path(first).exists():
    options.config, options.overrides = "gpt_stdlib", [first, *options.overrides]
  return options
