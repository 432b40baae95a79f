"""What each command takes: a row of `COMMANDS`, from which its help, its parser and its advice are made.

Does not import JAX, so that help and errors about arguments are fast and need no extra.
"""

from __future__ import annotations

import argparse
import pathlib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from mpjax._gone import instead
from mpjax.registry._names import ConfigError, keys_meant, nearest

_CONFIG = "a YAML file, or the name of an example that comes with mpjax (default: gpt_stdlib)"
_OVERRIDES = "dotted keys that override the file"
_SEVERAL = f"{_OVERRIDES}; policy=a,b,c for several policies"


class Key(NamedTuple):
  """A command's own key: a help, and what reads its value."""

  help: str
  read: Callable[[str], Any] = str


def _whole(least: int) -> Callable[[str], int]:
  def read(text: str) -> int:
    if not text.isdecimal() or int(text) < least:
      raise ConfigError(f"expected a whole number from {least} on")
    return int(text)

  return read


def _share(text: str) -> float:
  if not re.fullmatch(r"0?\.\d*[1-9]\d*", text):
    raise ConfigError("expected a share between 0 and 1, such as 0.999")
  return float(text)


_TARGET = {"target": Key("target=h200 or target=v5e:2x4 for a device")}
_BATCHES = {"batches": Key("batches=N: inspect N batches (2)", _whole(1))}
_TRAINED = {
  "checkpoint": Key("checkpoint=RUN or RUN/checkpoints/STEP for trained parameters"),
  "steps": Key("steps=N: first train N steps (10 without a checkpoint)", _whole(0)),
}

Flags = dict[str, dict[str, Any]]


def _flag(text: str, metavar: str | None = None, **options: Any) -> dict[str, Any]:
  """Returns a flag with a value, as `argparse` takes it."""
  return {"help": text, "metavar": metavar, **options}


def _switch(text: str, dest: str | None = None, word: str | None = None) -> dict[str, Any]:
  """Returns a flag without a value; it sets `dest` to a word if there is one."""
  if word is None:
    return {"help": text, "action": "store_true"}
  return {"help": text, "action": "store_const", "dest": dest, "const": word}


_PLUGIN: Flags = {
  "--plugin": _flag(
    "first run this code, which registers models, data and optimisers of your own; may be repeated",
    "FILE.py|package.module",
    action="append",
    default=[],
  )
}
_TABLES: Flags = {
  "--table": _flag("print one of the tables that the answer names", "NAME"),
  "--all": _switch("print every table", "table", "all"),
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
    keys: those that are the command's own.
    flags: by flag, what `argparse` takes. Flags with the same `dest` exclude each other.
  """

  does: str
  more: str = ""
  example: str = ""
  extras: str = "train"
  first: str = "config"
  first_help: str = _CONFIG
  overrides: str = _OVERRIDES
  keys: Mapping[str, Key] = {}
  flags: Flags = _PLUGIN


COMMANDS = {
  "train": Command(
    "train a config's model, or resume an unfinished run",
    "Each of several processes runs the command; Slurm, Kubernetes, Cloud TPU and Open MPI need no flags.",
    "gpt_stdlib policy=fp16 train.steps=200 out=runs/x",
    flags={
      **_PLUGIN,
      "--coordinator": _flag("address of process 0, with a port that is free there", "HOST:PORT"),
      "--num-processes": _flag("number of processes", "N", type=int),
      "--process-id": _flag("number of this process, from 0", "I", type=int),
    },
  ),
  "explain": Command(
    "say what runs in which dtype under a policy, and why",
    "Tables have the details. Computes nothing.",
    "gpt_stdlib policy=bf16,fp16",
    overrides=_SEVERAL,
    flags={**_PLUGIN, **_TABLES},
  ),
  "plan": Command(
    "say what a training step costs on a device that you need not have",
    "Memory by part, matrix units, collectives, an estimate of the time and a lower bound of it.",
    "gpt_stdlib policy=fp32,bf16,fp16 target=h200 --picture plan.png",
    "train,plan",
    overrides=_SEVERAL,
    keys=_TARGET,
    flags={
      **_PLUGIN,
      "--fit": _switch("find the largest batch that fits, for each policy", "search", "fit"),
      "--cheapest": _switch(
        "find the policy, recompute and gather that fit into memory with the shortest time",
        "search",
        "cheapest",
      ),
      "--memory": _flag("memory to fit, such as 80GB or 16GiB; the target's by default"),
      "--analytic": _switch("do not compile: faster, less exact"),
      "--tokens": _switch("also tokens (or images) a second and model FLOPs utilisation"),
      **_TABLES,
      "--json": _flag("write the plans as JSON", "FILE"),
      "--picture": _flag("write bars of memory, .png or .svg", "FILE"),
    },
  ),
  "numerics": Command(
    "show what a policy does to the numbers of a run, and what to change",
    "Magnitudes, losses in each format, errors against float32 by module, and a better policy.",
    "runs/x policy=fp16 batches=4",
    "train,numerics",
    first_help=f"a run directory, {_CONFIG}",
    keys={
      **_TRAINED,
      **_BATCHES,
      "keep": Key("keep=0.999: the share of gradients that a loss scale should keep", _share),
    },
    flags={
      **_PLUGIN,
      "--html": _flag("file of the page; by default in the run directory, or in runs/numerics", "FILE"),
      "--json": _flag("write the report as JSON", "FILE"),
      "--apply": _flag("write the config with the advised policy", "FILE"),
      "--hunt": _flag(
        "find the first operation that gives NaN or infinity on a saved batch; by default the newest batch "
        "in the checkpoint's run directory",
        "BATCH.npz",
        nargs="?",
        const="",
      ),
      **_TABLES,
      "--formats": _switch("print the table of number formats, and stop"),
    },
  ),
  "tune": Command(
    "find the cheapest policy that is good enough",
    "Compares the cost on the target and the error of the gradients; tries policies by module if no preset "
    "is good enough.",
    "gpt_stdlib target=h200 --out tuned.yaml",
    first_help=f"a run directory, {_CONFIG}",
    overrides=f"{_OVERRIDES}; policy=a,b,c: choose only among these",
    keys={**_TARGET, **_TRAINED, **_BATCHES},
    flags={
      **_PLUGIN,
      "--for": _flag("cost to minimise (time)", dest="objective", choices=("time", "memory"), default="time"),
      "--tolerance": _flag(
        "largest error of the gradient: 0.01 (of its norm) or '0.2 noise'; default '0.1 noise'"
      ),
      "--out": _flag("write the config with the policy", "FILE"),
      **_TABLES,
      "--json": _flag("write all trials as JSON", "FILE"),
    },
  ),
  "export": Command(
    "write the parameters of a run as safetensors",
    example="runs/x dtype=bf16",
    first="directory",
    first_help="a run directory",
    overrides="by default the compute dtype, the best step and the average",
    keys={
      "dtype": Key("dtype=bf16"),
      "step": Key("step=best|latest|N"),
      "weights": Key("weights=average|last"),
      "out": Key("out=FILE"),
    },
  ),
  "env": Command(
    "show versions, devices and flags, for a bug report",
    example="--json > env.json",
    extras="",
    first="",
    flags={"--json": _switch("print JSON")},
  ),
  "bench": Command("measure mpjax against its alternatives (in a checkout)", extras="bench"),
}


def parse(name: str, arguments: Sequence[str], prog: str) -> argparse.Namespace:
  """Returns the parsed arguments of a command. Options may be anywhere; the config has a default.

  `own` holds the values of the command's own keys, and `overrides` the other `key=value` arguments.

  Raises:
    SystemExit: after the help (status 0), or one line about a wrong argument (status 2).
    ConfigError: for a wrong value of one of the command's own keys.
  """
  command = COMMANDS[name]
  description = f"{command.does[0].upper()}{command.does[1:]}. {command.more}"
  parser = argparse.ArgumentParser(prog, description=description, epilog=f"example: {prog} {command.example}")
  add_arguments(parser, command)
  options, unknown = parser.parse_known_intermixed_args(arguments)
  if unknown and not unknown[0].startswith("-"):
    parser.error(f"unrecognized arguments: {' '.join(unknown)}")
  if unknown:
    parser.exit(2, f"error: {prog} has no option {_advice(name, prog, unknown[0], arguments)}\n")
  if command.first:
    pairs = with_default(options).overrides
    options.own, options.overrides = {}, []
    for pair in pairs:
      key, equals, text = pair.partition("=")
      if equals and key in command.keys:
        try:
          options.own[key] = command.keys[key].read(text)
        except ConfigError as error:
          raise ConfigError(f"{pair}: {error}") from error
      elif command.first == "directory":
        raise ConfigError(f"unknown key {key!r}: expected {', '.join(command.keys)}")
      else:
        options.overrides.append(pair)
  return options


def add_arguments(parser: argparse.ArgumentParser, command: Command) -> None:
  """Adds the arguments of a command to a parser."""
  if command.first:
    nargs, default = ("?", "gpt_stdlib") if command.first == "config" else (None, None)
    parser.add_argument(command.first, nargs=nargs, default=default, help=command.first_help)
    text = "; ".join([command.overrides, *(key.help for key in command.keys.values())])
    parser.add_argument("overrides", nargs="*", metavar="key=value", help=text)
  groups: dict[str, Any] = {}
  for flag, options in command.flags.items():
    dest = options.get("dest", flag[2:])
    if dest not in groups:
      groups[dest] = parser.add_mutually_exclusive_group()
    groups[dest].add_argument(flag, **options)


def with_default(options: argparse.Namespace) -> argparse.Namespace:
  """Returns parsed arguments with the default config if the first argument is a `key=value`."""
  first = getattr(options, "config", "")
  if "=" in first and not pathlib.Path(first).exists():
    options.config, options.overrides = "gpt_stdlib", [first, *options.overrides]
  return options


def _advice(name: str, prog: str, flag: str, arguments: Sequence[str]) -> str:
  """Returns an unknown flag, and what to write in its place. Imports JAX to know the keys of a config."""
  command = COMMANDS[name]
  flag, equals, value = flag.partition("=")
  if not equals:
    after = arguments[arguments.index(flag) + 1 :]
    value = after[0] if after and not after[0].startswith("-") else "..."
  if went := instead(flag, name):
    return f"{flag}{went}"
  keys = keys_meant(flag.lstrip("-"), command.keys)
  if not keys and command.first == "config":
    from mpjax.registry._kinds import dotted_keys
    from mpjax.train import Config

    keys = keys_meant(flag.lstrip("-"), dict.fromkeys(dotted_keys(Config)))
  if keys:
    return f"{flag}: write {' or '.join(f'{key}={value}' for key in keys)}"
  near = nearest(flag, command.flags)
  return f"{flag}: did you mean {near[0]}?" if near else f"{flag}: {prog} --help says what it takes"
