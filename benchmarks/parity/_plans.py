"""The plans that are compared: of the cases of plan accuracy, of steps on H100s, and of kept programs."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax

import mpjax
from benchmarks import plan_accuracy, step_time
from mpjax.planner import Plan
from tests.planner.compiled import test_reading
from tests.planner.compiled.programs import KEPT

POLICIES = ("fp32", "bf16", "fp8")


def plans() -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
  """Yields names, and what makes the figures of a plan."""
  for case in itertools.product(plan_accuracy.CASES, plan_accuracy.POLICIES, ("h200", "v5e")):
    yield _named(", ".join((*case[0], *case[1:])), plan_accuracy.plan_of, *case[0], *case[1:], False)
  for (model, size), policy in itertools.product(plan_accuracy.CASES, POLICIES):
    if size == "small":
      yield _named(f"{model}, {policy}, h100", plan_accuracy.plan_of, model, size, policy, "h100", True)
  for policy in POLICIES:
    yield _named(f"perceptron, {policy}, h100", _perceptron, policy)
    yield _named(f"decoder, {policy}, h100:8", _decoder, policy)
  for version, name, target in KEPT:
    yield _named(f"kept {name}, {target}, {version}", test_reading.plan_of, version, name, target)


def _named(name: str, plan: Callable[..., Plan], *args: Any) -> tuple[str, Callable[[], dict[str, Any]]]:
  return name, lambda: figures(plan(*args))


def figures(plan: Plan) -> dict[str, Any]:
  """What a plan says of memory, products, collectives and time, without lines of source."""
  products: dict[str, int] = {}
  for product in plan.products:
    kind = f"{product.phase}, {product.dtype}, {'eligible' if product.eligible else product.why}"
    products[kind] = products.get(kind, 0) + product.flops
  return {
    "memory": plan.memory.parts | {"saved": plan.memory.saved_bytes},
    "compiled": plan.compiled and _without(plan.compiled, "memory"),
    "compiled parts": plan.compiled and plan.compiled.memory.parts,
    "products": products,
    "collectives": [_without(collective, "sources") for collective in plan.collectives],
    "time": plan.time and dataclasses.asdict(plan.time),
    "floor": plan.floor and dataclasses.asdict(plan.floor),
    "notes": plan.notes,
  }


def _without(figures: Any, *names: str) -> dict[str, Any]:
  return {name: value for name, value in dataclasses.asdict(figures).items() if name not in names}


def _perceptron(policy: str) -> Plan:
  def loss(params: list[jax.Array], batch: dict[str, jax.Array]) -> jax.Array:
    x = functools.reduce(lambda x, w: jax.nn.gelu(x @ w), params, batch["x"])
    return jnp.mean((x - batch["y"]) ** 2)

  step = mpjax.make_train_step(loss, optax.adamw(1e-4), policy)
  weights = [jax.ShapeDtypeStruct((2048, 2048), jnp.float32)] * 6
  batch = dict.fromkeys(("x", "y"), jax.ShapeDtypeStruct((8192, 2048), jnp.float32))
  return mpjax.plan(step, jax.eval_shape(step.init, weights), batch, target="h100", compile=True)


def _decoder(policy: str) -> Plan:
  (given,) = (row for row in step_time.PUBLISHED["rows"] if row["name"] == "Llama 3.1 8B, 8 H100")
  decoder = step_time.decoder_of(given)
  return mpjax.plan(*decoder.training(policy), target=decoder.target, compile=True)
