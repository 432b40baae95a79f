"""What `make_train_step` costs beside a hand-written float32 optax step of the same model.

    python benchmarks/overhead.py [--model tf|tf_opt|mlp] [--rounds N] [--json FILE]

Every variant runs in every round, in shuffled order; the ratio to the hand-written step is taken within the
round, and the median over rounds is printed with its quartiles. Memory and instruction counts are the
compiler's own. On a CPU the ratios tell of overhead only: what half precision gains is another matter.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from record import compiler_figures, origin, print_times, write

import mpjax

MODELS = {
  # 3.3M parameters, 1024 tokens a step: bound by matrix products
  "tf": {"dim": 256, "heads": 4, "layers": 4, "batch": 8, "seq": 128, "inner": 1},
  # 12.9M parameters, 32 tokens a step: bound by the optimiser
  "tf_opt": {"dim": 512, "heads": 8, "layers": 4, "batch": 1, "seq": 32, "inner": 3},
  # 7k parameters: bound by dispatch
  "mlp": {"inner": 200},
  # the same, 500 steps in one program
  "mlp_scan": {"inner": 1},
}
SCANNED = 500
VOCAB = 256


def transformer(dim: int, heads: int, layers: int, batch: int, seq: int) -> tuple[Any, Any, Any]:
  """Parameters, loss and batch of a small transformer in plain JAX."""
  keys = iter(jax.random.split(jax.random.key(0), 4 * layers + 4))
  normal = lambda *shape: jax.random.normal(next(keys), shape) / np.sqrt(shape[0])
  blocks = [
    {
      "qkv": normal(dim, 3 * dim),
      "out": normal(dim, dim),
      "up": normal(dim, 4 * dim),
      "down": normal(4 * dim, dim),
      "gain": jnp.ones((2, dim)),
    }
    for _ in range(layers)
  ]
  params = {
    "embed": normal(VOCAB, dim),
    "position": normal(seq, dim),
    "head": normal(dim, VOCAB),
    "blocks": blocks,
  }

  def norm(x: jax.Array, gain: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    return (wide * jax.lax.rsqrt((wide * wide).mean(-1, keepdims=True) + 1e-6)).astype(x.dtype) * gain

  def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k).astype(jnp.float32) / np.sqrt(q.shape[-1])
    scores = jnp.where(jnp.tri(seq, dtype=bool), scores, -jnp.inf)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores).astype(v.dtype), v)

  def loss(params: Any, batch: Any) -> jax.Array:
    x = params["embed"][batch["x"]] + params["position"]
    for block in params["blocks"]:
      qkv = norm(x, block["gain"][0]) @ block["qkv"]
      q, k, v = (t.reshape(*x.shape[:2], heads, dim // heads) for t in jnp.split(qkv, 3, -1))
      x = x + attend(q, k, v).reshape(x.shape) @ block["out"]
      x = x + jax.nn.gelu(norm(x, block["gain"][1]) @ block["up"]) @ block["down"]
    logits = (x @ params["head"]).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()

  tokens = np.random.default_rng(0).integers(0, VOCAB, (batch, seq + 1)).astype(np.int32)
  return params, loss, {"x": jnp.asarray(tokens[:, :-1]), "y": jnp.asarray(tokens[:, 1:])}


def mlp() -> tuple[Any, Any, Any]:
  """Parameters, loss and batch of a small perceptron."""
  sizes = (32, 64, 64, 10)
  keys = jax.random.split(jax.random.key(0), len(sizes))
  params = [
    {"w": jax.random.normal(key, (a, b)) / np.sqrt(a), "b": jnp.zeros(b)}
    for key, a, b in zip(keys, sizes[:-1], sizes[1:], strict=False)
  ]

  def loss(params: Any, batch: Any) -> jax.Array:
    x = batch["x"]
    for layer in params[:-1]:
      x = jax.nn.relu(x @ layer["w"] + layer["b"])
    logits = (x @ params[-1]["w"] + params[-1]["b"]).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()

  rng = np.random.default_rng(0)
  x = rng.normal(size=(64, 32)).astype(np.float32)
  return params, loss, {"x": jnp.asarray(x), "y": jnp.asarray(rng.integers(0, 10, 64))}


def variants(loss: Any) -> dict[str, tuple[Any, Any]]:
  """Name to (`params -> state`, jitted `(state, batch) -> (state, ...)`)."""
  tx = optax.adamw(1e-3)

  def hand(state: Any, batch: Any) -> Any:
    params, opt_state = state
    value, grads = jax.value_and_grad(loss)(params, batch)
    updates, opt_state = tx.update(grads, opt_state, params)
    return (optax.apply_updates(params, updates), opt_state), value

  out: dict[str, tuple[Any, Any]] = {
    "hand-written fp32": (lambda p: (p, tx.init(p)), jax.jit(hand, donate_argnums=0))
  }
  scaled = {"base": "fp32", "loss_scaling": "dynamic"}
  for name, policy in (
    ("make_train_step fp32", "fp32"),
    ("make_train_step fp32 + dynamic loss scale", scaled),
    ("make_train_step bf16", "bf16"),
    ("make_train_step fp16", "fp16"),
  ):
    step = mpjax.make_train_step(loss, tx, policy)
    out[name] = (step.init, step.jitted)
  return out


def build(model: str) -> tuple[int, Any, Any, Any]:
  """Steps to time at once, parameters, loss and batch."""
  settings = dict(MODELS[model])
  inner = settings.pop("inner")
  return inner, *(mlp() if model.startswith("mlp") else transformer(**settings))


def measure(model: str, rounds: int, variants: Callable[[Any], dict[str, Any]] = variants) -> dict[str, Any]:
  """Compiles every variant, runs them interleaved, and returns their figures; the first is the base."""
  inner, params, loss, batch = build(model)
  rows, runs = {}, {}
  for name, (init, step) in variants(loss).items():
    step = scanned(step) if model.endswith("_scan") else step
    state = jax.tree.map(jnp.array, init(jax.tree.map(jnp.copy, params)))
    start = time.perf_counter()
    compiled = step.lower(state, batch).compile()
    rows[name] = {"compile_s": time.perf_counter() - start, **compiler_figures(compiled)}
    runs[name] = Runner(step, state, batch)
    runs[name](3)
  return compare(rows, runs, inner, rounds)


def scanned(step: Any) -> Any:
  """A program of SCANNED steps."""
  body = lambda batch: lambda state, _: step(state, batch)
  run = lambda state, batch: jax.lax.scan(body(batch), state, None, length=SCANNED)
  return jax.jit(run, donate_argnums=0)


def compare(rows: dict[str, Any], runs: dict[str, Runner], inner: int, rounds: int) -> dict[str, Any]:
  """`rows` with the times of `runs`, as ratios to the first within each round."""
  first = next(iter(rows))
  times: dict[str, list[float]] = {name: [] for name in runs}
  for i in range(rounds):
    order = list(runs)
    random.Random(i).shuffle(order)
    for name in order:
      times[name].append(runs[name](inner) / inner)
  base_times, base = times[first], rows[first]
  for name, row in rows.items():
    ratios = [a / b for a, b in zip(times[name], base_times, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    row |= {"ms": statistics.median(times[name]) * 1e3, "ratio": middle, "q25": low, "q75": high}
    row |= {"temp_ratio": row["temp_bytes"] / base["temp_bytes"], "ops_ratio": row["ops"] / base["ops"]}
  return rows


class Runner:
  """Runs a step on its own state and returns the seconds that n steps took."""

  def __init__(self, step: Any, state: Any, batch: Any):
    self.step, self.state, self.batch = step, state, batch

  def __call__(self, n: int) -> float:
    start = time.perf_counter()
    for _ in range(n):
      self.state, _ = self.step(self.state, self.batch)
    jax.block_until_ready(self.state)
    return time.perf_counter() - start


def main() -> None:
  options = arguments(__doc__)
  report: dict[str, Any] = origin(f"overhead.py --rounds {options.rounds}", "flax", "optax") | {"models": {}}
  for model in options.model or MODELS:
    rows = report["models"][model] = measure(model, options.rounds)
    print_times(model, rows)
  write(report, options.json)


def arguments(doc: str) -> argparse.Namespace:
  """The command line that this benchmark and its variants take."""
  parser = argparse.ArgumentParser(description=doc.splitlines()[0])
  parser.add_argument("--model", choices=MODELS, action="append")
  parser.add_argument("--rounds", type=int, default=40)
  parser.add_argument("--json")
  return parser.parse_args()


if __name__ == "__main__":
  main()
