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

_CONFIG = "a YAML file, a run directory, or an example that comes with mpjax (default: gpt_stdlib)"
_OVERRIDES = "dotted keys that override the file"
_SEVERAL = f"{_OVERRIDES}; policy=a,b,c for several policies"


_PLUGIN = {
  "--plugin FILE.py|package.module...": "first run this code, which registers models, data and optimisers of "
  "your own; may be repeated"
}
_TABLES = {"--table NAME": "print one of the tables that the answer names", "--all": "print every table"}
_ONE_OF = {"--all": "--table", "--cheapest": "--fit"}  # flags that exclude another
_TARGET = {"target": "target=h200 or target=v5e:2x4 for a device"}
_TRAINED = {
  "checkpoint": "checkpoint=RUN or RUN/checkpoints/STEP for trained parameters",
  "steps": "steps=N: first train N steps (10 without a checkpoint)",
  "batches": "batches=N: look at N batches (2)",
}
# How the value of a command's own key is written, what reads it, and what it is. Others are text.
_VALUES: dict[str, tuple[str, Any, str]] = {
  "steps": (r"\d+", int, "a whole number"),
  "batches": (r"[1-9]\d*", int, "a whole number from 1 on"),
  "keep": (r"0?\.\d+", float, "a share between 0 and 1, such as 0.999"),
}


class Command(NamedTuple):
  """A command.

  Attributes:
    does: what it does.
    more: what its own help adds.
    example: some of its arguments.
    extras: the extras of the package that it needs.
    first: its first argument: `config`, which has a default; `directory`; or nothing.
    overrides: what the `key=value` arguments after it are.
    keys: the help of each of its own keys.
    flags: the help of each of its flags, but for `--plugin`. A flag's value may be left out (`--hunt [FILE]`)
      or be one of several (`--plugin FILE...`); N is a whole number.
  """

  does: str
  more: str = ""
  example: str = ""
  extras: str = "train"
  first: str = "config"
  overrides: str = _OVERRIDES
  keys: Mapping[str, str] = MappingProxyType({})
  flags: Mapping[str, str] = MappingProxyType({})


COMMANDS = {
  "train": Command(
    "train a config's model, or resume an unfinished run",
    "Each of several processes runs the command; Slurm, Kubernetes, Cloud TPU and Open MPI need no flags.",
    "gpt_stdlib policy=fp16 train.steps=200 out=runs/x",
    flags={
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
    flags=_TABLES,
  ),
  "plan": Command(
    "say what a training step costs on a device that you need not have",
    "Memory by part, matrix units, collectives, an estimate of the time and a lower bound of it.",
    "gpt_stdlib policy=fp32,bf16,fp16 target=h200",
    "train,plan",
    overrides=_SEVERAL,
    keys=_TARGET,
    flags={
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
    keys={**_TRAINED, "keep": "keep=0.999: the share of gradients that a loss scale should keep"},
    flags={
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
    overrides=f"{_OVERRIDES}; policy=a,b,c: choose only among these",
    keys=_TARGET | _TRAINED,
    flags={
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
    overrides="by default the compute dtype, the best step and the average",
    keys={
      "dtype": "dtype=bf16",
      "step": "step=best|latest|N",
      "weights": "weights=average|last",
      "out": "out=FILE",
    },
  ),
  "env": Command(
    "show versions, devices and flags, for a bug report",
    example="--json > env.json",
    extras="",
    first="",
    flags={"--json": "print JSON"},
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
    flag, known = unknown[0].partition("=")[0], [written.partition(" ")[0] for written in command.flags]
    near = [f": did you mean {close}?" for close in difflib.get_close_matches(flag, known, 1, 0.7)]
    usual = f": {prog} --help says what it takes, such as {command.example}"
    parser.exit(2, f"error: {prog} has no option {flag}{instead(flag, name) or (near or [usual])[0]}\n")
  if not command.first:
    return options
  pairs = with_default(options).overrides
  options.own, options.overrides = {}, []
  for pair in pairs:
    key, equals, text = pair.partition("=")
    if equals and key in command.keys:
      pattern, read, expected = _VALUES.get(key, (".*", str, "text"))
      if not re.fullmatch(pattern, text):
        raise ConfigError(f"{pair}: expected {expected}")
      options.own[key] = read(text)
    elif command.first == "directory":
      raise ConfigError(f"unknown key {key!r}: expected {', '.join(command.keys)}")
    else:
      options.overrides.append(pair)
  return options


def add_arguments(parser: argparse.ArgumentParser, command: Command) -> None:
  """Adds the arguments of a command to a parser."""
  if command.first:
    if command.first == "config":
      parser.add_argument("config", nargs="?", default="gpt_stdlib", help=_CONFIG)
    else:
      parser.add_argument("directory", help="a run directory")
    text = "; ".join([command.overrides, *command.keys.values()])
    parser.add_argument("overrides", nargs="*", metavar="key=value", help=text)
  groups: dict[str, Any] = {}
  for written, text in {**(_PLUGIN if command.first else {}), **command.flags}.items():
    flag, _, value = written.partition(" ")
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
