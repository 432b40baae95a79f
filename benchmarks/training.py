"""Training a GPT under every policy, beside the matrix peaks of the same device and beside PyTorch.

    python benchmarks/training.py [--size tiny|124m|1b] [--measure steps|products|largest-batch]
      [--policy NAME] [--seq N] [--batch N] [--rounds N] [--steps N] [--alone] [--torch-python PATH]
      [--minutes M] [--json FILE]

`steps`: `mpjax.train.models.GPT` trained on random tokens by `mpjax.make_train_step` with AdamW, and an
equal PyTorch model under autocast, compiled, with the fused AdamW. Each is a process of its own, so that
its peak of memory is its own, and one that ends (no memory left) leaves the others. They live side by side
and take turns in every round, in shuffled order; with `--alone`, or where they do not fit together, one
lives after another. A round is `--steps` steps and one wait; the figure is the median over rounds.
`products`: `fp8_dot_general` at the sizes of the model's products and two squares, beside bfloat16's.
`largest-batch`: the largest that each trains with, by doubling and one step between.

Peaks are those of large square products that the device really reaches. The model's FLOPs are 6 for each
token and parameter in a matrix, and 12 x layers x dim x sequence for a token's attention (whole squares,
nothing taken off for the causal mask, nothing added for what is computed again). The attainable peak is
that of the dtypes of a policy's products, weighted by their FLOPs. `fp32` is float32 throughout, not JAX's
default, which on a GPU is TensorFloat-32. The command takes `--minutes` at most; what there is no time for
is named in the report.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import platform
import random
import shlex
import statistics
import sys
import time
from typing import Any

import jax
import yaml
from record import origin, write
from worker import Worker

HERE = pathlib.Path(__file__).parent
MEMORY = {
  "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
  "XLA_PYTHON_CLIENT_MEM_FRACTION": os.environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.95"),
}
SIZES: dict[str, dict[str, int]] = {
  "tiny": {"layers": 3, "dim": 128, "heads": 4, "vocab": 256},
  "124m": {"layers": 12, "dim": 768, "heads": 12, "vocab": 50304},
  "1b": {"layers": 24, "dim": 1792, "heads": 14, "vocab": 50304},
}
# Sequence, batch, side of the squares that peaks are taken from, products or steps in flight.
DEFAULTS = {
  "tiny": {"seq": 128, "batch": 2, "peak": 256, "calls": 2, "steps": 2, "rounds": 3},
  "124m": {"seq": 1024, "batch": 16, "peak": 8192, "calls": 20, "steps": 5, "rounds": 8},
  "1b": {"seq": 1024, "batch": 8, "peak": 8192, "calls": 20, "steps": 3, "rounds": 5},
}
ADAMW = {"learning_rate": 3e-4, "b1": 0.9, "b2": 0.95, "eps": 1e-8, "weight_decay": 0.1}
# Name to what a process is given, and the peaks that its products could reach.
POLICIES: dict[str, dict[str, Any]] = {
  "fp32": {"policy": {"base": "fp32", "matmul_precision": "float32"}, "peak": "float32"},
  "tf32": {"policy": {"base": "tf32"}, "peak": "tensorfloat32"},
  "bf16": {"policy": {"base": "bf16"}, "peak": "bfloat16"},
  "bf16, fused attention": {
    "policy": {"base": "bf16", "autocast": False},
    "peak": "bfloat16",
    "attention": "cudnn",
  },
  "fp16": {"policy": {"base": "fp16"}, "peak": "float16"},
  "fp8": {"policy": {"base": "fp8", "fp8": {"recipe": "current"}}, "peak": "float8"},
  "fp8, delayed": {"policy": {"base": "fp8", "fp8": {"recipe": "delayed"}}, "peak": "float8"},
  "torch, bf16": {"policy": "bf16", "peak": "bfloat16", "torch": True},
}
BASE = "bf16"
FOR_ROUNDS = 0.2  # of --minutes


def main() -> None:
  options = arguments()
  # This process measures nothing, and leaves the accelerator to those that it starts.
  jax.config.update("jax_platforms", "cpu")
  deadline = time.monotonic() + 60 * options.minutes
  sizes = SIZES[options.size]
  report = origin(command_line(sys.argv[1:]), "flax", "optax", device="not known")
  report |= {"size": options.size, "model": sizes, "seq": options.seq, "batch": options.batch}
  report["xla_flags"] = os.environ.get("XLA_FLAGS", "")
  report |= measure_peaks(options, deadline)
  print(f"{report['device']}; {options.size}, sequence {options.seq}, batch {options.batch}")
  for name, flops in report.get("peaks", {}).items():
    print(f"  peak of {name:22}{flops / 1e12:10.2f} TFLOP/s")
  sys.stdout.flush()
  for what, run in (("steps", run_steps), ("products", run_products), ("largest-batch", run_largest)):
    if what in options.measure:
      run(options, deadline, report)
  write(report, options.json)


def arguments() -> argparse.Namespace:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--size", choices=SIZES, default="tiny")
  measures = ("steps", "products", "largest-batch")
  parser.add_argument("--measure", choices=measures, action="append", help="default: steps and products")
  parser.add_argument(
    "--policy", action="append", type=policy, metavar="NAME", help=f"{', '.join(POLICIES)}, or NAME=YAML"
  )
  for name in ("seq", "batch", "rounds", "steps"):
    parser.add_argument(f"--{name}", type=int)
  parser.add_argument("--alone", action="store_true", help="one process after another, not in turns")
  parser.add_argument("--torch-python", default=sys.executable, help="an interpreter that has torch")
  parser.add_argument("--minutes", type=float, default=9.0)
  parser.add_argument("--json")
  options = parser.parse_args()
  options.measure = options.measure or ["steps", "products"]
  options.policy = dict(options.policy or POLICIES.items())
  options.defaults = DEFAULTS[options.size]
  for name in ("seq", "batch", "rounds", "steps"):
    if getattr(options, name) is None:
      setattr(options, name, options.defaults[name])
  return options


def policy(text: str) -> tuple[str, dict[str, Any]]:
  """A policy by name, or a new one: `fp8 saved={base: fp8, fp8: {saved_activations: fp8}}`."""
  name, equals, spec = text.partition("=")
  if not equals and name in POLICIES:
    return name, POLICIES[name]
  given = yaml.safe_load(spec) if equals else None
  if not isinstance(given, dict) or given.get("base") not in POLICIES:
    raise argparse.ArgumentTypeError(
      f"{text!r}: expected {', '.join(POLICIES)}, or NAME=YAML with a base (fp32, tf32, bf16, fp16, fp8)"
    )
  return name, {"policy": given, "peak": POLICIES[given["base"]]["peak"]}


def measure_peaks(options: argparse.Namespace, deadline: float) -> dict[str, Any]:
  """The device, and the FLOP/s of its large square products."""
  task = {"measure": "peaks", "size": options.defaults["peak"], "calls": options.defaults["calls"]}
  worker = jax_worker(task)
  ready = worker.read(deadline - time.monotonic())
  rounds = [ready] if "error" in ready else [worker.ask(deadline - time.monotonic()) for _ in range(3)]
  worker.close()
  if "error" in rounds[-1]:
    sys.exit(f"no peaks could be measured: {rounds[-1]['error']}")
  options.cpu = ready["platform"] == "cpu"
  peaks = {name: statistics.median(measured[name] for measured in rounds) for name in rounds[0]}
  device = f"{ready['device']}, {platform.machine()}"
  return {"device": device, "platform_version": ready["platform_version"], "peaks": peaks}


def run_steps(options: argparse.Namespace, deadline: float, report: dict[str, Any]) -> None:
  """Trains under every policy; those that do not fit beside others, by themselves."""
  rows = report["policies"] = {}
  names = list(options.policy)
  rows |= turns(options, deadline, names) if not options.alone else {}
  for name in names:
    if name not in rows or ("memory" in rows[name].get("error", "").lower() and len(names) > 1):
      rows |= turns(options, deadline, [name])
  per_token = flops_per_token(report["model"], options.seq)
  report["flops_per_token"] = per_token
  for name, row in rows.items():
    if "rounds_s" in row:
      summarise(row, rows.get(BASE, {}), options.policy[name]["peak"], report)
    if "torch" in row:
      report["versions"]["torch"] = row["torch"]
  write(report, options.json)
  show_steps(rows, options)


def turns(options: argparse.Namespace, deadline: float, names: list[str]) -> dict[str, Any]:
  """Processes that live side by side, one of them at work at any time."""
  rows: dict[str, Any] = {}
  workers: dict[str, Worker] = {}
  left = lambda: deadline - time.monotonic()
  # What has started is measured, whether or not there is time to start the others.
  reserve = lambda: 60 * options.minutes * FOR_ROUNDS if workers else 0
  for name in names:
    if left() <= reserve():
      rows[name] = {"skipped": "no time left of --minutes"}
      continue
    worker = step_worker(options, name, options.batch)
    rows[name] = worker.read(left() - reserve())
    print(f"  {name}: {rows[name].get('error') or rows[name].get('skipped') or 'ready'}", flush=True)
    if "skipped" in rows[name]:
      worker.close()
    elif "error" not in rows[name]:
      workers[name] = worker
      rows[name] |= {"policy": options.policy[name]["policy"], "beside": len(names) - 1, "rounds_s": []}
  for i in range(options.rounds):
    for name in random.Random(i).sample(list(workers), len(workers)):
      measured = workers[name].ask(left())
      if "error" in measured:
        del workers[name]
        rows[name] = rows[name] | {"ended": measured["error"]} if rows[name]["rounds_s"] else measured
        continue
      rows[name]["rounds_s"].append(measured.pop("seconds"))
      rows[name] |= measured
  for worker in workers.values():
    worker.close()
  return rows


def summarise(row: dict[str, Any], base: dict[str, Any], kind: str, report: dict[str, Any]) -> None:
  """Median time, its ratio to policy bf16's, and shares of the measured peaks."""
  seconds = row["seconds"] = statistics.median(row["rounds_s"])
  if "rounds_s" in base:
    pairs = zip(row["rounds_s"], base["rounds_s"], strict=False)
    ratios = [mine / other for mine, other in pairs]
    row["ratio"] = statistics.median(ratios)
    row["q25"], _, row["q75"] = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
  row["tokens_per_s"] = report["batch"] * report["seq"] / seconds
  rate = row["model_flops_per_s"] = row["tokens_per_s"] * report["flops_per_token"]
  row["peak"] = kind
  row["share_of_peak"] = rate / report["peaks"][kind]
  fp8 = row.get("fp8_share_of_flops", 0.0)
  other = report["peaks"]["bfloat16" if kind == "float8" else kind]
  row["share_of_attainable"] = rate * (fp8 / report["peaks"]["float8"] + (1 - fp8) / other)


def show_steps(rows: dict[str, Any], options: argparse.Namespace) -> None:
  """Prints the table of training steps."""
  gb = lambda n: f"{n / 1e9:10.2f}" if n else f"{'-':>10}"
  titles = ("ms", "ratio", "tokens/s", "peak %", "att. %", "peak GB", "step GB")
  print(f"{'step':24}" + "".join(f"{title:>10}" for title in titles))
  for name, row in rows.items():
    if "seconds" not in row:
      print(f"{name:24}{row.get('error') or row.get('skipped')}")
      continue
    ratio = f"{row['ratio']:10.3f}" if "ratio" in row else f"{'-':>10}"
    print(
      f"{name:24}{row['seconds'] * 1e3:10.2f}{ratio}{row['tokens_per_s']:10.0f}"
      f"{100 * row['share_of_peak']:10.1f}{100 * row['share_of_attainable']:10.1f}{gb(row['peak_bytes'])}"
      f"{gb(row.get('step_bytes'))}  loss {row['first_loss']:.3f} to {row['loss']:.3f}",
      flush=True,
    )


def run_products(options: argparse.Namespace, deadline: float, report: dict[str, Any]) -> None:
  """FP8 products beside bfloat16's: seconds, FLOP/s and share of the FP8 peak."""
  dim, tokens = report["model"]["dim"], options.batch * options.seq
  square = options.defaults["peak"]
  shapes = {
    "qkv": (tokens, 3 * dim, dim),
    "out": (tokens, dim, dim),
    "up": (tokens, 4 * dim, dim),
    "down": (tokens, dim, 4 * dim),
    "square / 2": (square // 2,) * 3,
    "square": (square,) * 3,
  }
  tables = report["products"] = {}
  print(f"{'product [M, K] x [K, N]':44}{'forward':>27}{'with backward':>27}")
  for name, shape in shapes.items():
    title = f"{name} {'x'.join(map(str, shape))}"
    table = tables[title] = product_rows(options, deadline, shape, report["peaks"]["float8"])
    for kind, row in table.items() if "error" not in table else ():
      cells = (
        f"{part['seconds'] * 1e6:9.1f} us{part['ratio']:6.2f}x{100 * part['share_of_peak']:7.1f}%"
        for part in row.values()
      )
      print(f"  {f'{title}, {kind}':42}" + "".join(cells), flush=True)
    if "error" in table:
      print(f"  {title}: {table['error']}", flush=True)
    write(report, options.json)


def product_rows(options: argparse.Namespace, deadline: float, shape: Any, peak: float) -> dict[str, Any]:
  worker = jax_worker({"measure": "products", "shape": shape, "calls": options.defaults["calls"]})
  answers = [worker.read(deadline - time.monotonic())]
  for _ in range(options.rounds):
    if "error" not in answers[-1]:
      answers.append(worker.ask(deadline - time.monotonic()))
  worker.close()
  if "error" in answers[-1]:
    return answers[-1]
  rows: dict[str, Any] = {kind: {} for kind in answers[1]}
  for at, (part, products) in enumerate((("forward", 1), ("with_backward", 3))):
    flops = 2 * products * shape[0] * shape[1] * shape[2]
    for kind, row in rows.items():
      seconds = statistics.median(answer[kind][at] for answer in answers[1:])
      row[part] = {
        "seconds": seconds,
        "flops_per_s": flops / seconds,
        # How many times as fast as in bfloat16.
        "ratio": statistics.median(answer["bf16"][at] / answer[kind][at] for answer in answers[1:]),
        "share_of_peak": flops / seconds / peak,
      }
  return rows


def run_largest(options: argparse.Namespace, deadline: float, report: dict[str, Any]) -> None:
  """The largest batch that each policy trains with, from --batch on."""
  rows = report["largest_batch"] = {}
  for name in options.policy:
    row = rows[name] = {"batch": None, "tokens_per_s": None, "tried": {}}
    batch, step = options.batch, options.batch
    while batch and time.monotonic() < deadline:
      worker = step_worker(options, name, batch)
      answer = worker.read(deadline - time.monotonic())
      if "error" not in answer and "skipped" not in answer:
        answer = worker.ask(deadline - time.monotonic())
      worker.close()
      reason = answer.get("error") or answer.get("skipped")
      row["tried"][batch] = reason or "trains"
      if reason is None:
        row |= {"batch": batch, "tokens_per_s": batch * options.seq / answer["seconds"]}
      if reason is None and step == batch:  # still doubling
        step = batch = 2 * batch
      elif reason is not None and step == batch and row["batch"]:
        batch, step = row["batch"] * 3 // 2, 0  # between the last that trains and the first that does not
      else:
        break
    print(f"{name:24}largest batch {row['batch']}, tried {row['tried']}", flush=True)
    write(report, options.json)


def step_worker(options: argparse.Namespace, name: str, batch: int) -> Worker:
  """The process that trains under a policy."""
  given = options.policy[name]
  task = {"measure": "step", "policy": given["policy"], "attention": given.get("attention", "xla")}
  task |= {"model": SIZES[options.size], "seq": options.seq, "batch": batch, "adamw": ADAMW}
  task |= {"steps": options.steps, "warm_up": 2, "cpu": options.cpu and options.size == "tiny"}
  if given.get("torch"):
    return Worker(options.torch_python, str(HERE / "training_torch.py"), task, {})
  return jax_worker(task)


def jax_worker(task: dict[str, Any]) -> Worker:
  return Worker(sys.executable, str(HERE / "training_jax.py"), task, MEMORY)


def flops_per_token(sizes: dict[str, int], seq: int) -> int:
  """What a forward and a backward pass of the model multiply and add; see above."""
  layers, dim = sizes["layers"], sizes["dim"]
  return 6 * (12 * layers * dim**2 + sizes["vocab"] * dim) + 12 * layers * dim * seq


def command_line(given: list[str]) -> str:
  """This command without where its report and the other interpreter are."""
  kept, skip = [], False
  for argument in given:
    if not skip and not argument.startswith(("--json", "--torch-python")):
      kept.append(argument)
    skip = argument in ("--json", "--torch-python")
  return shlex.join(["training.py", *kept])


if __name__ == "__main__":
  main()
