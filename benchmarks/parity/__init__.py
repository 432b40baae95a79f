"""Whether another checkout makes the same programs and plans: for a change that is to change none.

    python -m benchmarks.parity against COMMIT  # names what differs from a commit, with status 1
    python -m benchmarks.parity write FILE      # the same in two steps: in the checkout before
    python -m benchmarks.parity compare FILE    # and in the one after
    python -m benchmarks.parity show NAME       # a program or a plan, for a diff between the two

A program is value and gradient as a jaxpr, under bf16, fp16 and fp8, of autocast inside of the derivative
and outside: of the functions and layers of the conformance tests, of loops and branches, of the corpus of
models; and the training step of each config, on one device and on meshes of 8. A plan is the figures of
`mpjax.plan`, analytic and compiled. FILE holds a hash of each program, and the plans. `--only GROUP ...`
takes some groups, `--match REGEX` what has a name that it finds. Both need the same JAX.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterator
from typing import Any

# Read when JAX starts.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"

import jax

from benchmarks.parity import _plans, _programs

_ROOT = pathlib.Path(__file__).resolve().parents[2]
_SHARES = 24  # of the work, more than there are processes
GROUPS: dict[str, Any] = {**_programs.GROUPS, "plans": _plans.plans}


def add_arguments(parser: argparse.ArgumentParser) -> None:
  parser.add_argument("action", choices=("against", "write", "compare", "show"))
  parser.add_argument("what", metavar="COMMIT, FILE or NAME")
  parser.add_argument("--only", nargs="+", choices=GROUPS, help="these groups")
  parser.add_argument("--match", type=re.compile, help="what has this in its name", metavar="REGEX")
  parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="processes")


def run(options: argparse.Namespace) -> int:
  os.chdir(_ROOT)
  if options.action == "show":
    return _show(options.what)
  if options.action == "against":
    with tempfile.TemporaryDirectory() as folder:
      return _compare(json.loads(_written_at(options, pathlib.Path(folder)).read_text()), options)
  if options.action == "compare":
    return _compare(json.loads(pathlib.Path(options.what).read_text()), options)
  report = {"jax": jax.__version__, "programs": dict(sorted(_values(options).items()))}
  pathlib.Path(options.what).write_text(json.dumps(report, indent=0) + "\n")
  return 0


def _written_at(options: argparse.Namespace, folder: pathlib.Path) -> pathlib.Path:
  """The file that a commit writes, with its own programs and plans."""
  tree, file = folder / "tree", folder / "before.json"
  write = [sys.executable, "-m", "benchmarks.parity", "write", str(file), "--jobs", str(options.jobs)]
  write += ["--only", *options.only] if options.only else []
  write += ["--match", options.match.pattern] if options.match else []
  subprocess.run(["git", "worktree", "add", "--quiet", "--detach", str(tree), options.what], check=True)
  try:
    subprocess.run(write, cwd=tree, check=True)
  finally:
    subprocess.run(["git", "worktree", "remove", "--force", str(tree)], check=True)
  return file


def _compare(before: dict[str, Any], options: argparse.Namespace) -> int:
  if before["jax"] != jax.__version__:
    sys.exit(f"{options.what} is of JAX {before['jax']}, this is {jax.__version__}: expected the same")
  found = _values(options)
  wanted = {
    name: value for name, value in before["programs"].items() if _chosen(name, options.only, options.match)
  }
  lines = [f"gone: {name}" for name in sorted(wanted.keys() - found.keys())]
  for name, value in sorted(found.items()):
    new = name not in wanted
    lines += (
      [f"new: {name}"] if new else [f"differs: {name}{what}" for what in differences(wanted[name], value)]
    )
  print("\n".join([*lines, f"{len(lines)} differences"]))
  return int(bool(lines))


def differences(before: Any, now: Any, name: str = "") -> Iterator[str]:
  """Yields what differs: the figure and both values of a plan, nothing more of a program."""
  if isinstance(before, dict) and isinstance(now, dict):
    for key in dict.fromkeys([*before, *now]):
      yield from differences(before.get(key), now.get(key), f"{name}, {key}")
  elif before != now:
    yield f"{name}: {before} -> {now}"


def _show(name: str) -> int:
  for _, found, make in _items():
    if found == name:
      made = make()
      print(json.dumps(made, indent=1) if isinstance(made, dict) else _programs.text_of(made))
      return 0
  print(f"nothing is called {name!r}; `write` has the names", file=sys.stderr)
  return 2


def _values(options: argparse.Namespace) -> dict[str, Any]:
  """Returns hashes of programs and figures of plans by name."""
  start = time.monotonic()
  numbers = sorted({number for number, *_ in _items(options.only, options.match)})
  shares = [(options.only, options.match, number) for number in numbers]
  with multiprocessing.get_context("spawn").Pool(options.jobs, maxtasksperchild=4) as pool:
    values = {name: value for part in pool.imap_unordered(_share, shares) for name, value in part.items()}
  print(f"{len(values)} programs and plans in {time.monotonic() - start:.0f} s", flush=True)
  return values


def _share(share: tuple[list[str] | None, re.Pattern[str] | None, int]) -> dict[str, Any]:
  """Returns a share of the hashes and figures; of what cannot be made, the error's class."""
  only, match, wanted = share
  warnings.simplefilter("ignore")
  values: dict[str, Any] = {}
  for number, name, make in _items(only, match):
    if number != wanted:
      continue
    jax.clear_caches()  # what was traced before is not to matter
    try:
      made = make()
      # Through JSON, as what is read from a file.
      values[name] = json.loads(json.dumps(made)) if isinstance(made, dict) else _hash(made)
    except Exception as error:
      values[name] = type(error).__name__
      print(f"{name}: {traceback.format_exception_only(error)[-1].strip()[:200]}", file=sys.stderr)
  return values


def _items(only: list[str] | None = None, match: Any = None) -> Iterator[tuple[int, str, Any]]:
  """Yields the number of a share, a name, and what makes a program or the figures of a plan."""
  for group, items in GROUPS.items():
    for i, (found, make) in enumerate(items()):
      if _chosen(f"{group}, {found}", only, match):
        yield i // 6 % _SHARES, f"{group}, {found}", make


def _hash(program: Any) -> str:
  return hashlib.sha256(_programs.text_of(program).encode()).hexdigest()[:16]


def _chosen(name: str, only: list[str] | None, match: Any) -> bool:
  return name.partition(",")[0] in (only or GROUPS) and (match is None or bool(match.search(name)))
