"""Whether another checkout makes the same programs: for a change that is to change none.

    python -m benchmarks.parity write FILE      # in the checkout before
    python -m benchmarks.parity compare FILE    # in the one after: names what differs, with status 1
    python -m benchmarks.parity show NAME       # the text of a program, for a diff between the two

A program is value and gradient as a jaxpr, under bf16, fp16 and fp8, of autocast inside of the derivative
and outside: of the functions and layers of the conformance tests, of loops and branches, of the corpus of
models; and the training step of each config, on one device and on meshes of 8. FILE holds a hash of each.
`--only GROUP ...` takes some groups, `--match REGEX` programs whose name it finds. Both need the same JAX.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import os
import pathlib
import re
import sys
import time
import traceback
import warnings
from typing import Any

# Read when JAX starts.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"

import jax

from benchmarks.parity import _programs

_ROOT = pathlib.Path(__file__).resolve().parents[2]
_SHARES = 24  # of the work, more than there are processes


def add_arguments(parser: argparse.ArgumentParser) -> None:
  parser.add_argument("action", choices=("write", "compare", "show"))
  parser.add_argument("what", metavar="FILE or NAME")
  parser.add_argument("--only", nargs="+", choices=_programs.GROUPS, help="these groups")
  parser.add_argument("--match", type=re.compile, help="programs whose name has this", metavar="REGEX")
  parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="processes")


def run(options: argparse.Namespace) -> int:
  groups = tuple(options.only or _programs.GROUPS)
  os.chdir(_ROOT)
  if options.action == "show":
    return _show(options.what, groups)
  start = time.monotonic()
  before = json.loads(pathlib.Path(options.what).read_text()) if options.action == "compare" else {}
  if before and before["jax"] != jax.__version__:
    sys.exit(f"{options.what} is of JAX {before['jax']}, this is {jax.__version__}: expected the same")
  shares = [(groups, options.match, i) for i in range(_SHARES)]
  with multiprocessing.get_context("spawn").Pool(options.jobs, maxtasksperchild=4) as pool:
    hashes = {name: value for part in pool.imap_unordered(_hashes, shares) for name, value in part.items()}
  print(f"{len(hashes)} programs in {time.monotonic() - start:.0f} s", flush=True)
  if options.action == "write":
    text = json.dumps({"jax": jax.__version__, "programs": dict(sorted(hashes.items()))}, indent=0)
    pathlib.Path(options.what).write_text(text + "\n")
    return 0
  wanted = {name: value for name, value in before["programs"].items() if _chosen(name, groups, options.match)}
  lines = [f"differs: {name}" for name in sorted(hashes) if wanted.get(name, hashes[name]) != hashes[name]]
  lines += [f"new: {name}" for name in sorted(hashes.keys() - wanted.keys())]
  lines += [f"gone: {name}" for name in sorted(wanted.keys() - hashes.keys())]
  print("\n".join([*lines, f"{len(lines)} differences"]))
  return int(bool(lines))


def _show(name: str, groups: tuple[str, ...]) -> int:
  for group in groups:
    for found, trace in _programs.GROUPS[group]():
      if f"{group}, {found}" == name:
        print(_programs.text_of(trace()))
        return 0
  print(f"no program is called {name!r}; `write` names them", file=sys.stderr)
  return 2


def _hashes(share: tuple[tuple[str, ...], re.Pattern[str] | None, int]) -> dict[str, str]:
  """Returns the hashes of a share of the programs; of what cannot be traced, the error's class."""
  groups, match, number = share
  warnings.simplefilter("ignore")
  found = {}
  for group in groups:
    for i, (name, trace) in enumerate(_programs.GROUPS[group]()):
      full = f"{group}, {name}"
      if i // 6 % _SHARES != number or not _chosen(full, groups, match):
        continue
      jax.clear_caches()  # what was traced before is not to matter
      try:
        found[full] = hashlib.sha256(_programs.text_of(trace()).encode()).hexdigest()[:16]
      except Exception as error:
        found[full] = type(error).__name__
        print(f"{full}: {traceback.format_exception_only(error)[-1].strip()[:200]}", file=sys.stderr)
  return found


def _chosen(name: str, groups: tuple[str, ...], match: Any) -> bool:
  return name.startswith(tuple(f"{group}, " for group in groups)) and (
    match is None or bool(match.search(name))
  )
