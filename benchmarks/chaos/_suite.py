"""Training runs under the faults of a month of use, each compared bit for bit with an undisturbed twin.

    python -m benchmarks.chaos --hours 1 [--seed 0] [--json FILE]      (or: python scripts/bench.py chaos ...)

Small runs of the three example configs, one of them of two processes, are killed, signalled, paused, moved
and deleted, run out of disk, and get a clock that jumps, a standard output that nobody reads, another mesh.
While they stand still, their files are damaged. The same command then goes on. In the end the records, the
arrays of the last checkpoint and the summary have to be those of a run that was left alone, but for records
that were destroyed, which a start has to tell.
"""

from __future__ import annotations

import argparse
import collections
import os
import pathlib
import platform
import random
import shutil
import sys
import tempfile
import time
from typing import Any

from benchmarks._record import origin, provenance, write
from benchmarks.chaos._disturbance import Place, places
from benchmarks.chaos._run import EVERY, STEPS, Example, Run, twin_of
from benchmarks.chaos._starts import warm_up

_FP16 = "policy={base: fp16, loss_scaling: {init_scale: 16777216, growth_interval: 20}}"
_SMALL = ("model.layers=1", "model.heads=2", "data.batch_size=8")
_GPT = (_FP16, *_SMALL, "model.dim=32", "model.dropout=0.1", "data.seq_len=32", "data.eval_batches=2")
EXAMPLES = {
  Example("gpt_stdlib", _GPT): 3,
  Example("vit_digits", ("policy=bf16", *_SMALL, "model.dim=16")): 3,
  Example("resnet_digits", (_FP16, "model.stages=[1]", "model.width=4", "data.batch_size=8")): 3,
  Example("gpt_stdlib", _GPT, processes=2): 2,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
  parser.add_argument("--hours", type=float, default=0.05, help="how long runs are begun")
  parser.add_argument("--seed", type=int, default=0)
  parser.add_argument("--keep", type=pathlib.Path, metavar="DIR", help="where runs go that end otherwise")


def run(options: argparse.Namespace) -> int:
  with tempfile.TemporaryDirectory(prefix="mpjax-chaos-") as folder:
    root = pathlib.Path(folder)
    warm_up(root / "compiled")
    report, good = _soak(root, options)
  mode = f"--hours {options.hours:g} --seed {options.seed}"
  cores = f"{len(os.sched_getaffinity(0))} cores, {platform.machine()}"
  write(origin(f"chaos {mode}", "jaxlib", "orbax-checkpoint", device=cores) | report, options.json)
  return 0 if good else 1


def _soak(root: pathlib.Path, options: argparse.Namespace) -> tuple[dict[str, Any], bool]:
  chance, start = random.Random(options.seed), time.monotonic()
  runs: list[dict[str, Any]] = []
  scratch = root / "scratch"
  scratch.mkdir()
  with places(root) as disks:
    try:
      twins = {example: twin_of(example, disks[0].folder, scratch) for example in EXAMPLES}
    except RuntimeError as error:
      sys.exit(str(error))
    print(f"twins trained, {time.monotonic() - start:.0f} s; disks: {len(disks)}", flush=True)
    while time.monotonic() - start < options.hours * 3600:
      number = len(runs) + 1
      (example,) = chance.choices(list(EXAMPLES), list(EXAMPLES.values()))
      runs.append(_one(number, example, chance.choice(disks), scratch, twins[example], chance, options.keep))
    report: dict[str, Any] = {"seed": options.seed, "steps": STEPS, "checkpoint_every": EVERY}
    report |= {"minutes": round((time.monotonic() - start) / 60), "small_disk": len(disks) > 1, "runs": runs}
  good = sum(run["same"] for run in runs)
  faults = sum(len(run["faults"]) for run in runs)
  print(f"{good} of {len(runs)} runs ended as their twins, after {faults} faults", flush=True)
  return report, good == len(runs)


def _one(
  number: int,
  example: Example,
  place: Place,
  scratch: pathlib.Path,
  twin: dict[str, Any],
  chance: random.Random,
  keep: pathlib.Path | None,
) -> dict[str, Any]:
  """Makes one run and returns what is reported of it."""
  seed = chance.getrandbits(32)
  folder = place.folder / str(number)
  folder.mkdir()
  made = Run(example, folder / "run", place, scratch, twin, random.Random(seed))
  made.go()
  shown = "; ".join(f"{f.kind} ({f.detail}): {f.outcome}" for f in made.faults)
  print(f"{number} {example.name} on a {'small' if place.small else 'usual'} disk: {shown}", flush=True)
  if made.problem:
    print(f"{number} IS NOT AS ITS TWIN: {made.problem}", flush=True)
    if keep is not None:
      shutil.copytree(folder, keep / str(number), dirs_exist_ok=True)
  shutil.rmtree(folder)
  return {
    "example": example.name,
    "faults": [fault._asdict() for fault in made.faults],
    "same": not made.problem,
    "taken_again": made.taken_again,
  } | ({"problem": made.problem} if made.problem else {})


def table(report: dict[str, Any]) -> str:
  """Faults by kind and outcome, and how many of the runs that had them ended as their twins."""
  rows: dict[str, list[tuple[str, bool]]] = {}
  for run in report["runs"]:
    for fault in run["faults"]:
      rows.setdefault(fault["kind"], []).append((fault["outcome"], run["same"]))
  lines = ["| fault | times | what the run made of it | ended bit for bit as the twin |", "|---|---|---|---|"]
  for kind, found in sorted(rows.items()):
    counts = collections.Counter(outcome for outcome, _ in found).most_common()
    told = "; ".join(f"{outcome}: {count}" for outcome, count in counts)
    lines.append(f"| {kind} | {len(found)} | {told} | {sum(same for _, same in found)} |")
  same = sum(run["same"] for run in report["runs"])
  again = [steps for run in report["runs"] for steps in run["taken_again"]]
  count = sum(map(len, rows.values()))
  text = (
    f"{same} of {len(report['runs'])} runs ended as their twins, after {count} faults in "
    f"{report['minutes']} minutes. A kill cost {sum(again) / max(len(again), 1):.0f} steps on average and "
    f"{max(again, default=0)} at most, with checkpoints {report['checkpoint_every']} steps apart."
  )
  return "\n".join([*lines, "", text, "", provenance(report)])
