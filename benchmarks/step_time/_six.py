"""Six models on one GPU under three policies: their steps as planned and as measured."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import mpjax
from benchmarks._record import provenance
from benchmarks.gpu._models import ResNet50
from benchmarks.step_time._decoder import Decoder, Run, Sizes

POLICIES = ("fp32", "bf16", "fp8")
TARGET = "h100"
REPEATS = 20


@dataclasses.dataclass(frozen=True)
class Model:
  """A model as `mpjax.make_train_step` takes it.

  Attributes:
    loss_fn: of (parameters, batch), or of (parameters, batch, model_state) if there is one.
    params: shapes of the parameters.
    batch: shapes of a batch.
    model_state: shapes of what the model carries besides, or `None`.
  """

  loss_fn: Callable[..., Any]
  params: Any
  batch: dict[str, jax.ShapeDtypeStruct]
  model_state: Any = None


def _shape(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
  return jax.ShapeDtypeStruct(shape, dtype)


def _transformer(sizes: Sizes, rows: int, length: int, causal: bool = True) -> Model:
  """Returns a model of tokens; with `causal=False` each token is predicted from all others, and itself."""
  decoder = Decoder(sizes, Run(length, save=("all",), attention="plain", causal=causal))
  return Model(decoder.loss, _params(sizes), {"tokens": _shape(rows, length + 1, dtype=jnp.int32)})


def _params(sizes: Sizes) -> Any:
  return jax.tree.map(lambda given: _shape(*given[0]), sizes.shapes(), is_leaf=lambda x: isinstance(x, tuple))


def _vit(sizes: Sizes, rows: int, side: int, patch: int = 16) -> Model:
  """Returns a model of images as rows of patches; classes are the vocabulary."""
  length = (side // patch) ** 2
  decoder = Decoder(sizes, Run(length, save=("all",), attention="plain", causal=False))
  params = {**_params(sizes), "embed": _shape(3 * patch**2, sizes.dim)}

  def loss_fn(params: Any, batch: Any) -> jax.Array:
    x = decoder.stream(params, batch["patches"] @ params["embed"] + params["positions"])
    return _cross_entropy(x.mean(1) @ params["head"], batch["labels"])

  return Model(loss_fn, params, {"patches": _shape(rows, length, 3 * patch**2), "labels": _labels(rows)})


def _resnet(rows: int, side: int, classes: int) -> Model:
  net = ResNet50(classes)
  variables = dict(jax.eval_shape(net.init, jax.random.key(0), _shape(1, side, side, 3)))
  params = variables.pop("params")

  def loss_fn(params: Any, batch: Any, model_state: Any) -> Any:
    logits, model_state = net.apply(
      {"params": params, **model_state}, batch["images"], mutable=["batch_stats"]
    )
    return _cross_entropy(logits, batch["labels"]), {}, model_state

  return Model(loss_fn, params, {"images": _shape(rows, side, side, 3), "labels": _labels(rows)}, variables)


def _mlp(rows: int, dim: int, layers: int) -> Model:
  def loss_fn(params: Any, batch: Any) -> jax.Array:
    x = batch["x"]
    for i in range(layers):
      x = jax.nn.gelu(x @ params[f"layer_{i}"])
    return jnp.mean((x - batch["y"]) ** 2)

  params = {f"layer_{i}": _shape(dim, dim) for i in range(layers)}
  return Model(loss_fn, params, {"x": _shape(rows, dim), "y": _shape(rows, dim)})


def _labels(rows: int) -> jax.ShapeDtypeStruct:
  return _shape(rows, dtype=jnp.int32)


def _cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
  return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def models(tiny: bool = False) -> dict[str, Model]:
  """Returns the six models by name; tiny ones for a CPU."""
  one = 8 if tiny else 1  # what sizes are divided by
  layers = 2 if tiny else 12
  old: dict[str, Any] = {"mlp": "gelu", "norm": "layer", "positions": 1024 // one, "tied": True}
  wide: dict[str, Any] = {
    "dim": 1024 // one,
    "heads": 16 // one,
    "kv_heads": 16 // one,
    "hidden": 4096 // one,
  }
  gpt = Sizes(**wide, **old, layers=layers, vocab=50304 // one)
  bert = Sizes(**wide, **old | {"positions": 512 // one}, layers=layers, vocab=30592 // one)
  vit = Sizes(
    **wide, **old | {"positions": 4 if tiny else 196, "tied": False}, layers=layers, vocab=1024 // one
  )
  llama = Sizes(
    dim=2048 // one, layers=layers, heads=16 // one, kv_heads=8 // one, hidden=5632 // one, vocab=32000 // one
  )
  return {
    "gpt": _transformer(gpt, 16 // one, 1024 // one),
    "llama": _transformer(llama, 8 // one, 1024 // one),
    "vit": _vit(vit, 128 // one, 32 if tiny else 224),
    "resnet": _resnet(256 // one**2, 32 if tiny else 224, 1000),
    "mlp": _mlp(8192 // one, 8192 // one, 6),
    "bert": _transformer(bert, 32 // one, 512 // one, causal=False),
  }


def step_of(model: Model, policy: Any) -> mpjax.TrainStep:
  """Returns the training step of a model under a policy, with AdamW."""
  return mpjax.make_train_step(model.loss_fn, optax.adamw(1e-4), policy)


def state_of(step: mpjax.TrainStep, params: Any, batch: Any, model_state: Any) -> Any:
  """Returns the first state of a step; takes what is carried besides as `None` if there is none."""
  return step.init(params, model_state=model_state, batch=batch)


def plans(target: str = TARGET) -> Iterator[dict[str, Any]]:
  """Yields the predicted time of each model under each policy."""
  for name, model in models().items():
    for policy in POLICIES:
      step = step_of(model, policy)
      state = jax.eval_shape(
        lambda *given, step=step: state_of(step, *given), model.params, model.batch, model.model_state
      )
      plan = mpjax.plan(step, state, model.batch, target=target, compile=True)
      if plan.time is None or plan.floor is None:
        raise ValueError(f"{name} under {policy}: the plan has no time")
      yield {
        "model": name,
        "policy": policy,
        "parameters": plan.parameters,
        "seconds": plan.time.seconds,
        "parts": plan.time.parts,
        "floor": plan.floor.seconds,
      }


def with_measured(rows: Iterator[dict[str, Any]], report: dict[str, Any]) -> Iterator[dict[str, Any]]:
  """Yields planned rows with the measured seconds of a report, and the ratio."""
  known = {(row["model"], row["policy"]): row["seconds"] for row in report["rows"]}
  for row in rows:
    seconds = known.get((row["model"], row["policy"]))
    yield row | ({"measured": seconds, "ratio": row["seconds"] / seconds} if seconds else {})


def table(report: dict[str, Any]) -> str:
  """Returns a report of planned steps as a table, with the measured ones if it has them."""
  lines = [f"| model | {' | '.join(POLICIES)} | order |", "|---|---|---|---|---|"]
  rows = {(row["model"], row["policy"]): row for row in report["rows"]}
  for name in dict.fromkeys(row["model"] for row in report["rows"]):
    found = [rows[name, policy] for policy in POLICIES if (name, policy) in rows]
    cells = [_cell(row) for row in found]
    lines.append(f"| {name} | {' | '.join(cells)} | {_order(found)} |")
  return "\n".join([*lines, "", provenance(report)])


def _cell(row: dict[str, Any]) -> str:
  measured = f", measured {row['measured'] * 1e3:.1f}" if "measured" in row else ""
  return f"{row['seconds'] * 1e3:.1f} ms{measured}"


def _order(rows: list[dict[str, Any]]) -> str:
  """Returns whether the planned order of the policies is the measured one."""
  if not all("measured" in row for row in rows):
    return " < ".join(row["policy"] for row in sorted(rows, key=lambda row: row["seconds"]))
  planned, found = (sorted(rows, key=lambda row: row[key]) for key in ("seconds", "measured"))
  if planned == found:
    return "as measured"
  return f"planned {' < '.join(row['policy'] for row in planned)}"


def measured(tiny: bool = False) -> Iterator[dict[str, Any]]:
  """Yields the measured time of each model under each policy, on this machine's first device."""
  for name, model in models(tiny).items():
    made = [filled(tree) for tree in (model.params, model.batch, model.model_state)]
    for policy in POLICIES:
      start = time.perf_counter()
      step = step_of(model, policy)
      params, batch, model_state = jax.device_put(made)
      state = state_of(step, params, batch, model_state)
      del params, model_state
      for _ in range(3):
        state, metrics = step(state, batch)
      loss = float(metrics["loss"])
      ready = time.perf_counter()
      seconds = []
      for _ in range(REPEATS):
        begin = time.perf_counter()
        state, metrics = step(state, batch)
        jax.block_until_ready((state, metrics))
        seconds.append(time.perf_counter() - begin)
      yield {
        "model": name,
        "policy": policy,
        "seconds": statistics.median(seconds),
        "quartiles": statistics.quantiles(seconds, n=4)[::2],
        "until_ready": ready - start,
        "loss": loss,
      }
      del state, metrics


def filled(tree: Any) -> Any:
  """Returns small random numbers of the shapes of a tree; zeros for integers, ones for a variance."""
  noise = 0.02 * np.random.default_rng(0).standard_normal(1 << 20, np.float32)

  def of_leaf(path: Any, leaf: jax.ShapeDtypeStruct) -> np.ndarray:
    if not jnp.issubdtype(leaf.dtype, jnp.floating):
      return np.zeros(leaf.shape, leaf.dtype)
    last = str(getattr(path[-1], "key", path[-1]))
    if last in ("var", "scale") or (last.startswith("norm") and "bias" not in last):
      return np.ones(leaf.shape, leaf.dtype)
    return np.resize(noise, leaf.shape).astype(leaf.dtype)

  return jax.tree_util.tree_map_with_path(of_leaf, tree)
