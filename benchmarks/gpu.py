"""A GPT's training step on this machine's GPU: mpjax by policy beside PyTorch, in turns.

PyTorch has autocast, `torch.compile`, its fused attention and AdamW, and a `GradScaler` for float16. Both
have layer norms, learned positions and whole logits, and take as many random tokens. Each step has a process
of its own, which waits while another one is timed; its memory is the peak of its allocator.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import pathlib
import statistics
import subprocess
import sys
import time
from typing import Any

# Its processes import JAX or PyTorch, and may have only one of them.
ROOT = pathlib.Path(__file__).resolve().parents[1]
SIZES = {
  "tiny": {"dim": 64, "layers": 2, "heads": 2, "vocab": 256, "length": 64, "batch": 2},
  "124m": {"dim": 768, "layers": 12, "heads": 12, "vocab": 50304, "length": 1024, "batch": 8},
  "1b": {"dim": 1792, "layers": 24, "heads": 14, "vocab": 50304, "length": 1024, "batch": 8},
}
STEPS = [("mpjax", "bf16"), ("mpjax", "fp16"), ("mpjax", "fp8"), ("torch", "bf16"), ("torch", "fp16")]
INNER = 5  # steps of a turn


def add_arguments(parser: argparse.ArgumentParser) -> None:
  parser.add_argument("--size", choices=SIZES, default="124m", help="of the GPT")
  parser.add_argument("--rounds", type=int, default=10, help="turns of each step")
  parser.add_argument("--cpu", action="store_true", help="a trial on a CPU, which emulates FP8")
  parser.add_argument("--torch-python", default=sys.executable, metavar="FILE", help="one that has PyTorch")


def run(options: argparse.Namespace) -> dict[str, Any]:
  from benchmarks import _runner
  from benchmarks._timing import shuffled

  report = _runner.origin(f"gpu --size {options.size}", "flax", "optax") | {"size": options.size}
  steps: dict[str, Step] = {}
  turns: dict[str, list[Any]] = {}
  try:
    for by, policy in STEPS:
      name, python = f"{by} {policy}", options.torch_python if by == "torch" else sys.executable
      steps[name] = Step(python, {"by": by, "policy": policy, "cpu": options.cpu, **SIZES[options.size]})
      about = steps[name].ask()
      print(f"{name}: {about.get('problem', 'ready')}", flush=True)
      if "problem" not in about:
        turns[name] = []
        report["device"], report["versions"] = about["device"], report["versions"] | about["versions"]
    for number in range(options.rounds):
      for name in shuffled(turns, number):
        turns[name].append(steps[name].ask())
  finally:
    for step in steps.values():
      step.process.kill()
      step.process.communicate()
  report["rows"] = [
    found[-1] | {"step": name, "seconds": statistics.median(turn["seconds"] for turn in found)}
    for name, found in turns.items()
  ]
  print(table(report))
  return report


def table(report: dict[str, Any]) -> str:
  """Time, rate and memory of each step."""
  from benchmarks._runner import markdown

  tokens = SIZES[report["size"]]["batch"] * SIZES[report["size"]]["length"]
  lines = []
  for row in report["rows"]:
    peak = f"{row['peak'] / 1e9:.2f}" if row["peak"] else "-"
    lines.append([row["step"], f"{1e3 * row['seconds']:.1f}", f"{tokens / row['seconds']:.0f}", peak])
  return markdown([f"GPT {report['size']}", "ms", "tokens/s", "peak GB"], lines)


class Step:
  """A training step in a process of its own."""

  def __init__(self, python: str, task: dict[str, Any]):
    environment = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    environment |= {"JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": ""} if task["cpu"] else {}
    command = [python, "-m", "benchmarks.gpu", json.dumps(task)]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    self.process = subprocess.Popen(command, cwd=ROOT, env=environment, **pipes)

  def ask(self) -> dict[str, Any]:
    """What it says of itself, the first time; then what a turn gives."""
    print(file=self.process.stdin, flush=True)
    said = (line for line in self.process.stdout or () if line.startswith("{"))
    return dict(json.loads(next(said, '{"problem": "its process ended"}')))


def by_mpjax(task: dict[str, Any]) -> Any:
  """What the device is, a step that returns its loss, and the peak of memory."""
  import jax

  from mpjax.train import load_config, load_plugins, make_setup

  if not task["cpu"] and jax.default_backend() != "gpu":
    raise RuntimeError("JAX finds no GPU; --cpu is a trial")
  load_plugins([str(ROOT / "examples/llama/llama.py")])  # its random tokens
  emulated = task["cpu"] and task["policy"] == "fp8"
  given = {"policy": "{base: fp8, fp8: {emulate: true}}" if emulated else task["policy"]}
  given |= {f"model.{key}": task[key] for key in ("dim", "layers", "heads")}
  given |= {"model.norm": "layer", "model.positions": "learned", "model.loss_rows": 0}
  given |= {"data.kind": "random_tokens", "data.vocab_size": task["vocab"], "data.seq_len": task["length"]}
  given |= {"data.batch_size": task["batch"], "optimizer.clip_norm": "null"}
  overrides = [f"{key}={value}" for key, value in given.items()]
  setup = make_setup(load_config(str(ROOT / "configs/gpt_stdlib.yaml"), overrides))
  state, batch = setup.first_state(), jax.device_put(next(setup.data.train()))
  device = jax.local_devices()[0]

  def step() -> Any:
    nonlocal state
    state, metrics = setup.step(state, batch)
    return metrics["loss"]

  peak = lambda: (device.memory_stats() or {}).get("peak_bytes_in_use")
  return {"device": device.device_kind, "versions": {}}, step, peak


def by_torch(task: dict[str, Any]) -> Any:
  """The same with PyTorch."""
  import torch
  from torch import nn
  from torch.nn import functional

  device, dim = "cpu" if task["cpu"] else "cuda", task["dim"]

  class Block(nn.Module):
    def __init__(self) -> None:
      super().__init__()
      linear = functools.partial(nn.Linear, bias=False)
      self.norm_1, self.norm_2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
      self.qkv, self.out = linear(dim, 3 * dim), linear(dim, dim)
      self.up, self.down = linear(dim, 4 * dim), linear(4 * dim, dim)

    def forward(self, x: Any) -> Any:
      split = lambda part: part.unflatten(-1, (task["heads"], -1)).transpose(1, 2)
      q, k, v = map(split, self.qkv(self.norm_1(x)).chunk(3, -1))
      mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
      x = x + self.out(mixed.transpose(1, 2).flatten(2))
      return x + self.down(functional.gelu(self.up(self.norm_2(x)), approximate="tanh"))

  torch.set_float32_matmul_precision("high")
  with torch.device(device):
    embed, positions = nn.Embedding(task["vocab"], dim), nn.Embedding(task["length"], dim)
    blocks = nn.Sequential(*(Block() for _ in range(task["layers"])), nn.LayerNorm(dim))
    nn.init.normal_(embed.weight, std=0.02)
    tokens = torch.randint(task["vocab"], (task["batch"], task["length"] + 1))
  weights = [weight for part in (embed, positions, blocks) for weight in part.parameters()]
  adamw = torch.optim.AdamW(weights, lr=2e-3, weight_decay=0.05, fused=device == "cuda")
  scaler = torch.amp.GradScaler(device, enabled=task["policy"] == "fp16")
  dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[task["policy"]]

  def loss_fn() -> Any:
    logits = functional.linear(blocks(embed(tokens[:, :-1]) + positions.weight), embed.weight)
    return functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())

  forward = torch.compile(loss_fn, disable=device == "cpu")

  def step() -> Any:
    with torch.autocast(device, dtype=dtype):
      loss = forward()
    scaler.scale(loss).backward()
    scaler.step(adamw)
    scaler.update()
    adamw.zero_grad(set_to_none=True)
    return loss.detach()

  name = torch.cuda.get_device_name() if device == "cuda" else "cpu"
  peak = lambda: torch.cuda.max_memory_allocated() if device == "cuda" else None
  return {"device": name, "versions": {"torch": torch.__version__}}, step, peak


def serve(task: dict[str, Any]) -> None:
  """Compiles a step; then each line that comes in is a turn."""
  sys.stdin.readline()
  try:
    about, step, peak = {"mpjax": by_mpjax, "torch": by_torch}[task["by"]](task)
    [float(step()) for _ in range(3)]
  except (ImportError, RuntimeError) as error:
    print(json.dumps({"problem": f"left out: {error} ({sys.executable})"}), flush=True)
    return
  print(json.dumps(about), flush=True)
  for _ in sys.stdin:
    begin = time.perf_counter()
    loss = float([step() for _ in range(INNER)][-1])  # waits for the device
    seconds = (time.perf_counter() - begin) / INNER
    print(json.dumps({"seconds": seconds, "loss": loss, "peak": peak()}), flush=True)


if __name__ == "__main__":
  serve(json.loads(sys.argv[1]))
