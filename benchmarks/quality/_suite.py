"""Evaluation loss by policy over several seeds, beside float32 (FP8 recipes: bf16) with the same seed.

    python scripts/bench.py quality [--task gpt,vit] [--policy fp32,bf16] [--seeds N] [--json FILE]

Runs `scripts/train.py CONFIG policy=... seed=N` for each task, policy and seed, and compares the last
evaluations. With `--json` the file is written after every run, and the same command again does only what it
does not hold yet.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import dataclasses
import itertools
import json
import os
import pathlib
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import jax

from benchmarks._record import origin, write
from benchmarks.quality._tables import pictures, tables
from mpjax.train import load_config, load_plugins, make_setup
from mpjax.train.loop._run_directory import RunDirectory

__all__ = ["add_arguments", "pictures", "run", "tables"]

ROOT = pathlib.Path(__file__).resolve().parents[2]
# What each is called and what train.py is given for it, in the order in which they run: first what the others
# are compared with.
POLICIES = {
  "fp32": ("fp32", ["policy=fp32"]),
  "fp16-unscaled": ("fp16 without loss scaling", ["policy={base: fp16, loss_scaling: null}"]),
  "fp16": ("fp16", ["policy=fp16"]),
  "bf16": ("bf16", ["policy=bf16"]),
  "tf32": ("tf32", ["policy=tf32"]),
  "fp8": ("fp8, emulated", ["policy={base: fp8, fp8: {emulate: true}}"]),
  # Also of products that are too small to gain from it, which the preset leaves in bfloat16.
  "fp8-small": ("fp8, emulated, min_dim 16", ["policy={base: fp8, fp8: {emulate: true, min_dim: 16}}"]),
  # The same mathematics, with sums in another order: how far float32 comes from itself.
  "fp32-reordered": ("fp32 on two devices", ["policy=fp32", "mesh.data=2"]),
  # Optimiser state and master weights in few bytes.
  "int8": ("bf16, int8 state", ["policy={base: bf16, optimizer_dtype: int8}"]),
  "e4m3": ("bf16, float8_e4m3fn state", ["policy={base: bf16, optimizer_dtype: float8_e4m3fn}"]),
  "bf16-state": ("bf16, bfloat16 state", ["policy={base: bf16, optimizer_dtype: bfloat16}"]),
  "int16": (
    "bf16, bfloat16 parameters + int16",
    ["policy={base: bf16_lean, master_weights: int16, optimizer_dtype: float32}"],
  ),
  "lean": ("bf16_lean", ["policy=bf16_lean"]),
  "stochastic": ("bf16_lean, stochastic", ["policy={base: bf16_lean, master_weights: stochastic}"]),
  "no-masters": ("bf16_lean, no master weights", ["policy={base: bf16_lean, master_weights: none}"]),
}
_EMULATED = {"emulate": True, "min_dim": 64}  # a key of the Llama has 64 columns
RECIPES = {
  "current": ("current", {"recipe": "current"}),
  "delayed": ("delayed", {"recipe": "delayed"}),
  "per-channel": ("per_channel", {"recipe": "per_channel"}),
  "mx": ("mx", {"recipe": "mx"}),
  "nvfp4": ("nvfp4", {"recipe": "nvfp4"}),
  "e4m3b11": ("current, E4M3B11FNUZ", {"recipe": "current", "forward_dtype": "e4m3b11fnuz"}),
}
POLICIES |= {
  name: (f"fp8 {title}", [f"policy={json.dumps({'base': 'fp8', 'fp8': fp8 | _EMULATED})}"])
  for name, (title, fp8) in RECIPES.items()
}
USUAL = ("fp32", "fp16-unscaled", "fp16", "bf16", "tf32")


@dataclasses.dataclass(frozen=True)
class Task:
  """What is trained: a config, what is set otherwise in it, and how it is shown.

  Attributes:
    base: the policy that the others are compared with.
    seeds: more of them where they are quick and far apart.
    plugin: registers the config's model.
  """

  title: str
  evaluated: str
  config: str
  overrides: tuple[str, ...] = ()
  policies: tuple[str, ...] = USUAL
  base: str = "fp32"
  seeds: int = 3
  plugin: str | None = None


FEW_BYTES = ("fp32", "bf16", "int8", "e4m3", "bf16-state", "int16", "lean")

# Steps, and one evaluation at the end.
_ONCE = ("train.eval_every=1000", "train.checkpoint_every=1000")


def _small_gpt(optimizer: str, rate: str, policies: tuple[str, ...], seeds: int = 3) -> Task:
  options = {"sgd": ("optimizer.options={momentum: 0.9}", "optimizer.weight_decay=0"), "adamw": ()}.get(
    optimizer, ("optimizer.options={}",)
  )
  return Task(
    f"GPT, 1,024 bytes a batch, {optimizer}",
    "102,400 bytes held out",
    "configs/gpt_stdlib.yaml",
    (
      *("model.dim=128", "model.layers=2", "model.heads=2", "data.batch_size=8", "data.eval_batches=100"),
      *(
        "train.steps=300",
        *_ONCE,
        f"optimizer.name={optimizer}",
        f"optimizer.learning_rate={rate}",
        *options,
      ),
    ),
    policies,
    seeds=seeds,
  )


def _recipes(title: str, config: str, *overrides: str, plugin: str | None = None) -> Task:
  """A model under every FP8 recipe."""
  return Task(
    f"{title}, 1,024 bytes a batch",
    "51,200 bytes held out",
    config,
    (*overrides, "model.layers=2", "data.batch_size=8", "data.eval_batches=50", "train.steps=300", *_ONCE),
    ("bf16", *RECIPES),
    base="bf16",
    plugin=plugin,
  )


TASKS = {
  "gpt": Task(
    "GPT, 2,048 bytes a batch",
    "204,800 bytes held out",
    "configs/gpt_stdlib.yaml",
    ("train.steps=400", "train.eval_every=400", "train.checkpoint_every=400", "data.eval_batches=100"),
    (*USUAL, "fp8"),
  ),
  # Batches of a size that one takes on an accelerator: each byte's share of the gradient is small.
  "gpt-large-batch": Task(
    "GPT, 32,768 bytes a batch",
    "196,608 bytes held out",
    "configs/gpt_stdlib.yaml",
    (
      *("model.dim=32", "model.layers=4", "model.heads=2", "data.seq_len=256", "data.batch_size=128"),
      *("optimizer.warmup_steps=20", "optimizer.learning_rate=5e-3", "train.steps=100", *_ONCE),
      "data.eval_batches=6",
    ),
  ),
  "vit": Task(
    "ViT on digits",
    "320 images held out",
    "configs/vit_digits.yaml",
    policies=(*USUAL, "fp8-small", "fp32-reordered"),
    seeds=6,
  ),
  # Without fp8, which takes no convolutions whose windows overlap: its runs are those of bf16, bit for bit.
  "resnet": Task(
    "ResNet on digits",
    "320 images held out",
    "configs/resnet_digits.yaml",
    policies=(*USUAL, "fp32-reordered"),
    seeds=6,
  ),
  "gpt-small": _small_gpt("adamw", "2e-3", (*FEW_BYTES, "stochastic", "no-masters")),
  "gpt-small-lion": _small_gpt("lion", "5e-4", ("fp32", "bf16", "int8", "lean"), seeds=2),
  "gpt-small-muon": _small_gpt("muon", "5e-3", ("fp32", "bf16", "int8", "bf16-state", "lean"), seeds=2),
  "gpt-small-sgd": _small_gpt("sgd", "0.1", ("fp32", "bf16", "int8", "lean"), seeds=2),
  "vit-few-bytes": Task(
    "ViT on digits, adamw",
    "320 images held out",
    "configs/vit_digits.yaml",
    ("train.steps=400", *_ONCE),
    FEW_BYTES,
  ),
  "resnet-few-bytes": Task(
    "ResNet on digits, adamw",
    "320 images held out",
    "configs/resnet_digits.yaml",
    (
      *("optimizer.name=adamw", "optimizer.options={}", "optimizer.learning_rate=2e-3"),
      *("train.steps=300", *_ONCE),
    ),
    FEW_BYTES,
  ),
  "llama-few-bytes": Task(
    "Llama, 1,024 bytes a batch, adamw",
    "102,400 bytes held out",
    "examples/llama/stdlib.yaml",
    ("model.layers=2", "data.batch_size=8", "data.eval_batches=100", "train.steps=300", *_ONCE),
    FEW_BYTES,
    plugin="examples/llama/llama.py",
  ),
  "gpt-recipes": _recipes("GPT", "configs/gpt_stdlib.yaml"),
  "llama-recipes": _recipes("Llama", "examples/llama/stdlib.yaml", plugin="examples/llama/llama.py"),
  "moe-recipes": _recipes(
    "Mixture of 4 experts",
    "configs/gpt_stdlib.yaml",
    "model.kind=moe",
    plugin="benchmarks/quality/moe.py",
  ),
}


@dataclasses.dataclass(frozen=True)
class Run:
  """One training run of the matrix."""

  task: str
  policy: str
  seed: int
  overrides: tuple[str, ...]

  @property
  def name(self) -> str:
    """Of its directory."""
    return f"{self.task}-{self.policy}-{self.seed}"

  @property
  def arguments(self) -> list[str]:
    """Of `scripts/train.py`, but for the run directory."""
    task = TASKS[self.task]
    plugin = ["--plugin", task.plugin] if task.plugin else []
    return [task.config, *plugin, *self.changes]

  @property
  def changes(self) -> list[str]:
    """Of the config."""
    return [*POLICIES[self.policy][1], f"seed={self.seed}", *self.overrides]

  @property
  def command(self) -> str:
    """What a result on file is known by."""
    return shlex.join(["python", "scripts/train.py", *self.arguments])


def add_arguments(parser: argparse.ArgumentParser) -> None:
  """The suite's own options."""
  add = parser.add_argument
  add("--task", type=_among(TASKS), metavar="NAMES", help=f"of {', '.join(TASKS)}; all")
  add("--policy", type=_among(POLICIES), metavar="NAMES", help=f"of {', '.join(POLICIES)}; the task's own")
  add("--seeds", type=int, metavar="N", help="0 to N - 1; 3, and 6 of the tasks on digits")
  add("--steps", type=int, metavar="N", help="in place of each task's own")
  add("--jobs", type=int, default=1, metavar="N", help="runs side by side (1)")
  add("--runs", type=pathlib.Path, metavar="DIR", help="keep the run directories there, and go on with them")


def run(options: argparse.Namespace) -> dict[str, Any]:
  """Trains what is not on file yet, and returns the report of all that is."""
  report = _opened(options)
  wanted = list(_matrix(options))
  load_plugins(str(ROOT / plugin) for each in wanted if (plugin := TASKS[each.task].plugin))
  known = {run["command"] for run in report["runs"]}
  left = [each for each in wanted if each.command not in known]
  cells = {_cell(dataclasses.asdict(each)) for each in left}
  report["runs"] = [run for run in report["runs"] if _cell(run) not in cells]
  print(f"{len(wanted) - len(left)} runs on file, {len(left)} to do", flush=True)
  done = itertools.count(1)
  with _directory(options.runs) as folder, concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
    futures = [pool.submit(_train, each, folder) for each in left]
    try:
      for future in concurrent.futures.as_completed(futures):
        result, seconds = future.result()
        report["runs"] = sorted([*report["runs"], result], key=_cell)
        write(report, options.json)
        print(f"[{next(done)}/{len(left)}] {_line(result)} ({seconds:.0f} s)", flush=True)
    finally:
      pool.shutdown(cancel_futures=True)
  print(f"\n{tables(report)}")
  return report


def _among(known: dict[str, Any]) -> Any:
  def parse(text: str) -> list[str]:
    names = text.split(",")
    for name in names:
      if name not in known:
        raise argparse.ArgumentTypeError(f"{name!r}: expected some of {','.join(known)}, joined by commas")
    return names

  return parse


def _opened(options: argparse.Namespace) -> dict[str, Any]:
  """A new report, or the one on file where device and versions are still the same."""
  given = {name: getattr(options, name) for name in ("task", "policy", "seeds", "steps")}
  words = [[f"--{name}", ",".join(v) if isinstance(v, list) else str(v)] for name, v in given.items() if v]
  head = origin(shlex.join(["quality", *itertools.chain(*words)]), "flax", "optax")
  runs: list[dict[str, Any]] = []
  if options.json is not None and options.json.exists():
    old = json.loads(options.json.read_text())
    if all(old.get(key) == head[key] for key in ("device", "versions")):
      runs = old["runs"]
    else:
      print(f"{options.json} is of another device or other versions: all runs are done again", flush=True)
  shown = ("title", "evaluated", "config", "overrides", "base")
  return {
    **head,
    "left_out": {} if _has_tf32() else {"tf32": f"no TensorFloat-32 on {jax.devices()[0].platform}"},
    "policies": {name: title for name, (title, _) in POLICIES.items()},
    "tasks": {name: {key: getattr(task, key) for key in shown} for name, task in TASKS.items()},
    "runs": runs,
  }


def _has_tf32() -> bool:
  device = jax.devices()[0]
  return device.platform == "gpu" and float(getattr(device, "compute_capability", 0)) >= 8


def _matrix(options: argparse.Namespace) -> Iterator[Run]:
  """Each seed of all tasks and policies before the next one: what is there early can be compared."""
  names = options.task or list(TASKS)
  seeds = {name: options.seeds or TASKS[name].seeds for name in names}
  steps = () if options.steps is None else (f"train.steps={options.steps}",)
  for seed in range(max(seeds.values())):
    for name in names:
      for policy in options.policy or TASKS[name].policies:
        if seed < seeds[name] and (policy != "tf32" or _has_tf32()):
          yield Run(name, policy, seed, (*TASKS[name].overrides, *steps))


def _cell(run: dict[str, Any]) -> tuple[int, int, int]:
  """Where a run stands in the matrix."""
  return list(TASKS).index(run["task"]), list(POLICIES).index(run["policy"]), run["seed"]


@contextlib.contextmanager
def _directory(path: pathlib.Path | None) -> Iterator[pathlib.Path]:
  if path is not None:
    path.mkdir(parents=True, exist_ok=True)
    yield path.resolve()
  else:
    with tempfile.TemporaryDirectory() as folder:
      yield pathlib.Path(folder)


def _train(each: Run, folder: pathlib.Path) -> tuple[dict[str, Any], float]:
  """The result of a run, done now unless its directory holds it, and the seconds that it took."""
  start, out = time.perf_counter(), folder / each.name
  arguments = [*each.arguments, f"out={out}"]
  directory = RunDirectory(load_config(ROOT / TASKS[each.task].config, [*each.changes, f"out={out}"]))
  finished = directory.summary() is not None
  directory.close()
  status, text = (0, "") if finished else _script("train.py", arguments, folder, each.policy)
  found: dict[str, Any]
  if status == 3:  # every step skipped: nothing was evaluated
    last = json.loads((out / "metrics.jsonl").read_text().splitlines()[-1])
    found = {"steps": last["step"], "skipped_steps": last["skipped_steps"], "eval_loss": "nan"}
  elif status == 0:
    summary = json.loads((out / "summary.json").read_text())
    keys = ("steps", "skipped_steps", "loss_scale", "final_loss")
    found = {key: value for key, value in summary.items() if key in keys or key.startswith("eval_")}
  else:
    raise RuntimeError(f"exit status {status} of {each.command}:\n{text[-3000:]}")
  if each.policy == "fp16" and each.seed == 0 and status == 0:
    found["float16"] = _numerics(out, folder)
  if TASKS[each.task].base == "bf16":
    found["low_precision"] = _low_precision(each)
  known = {"task": each.task, "policy": each.policy, "seed": each.seed, "command": each.command}
  return {**known, **found}, time.perf_counter() - start


def _low_precision(each: Run) -> float:
  """The share of the forward products' FLOPs that are in less than 16 bits."""
  config = load_config(ROOT / TASKS[each.task].config, each.changes)
  rows = make_setup(config).explain().rows
  low = sum(row.flops for row in rows if row.after.startswith(("float8", "float4")))
  return low / sum(row.flops for row in rows)


def _numerics(out: pathlib.Path, folder: pathlib.Path) -> dict[str, Any]:
  """What float16 makes of a run's activation gradients at its end, unscaled and at its loss scale."""
  file = folder / f"{out.name}.json"
  arguments = [str(out), "batches=1", "--no-advice", "--json", str(file), "--html", f"{file}.html"]
  status, text = _script("numerics.py", arguments, folder)
  if status:
    raise RuntimeError(f"exit status {status} of scripts/numerics.py {out}:\n{text[-3000:]}")
  report = json.loads(file.read_text())
  gradients = [tensor for tensor in report["tensors"] if tensor["kind"] == "activation gradient"]

  def shares(tensors: list[dict[str, Any]], key: str) -> dict[str, float]:
    there = sum(tensor["count"] - tensor["zero"] for tensor in tensors)
    lost = lambda what: sum(tensor[key]["float16"][what] * tensor["count"] for tensor in tensors)
    return {what: lost(what) / there for what in ("underflow", "subnormal")}

  return {
    "loss_scale": report["loss_scale"],
    "unscaled": shares(gradients, "shares"),
    "scaled": shares(gradients, "scaled_shares"),
    "unscaled_logits": shares(gradients[-1:], "shares"),
  }


def _script(name: str, arguments: list[str], folder: pathlib.Path, policy: str = "") -> tuple[int, str]:
  """Exit status of one of `scripts/`, and what it said."""
  environment = {"JAX_COMPILATION_CACHE_DIR": str(folder / "cache"), **os.environ}
  if policy == "fp32-reordered" and jax.default_backend() == "cpu":
    flags = os.environ.get("XLA_FLAGS", "")
    environment["XLA_FLAGS"] = f"{flags} --xla_force_host_platform_device_count=2"
  command = [sys.executable, str(ROOT / "scripts" / name), *arguments]
  pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
  done = subprocess.run(command, cwd=ROOT, env=environment, check=False, **pipes)
  return done.returncode, done.stdout


def _line(result: dict[str, Any]) -> str:
  accuracy = f", accuracy {result['eval_accuracy']:.4f}" if "eval_accuracy" in result else ""
  return (
    f"{result['task']}, {POLICIES[result['policy']][0]}, seed {result['seed']}: "
    f"eval loss {float(result['eval_loss']):.4f}{accuracy}, {result['skipped_steps']} skipped"
  )
