"""The arguments, flags and own keys of each command.

Does not import JAX, so that help, completion and errors about flags are fast and need no extra.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence

from mpjax._gone import instead
from mpjax.cli._config_arguments import add_config, add_plugin, add_tables, with_default
from mpjax.registry._names import keys_meant, nearest

# The keys of `key=value` arguments that belong to a command, not to its config.
KEYS: dict[str, tuple[str, ...]] = {
  "plan": ("target",),
  "numerics": ("checkpoint", "steps", "batches", "keep"),
  "tune": ("target", "checkpoint", "steps", "batches"),
  "export": ("dtype", "step", "weights", "out"),
}
_SEVERAL = "policy=a,b,c for several policies"


def parse(command: str, arguments: Sequence[str], prog: str) -> argparse.Namespace:
  """Returns the parsed arguments of a command. Options may be anywhere; the config has a default.

  `own` holds the values of the command's own keys, and `overrides` the other `key=value` arguments.

  Raises:
    SystemExit: after the help (status 0), or one line about a wrong argument (status 2).
  """
  parser = make_parser(command, prog)
  options, unknown = parser.parse_known_intermixed_args(arguments)
  if unknown and not unknown[0].startswith("-"):
    parser.error(f"unrecognized arguments: {' '.join(unknown)}")
  if unknown:
    print(f"error: {prog} has no option {_advice(command, parser, unknown[0], arguments)}", file=sys.stderr)
    sys.exit(2)
  if "config" in options:
    options = with_default(options)
  if command in KEYS:
    is_own = lambda pair: "=" in pair and pair.partition("=")[0] in KEYS[command]
    options.own = dict(pair.split("=", 1) for pair in options.overrides if is_own(pair))
    options.overrides = [pair for pair in options.overrides if not is_own(pair)]
  return options


def make_parser(command: str, prog: str) -> argparse.ArgumentParser:
  """Returns the parser of a command; its help shows `prog`."""
  parser = argparse.ArgumentParser(prog=prog)
  ADD[command](parser)
  parser.epilog = f"example: {prog} {_EXAMPLES[command]}"
  return parser


def takes_config(command: str) -> bool:
  """Returns whether a command takes a config and its keys."""
  return command in ("train", "plan", "explain", "numerics", "tune")


def _advice(command: str, parser: argparse.ArgumentParser, flag: str, arguments: Sequence[str]) -> str:
  """Returns an unknown flag, and what to write in its place."""
  flag, equals, value = flag.partition("=")
  if not equals:
    after = arguments[arguments.index(flag) + 1 :]
    value = after[0] if after and not after[0].startswith("-") else "..."
  if went := instead(flag, command):
    return f"{flag}{went}"
  word = flag.lstrip("-")
  keys = keys_meant(word, KEYS.get(command, ()))
  if not keys and takes_config(command):
    keys = keys_meant(word)
  if keys:
    return f"{flag}: write {' or '.join(f'{key}={value}' for key in keys)}"
  near = nearest(flag, parser._option_string_actions)
  return f"{flag}" + (f": did you mean {near[0]}?" if near else f": {parser.prog} --help says what it takes")


def _train(parser: argparse.ArgumentParser) -> None:
  parser.description = "Train the model of a YAML config. The same command again resumes an unfinished run."
  add_config(parser)
  group = parser.add_argument_group(
    "several processes",
    "run the command once for each process; Slurm, Kubernetes, Cloud TPU and Open MPI need no flags",
  )
  group.add_argument(
    "--coordinator", metavar="HOST:PORT", help="address of process 0, with a port that is free there"
  )
  group.add_argument("--num-processes", metavar="N", type=int, help="number of processes")
  group.add_argument("--process-id", metavar="I", type=int, help="number of this process, from 0")


def _plan(parser: argparse.ArgumentParser) -> None:
  parser.description = (
    "Say what a config's training step costs on a device that you need not have: memory by part, matrix "
    "units, collectives, an estimate of the time and a lower bound of it."
  )
  add_config(
    parser,
    overrides=f"dotted keys that override the file; {_SEVERAL}; target=h200 or target=v5e:2x4 for a device",
  )
  search = parser.add_mutually_exclusive_group()
  search.add_argument("--fit", action="store_true", help="find the largest batch that fits, for each policy")
  search.add_argument(
    "--cheapest",
    action="store_true",
    help="find the policy, recompute and gather that fit into memory with the shortest time",
  )
  parser.add_argument("--memory", help="memory to fit, such as 80GB or 16GiB; the target's by default")
  parser.add_argument(
    "--multiple", type=int, help="try only batch sizes that are multiples of this with --fit (64 is faster)"
  )
  parser.add_argument("--analytic", action="store_true", help="do not compile: faster, less exact")
  parser.add_argument(
    "--tokens", action="store_true", help="also tokens (or images) a second and model FLOPs utilisation"
  )
  add_tables(parser)
  parser.add_argument("--json", metavar="FILE", help="write the plans as JSON")
  parser.add_argument("--picture", metavar="FILE", help="write bars of memory, .png or .svg")


def _explain(parser: argparse.ArgumentParser) -> None:
  parser.description = (
    "Say what runs in which dtype under a config's policy, and why. Tables have the details. "
    "Computes nothing."
  )
  add_config(parser, overrides=f"dotted keys that override the file; {_SEVERAL}")
  add_tables(parser, by={"module": "modules", "reason": "float32"})


def _numerics(parser: argparse.ArgumentParser) -> None:
  parser.description = (
    "Show what a policy does to the numbers of a config's training step: magnitudes, losses in each format, "
    "errors against float32 by module, and a better policy."
  )
  add_config(
    parser,
    also=", a run directory",
    overrides="dotted keys that override the file; checkpoint=RUN or RUN/checkpoints/STEP for trained "
    "parameters; steps=N: first train N steps (10 without a checkpoint); batches=N: inspect N batches (2); "
    "keep=0.999: the share of gradients that a loss scale should keep",
  )
  parser.add_argument(
    "--html", metavar="FILE", help="file of the page; by default in the run directory, or in runs/numerics"
  )
  parser.add_argument("--json", metavar="FILE", help="write the report as JSON")
  parser.add_argument("--apply", metavar="FILE", help="write the config with the advised policy")
  parser.add_argument(
    "--hunt",
    nargs="?",
    const="",
    metavar="BATCH.npz",
    help="find the first operation that gives NaN or infinity on a saved batch; by default the newest batch "
    "in the checkpoint's run directory",
  )
  add_tables(parser, by={"module": "modules"})
  parser.add_argument("--formats", action="store_true", help="print the table of number formats, and stop")


def _tune(parser: argparse.ArgumentParser) -> None:
  parser.description = (
    "Find the cheapest policy whose gradients are as good as float32's. Compares the cost on the target and "
    "the error of the gradients; tries policies by module if no preset is good enough."
  )
  add_config(
    parser,
    also=", a run directory",
    overrides="dotted keys that override the file; target=h200, v5e and so on; policy=a,b,c: choose only "
    "among these; checkpoint=RUN or RUN/checkpoints/STEP for trained parameters; steps=N: first train N "
    "steps (10 without a checkpoint); batches=N: measure on N batches (2)",
  )
  parser.add_argument(
    "--for", dest="objective", choices=("time", "memory"), default="time", help="cost to minimise (time)"
  )
  parser.add_argument(
    "--tolerance",
    help="largest error of the gradient: 0.01 (of its norm) or '0.2 noise'; default '0.1 noise'",
  )
  parser.add_argument("--out", metavar="FILE", help="write the config with the policy")
  add_tables(parser)
  parser.add_argument("--json", metavar="FILE", help="write all trials as JSON")


def _export(parser: argparse.ArgumentParser) -> None:
  parser.description = "Write the parameters of a run's checkpoint as safetensors."
  parser.add_argument("directory", help="a run directory")
  parser.add_argument(
    "overrides",
    nargs="*",
    metavar="key=value",
    help="dtype=bf16, step=best|latest|N, weights=average|last, out=FILE; by default the compute dtype, the "
    "best step and the average",
  )
  add_plugin(parser)


def _env(parser: argparse.ArgumentParser) -> None:
  parser.description = "Show versions, devices and flags, for a bug report."
  parser.add_argument("--json", action="store_true", help="print JSON")


# Adds a command's description and arguments to a parser.
ADD: dict[str, Callable[[argparse.ArgumentParser], None]] = {
  "train": _train,
  "plan": _plan,
  "explain": _explain,
  "numerics": _numerics,
  "tune": _tune,
  "export": _export,
  "env": _env,
}
_EXAMPLES = {
  "train": "gpt_stdlib policy=fp16 train.steps=200 out=runs/x",
  "plan": "gpt_stdlib policy=fp32,bf16,fp16 target=h200 --picture plan.png",
  "explain": "gpt_stdlib policy=bf16,fp16",
  "numerics": "runs/x policy=fp16 batches=4",
  "tune": "gpt_stdlib target=h200 --out tuned.yaml",
  "export": "runs/x dtype=bf16",
  "env": "--json > env.json",
}
