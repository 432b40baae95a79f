"""Runs of several processes that are killed at random moments: whether each ends as if nothing had happened.

    python scripts/bench.py chaos [--runs 20] [--kills 2] [--processes 2] [--seed 0] [--json FILE]

A small GPT trains in fp16 with overflows, dropout and accumulation, over the processes given (CPU, gloo).
Once it is left alone. Then, in each run, one process chosen at random gets SIGKILL at a random moment, at
times while it starts, so many times, and the same command starts again; the last start is left alone.
Reported are the final loss beside that of the run left alone (as the same text, so bit for bit), and the
steps that each kill threw away: those that metrics.jsonl had logged after the checkpoint that the next start
resumes from.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import random
import re
import socket
import subprocess
import sys
import tempfile
import time
from typing import Any

from benchmarks._record import origin, write

ROOT = pathlib.Path(__file__).resolve().parents[2]
INTERVAL = 40
CONFIG = f"""
policy: {{base: fp16, loss_scaling: {{init_scale: 16777216, growth_interval: 20}}}}
seed: 3
model: {{kind: gpt, dim: 32, layers: 2, heads: 2, dropout: 0.1}}
data: {{kind: text, path: CORPUS, seq_len: 32, batch_size: 8, valid_fraction: 0.2, eval_batches: 2}}
optimizer: {{learning_rate: 1e-2, warmup_steps: 2, clip_norm: 1.0}}
distributed: {{heartbeat_timeout_s: 10, start_timeout_s: 30}}
train:
  steps: 600
  accumulate: 2
  log_every: 1
  eval_every: 200
  checkpoint_every: {INTERVAL}
  checkpoint_wait: true
"""


class Team:
  """The processes of one start of a run."""

  def __init__(self, config: pathlib.Path, out: pathlib.Path, count: int):
    with socket.socket() as free:
      free.bind(("127.0.0.1", 0))
      address = f"127.0.0.1:{free.getsockname()[1]}"
    flags = ["--coordinator", address, "--num-processes", str(count)]
    command = [sys.executable, str(ROOT / "scripts" / "train.py"), str(config), f"out={out}"]
    cache = {"JAX_COMPILATION_CACHE_DIR": str(out.parent / "compiled")}
    cache |= {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.1"}
    environment = os.environ | cache | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    self.metrics = out / "metrics.jsonl"
    self.inode = inode(self.metrics)
    self.processes = [
      subprocess.Popen(
        [*command, *(flags if count > 1 else []), *(["--process-id", str(i)] if count > 1 else [])],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
      )
      for i in range(count)
    ]

  def wait(self, timeout: float) -> list[tuple[int, str]]:
    """Exit status and output of each process; kills those that do not end in time, with status 'hung'."""
    out = []
    end = time.monotonic() + timeout
    for process in self.processes:
      try:
        text, _ = process.communicate(timeout=max(1.0, end - time.monotonic()))
      except subprocess.TimeoutExpired:
        process.kill()
        text = "hung: " + process.communicate()[0]
      out.append((process.returncode, text))
    return out

  def wait_for(self, step: int, timeout: float) -> None:
    """Waits until this start has logged a step, or ended."""
    end = time.monotonic() + timeout
    while all(p.poll() is None for p in self.processes) and time.monotonic() < end:
      # A start that resumes begins the file anew.
      if inode(self.metrics) != self.inode and last_step(self.metrics) >= step:
        return
      time.sleep(0.002)


def inode(file: pathlib.Path) -> int | None:
  """What changes when another file takes a file's place."""
  try:
    return file.stat().st_ino
  except FileNotFoundError:
    return None


def last_step(metrics: pathlib.Path) -> int:
  """The newest step that is logged."""
  steps = re.findall(r'^\{"step": (\d+),', metrics.read_text(), re.MULTILINE) if metrics.exists() else []
  return int(steps[-1]) if steps else 0


def newest_checkpoint(out: pathlib.Path) -> int:
  """The step that a start resumes from."""
  folder = out / "checkpoints"
  steps = [int(p.name) for p in folder.iterdir() if p.name.isdecimal()] if folder.exists() else []
  return max(steps, default=0)


def killed_run(config: pathlib.Path, out: pathlib.Path, count: int, kills: int, chance: random.Random) -> Any:
  """One run with its kills; what each threw away, how long the others took to end, and how all ended."""
  record: dict[str, Any] = {"kills": []}
  for _ in range(kills):
    resumed = newest_checkpoint(out)
    team = Team(config, out, count)
    if chance.random() < 0.15:  # while it starts
      time.sleep(chance.random() * 8)
    else:
      team.wait_for(resumed + chance.randrange(1, 250), timeout=180)
      time.sleep(chance.random() * 0.05)
    victim = chance.randrange(count)
    team.processes[victim].kill()
    start = time.monotonic()
    results = team.wait(120)
    logged, kept = last_step(out / "metrics.jsonl"), newest_checkpoint(out)
    record["kills"].append(
      {
        "process": victim,
        "at_step": logged,
        "resumes_from": kept,
        "lost_steps": logged - kept,
        "others_ended_after_s": round(time.monotonic() - start, 1),
        "statuses": [status for status, _ in results],
        "hung": any(text.startswith("hung") for _, text in results),
      }
    )
    if (out / "summary.json").exists():
      break
  results = Team(config, out, count).wait(300)
  record["statuses"] = [status for status, _ in results]
  if (out / "summary.json").exists():
    record["summary"] = json.loads((out / "summary.json").read_text())
  else:
    record["output"] = [text[-2000:] for _, text in results]
  return record


def add_arguments(parser: argparse.ArgumentParser) -> None:
  parser.add_argument("--runs", type=int, default=20)
  parser.add_argument("--kills", type=int, default=2, help="of each run")
  parser.add_argument("--processes", type=int, default=2)
  parser.add_argument("--seed", type=int, default=0)


def run(options: argparse.Namespace) -> int:
  chance = random.Random(options.seed)
  with tempfile.TemporaryDirectory(prefix="mpjax-chaos-") as folder:
    root = pathlib.Path(folder)
    for i in range(8):
      text = "".join(f"def f{j}(x):\n  return x + {i * j}\n" for j in range(120))
      (root / "corpus").mkdir(exist_ok=True)
      (root / "corpus" / f"{i}.txt").write_text(text)
    config = root / "chaos.yaml"
    config.write_text(CONFIG.replace("CORPUS", str(root / "corpus")))
    alone = Team(config, root / "alone", options.processes).wait(600)
    if any(status for status, _ in alone):
      sys.exit(f"the run left alone failed:\n{alone}")
    expected = json.loads((root / "alone" / "summary.json").read_text())
    words = ("final_loss", "eval_loss", "best_eval_loss", "skipped_steps", "loss_scale")
    report = origin(f"chaos --runs {options.runs}", "orbax-checkpoint") | {
      "processes": options.processes,
      "checkpoint_every": INTERVAL,
      "expected": {word: expected[word] for word in words},
      "runs": [],
    }
    print(
      f"left alone: loss {expected['final_loss']!r}, {expected['skipped_steps']} skipped steps", flush=True
    )
    good = 0
    for number in range(options.runs):
      run = killed_run(config, root / str(number), options.processes, options.kills, chance)
      summary = run.pop("summary", {})
      run["same"] = all(repr(summary.get(word)) == repr(expected[word]) for word in words)
      run["most_lost"] = max(kill["lost_steps"] for kill in run["kills"])
      good += run["same"] and run["most_lost"] <= INTERVAL and not any(kill["hung"] for kill in run["kills"])
      report["runs"].append(run)
      shown = ", ".join(f"{k['at_step']} (lost {k['lost_steps']})" for k in run["kills"])
      print(f"run {number + 1}: killed at {shown}: {'same' if run['same'] else 'NOT the same'}", flush=True)
    print(f"{good} of {options.runs} ended the same, none of them losing more than {INTERVAL} steps")
    report["good"] = good
    write(report, options.json)
  return 0 if good == options.runs else 1
