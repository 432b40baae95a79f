"""Tracing a gradient, and tracing it again, of programs whose parts are inner `jit`s.

What JAX has traced of an inner `jit` it does not trace again for another `jit` around it.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

import mpjax
from benchmarks._record import origin, provenance
from benchmarks.autocast._models import gpt
from mpjax.jaxpr import equations_in

PHASES = ("first", "again")
POLICIES = (None, "bf16", "fp16")


class Perceptron(nn.Module):
  layers: int
  results: int
  width: int = 64

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    for _ in range(self.layers):
      x = jnp.tanh(nn.Dense(self.width)(x))
    return nn.Dense(self.results)(x)


@dataclasses.dataclass(frozen=True)
class Burgers:
  """A network that is trained to solve Burgers' equation: its derivatives are in the loss, the second too."""

  model: nn.Module
  windows: int = 8

  def arguments(self) -> tuple[Any, Any]:
    """The shapes of parameters, and of times and places."""
    return _variables(self.model, 3), jax.ShapeDtypeStruct((256, 2), jnp.float32)

  def solution(self, params: Any, t: jax.Array, x: jax.Array) -> jax.Array:
    return self.model.apply(params, jnp.stack([t, jnp.cos(x), jnp.sin(x)]))[0]

  def residual(self, params: Any, t: jax.Array, x: jax.Array) -> jax.Array:
    u = self.solution(params, t, x)
    u_t, u_x = jax.grad(self.solution, (1, 2))(params, t, x)
    u_xx = jax.grad(jax.grad(self.solution, 2), 2)(params, t, x)
    return u_t + u * u_x - 0.01 * u_xx

  @functools.partial(jax.jit, static_argnums=0)
  def residuals(self, params: Any, points: jax.Array) -> jax.Array:
    """The squared residual in windows of time, each weighed by what is left of those before it."""
    t, x = jnp.sort(points[:, 0]), points[:, 1]
    r = jax.vmap(self.residual, (None, 0, 0))(params, t, x)
    squares = jnp.square(r).reshape(self.windows, -1).mean(1)
    return squares * jax.lax.stop_gradient(jnp.exp(squares - jnp.cumsum(squares)))

  @functools.partial(jax.jit, static_argnums=0)
  def loss(self, params: Any, points: jax.Array) -> jax.Array:
    x = points[:, 1]
    u = jax.vmap(self.solution, (None, None, 0))(params, jnp.float32(0), x)
    return jnp.square(u + jnp.sin(x)).mean() + self.residuals(params, points).mean()


@dataclasses.dataclass(frozen=True)
class NeuralODE:
  """Series as solutions of an ODE whose field is a network, by Runge-Kutta steps of adaptive size."""

  model: nn.Module
  steps: int = 32

  def arguments(self) -> tuple[Any, Any]:
    """The shapes of parameters, and of series."""
    return _variables(self.model, 2), jax.ShapeDtypeStruct((8, 16, 2), jnp.float32)

  @functools.partial(jax.jit, static_argnums=0)
  def field(self, params: Any, y: jax.Array) -> jax.Array:
    return self.model.apply(params, y)

  @functools.partial(jax.jit, static_argnums=0)
  def solve(self, params: Any, start: jax.Array, times: jax.Array) -> jax.Array:
    field = functools.partial(self.field, params)

    @jax.checkpoint
    def step(carry: tuple[jax.Array, ...], _: None) -> tuple[tuple[jax.Array, ...], None]:
      t, y, size, i, saved = carry
      k1 = field(y)
      k2 = field(y + size * k1 / 2)
      k3 = field(y + size * 3 * k2 / 4)
      new = y + size * (2 * k1 + 3 * k2 + 4 * k3) / 9
      k4 = field(new)
      error = size * (-5 * k1 / 72 + k2 / 12 + k3 / 9 - k4 / 8)
      scaled = jnp.sqrt(jnp.square(error / (1e-6 + 1e-3 * jnp.abs(new))).mean() + 1e-12)
      t, y = jnp.where(scaled < 1, t + size, t), jnp.where(scaled < 1, new, y)
      saved = jnp.where(t >= times[i], saved.at[i].set(y), saved)
      i = jnp.minimum(i + (t >= times[i]), len(times) - 1)
      return (t, y, size * jnp.clip(0.9 * scaled ** (-1 / 3), 0.2, 5.0), i, saved), None

    saved = jnp.zeros((len(times), *start.shape))
    carry = (jnp.float32(0), start, jnp.float32(0.05), jnp.int32(0), saved)
    return jax.lax.scan(step, carry, None, length=self.steps)[0][-1]

  @functools.partial(jax.jit, static_argnums=0)
  def loss(self, params: Any, series: jax.Array) -> jax.Array:
    times = jnp.linspace(0, 1, series.shape[1])
    solved = jax.vmap(self.solve, (None, 0, None))(params, series[:, 0], times)
    return jnp.square(solved - series).mean()


def _variables(model: nn.Module, inputs: int) -> Any:
  return jax.eval_shape(model.init, jax.random.key(0), jnp.zeros(inputs))


def _blocks() -> tuple[Callable[..., jax.Array], tuple[Any, Any]]:
  task = gpt(64, 4, 12, seq=16, batch=2)
  return task.loss(), (jax.eval_shape(task.init), {"x": task.x, "y": task.y})


def _of(example: Burgers | NeuralODE) -> tuple[Callable[..., jax.Array], tuple[Any, Any]]:
  return (lambda params, batch: example.loss(params, batch)), example.arguments()


# Each makes a loss, which no cache knows, and the shapes of its arguments.
EXAMPLES: dict[str, Callable[[], tuple[Callable[..., jax.Array], tuple[Any, Any]]]] = {
  "PINN": lambda: _of(Burgers(Perceptron(5, 1))),
  "neural ODE": lambda: _of(NeuralODE(Perceptron(2, 2))),
  "12 blocks, no inner jit": _blocks,
}


def seconds_of(make: Callable[..., Any], policy: str | None) -> dict[str, float]:
  """The processor's seconds of tracing a gradient from empty caches, and of tracing it again."""
  loss, args = make()
  jax.clear_caches()
  gc.collect()
  times = {}
  for phase in PHASES:
    start = time.process_time()
    jax.jit(_gradient(loss, policy)).trace(*args)
    times[phase] = time.process_time() - start
  return times


def _gradient(loss: Callable[..., jax.Array], policy: str | None) -> Callable[..., Any]:
  return jax.value_and_grad(loss if policy is None else mpjax.autocast(loss, policy))


def measure(rounds: int) -> dict[str, Any]:
  """Seconds of every policy, and the ratios to float32's of the same round, policies in shuffled order."""
  report = origin(f"autocast retrace --rounds {rounds}", "flax") | {"models": {}}
  for model, make in EXAMPLES.items():
    rows: dict[str, dict[str, float]] = {}
    report["models"][model] = rows
    for policy in POLICIES:
      seconds_of(make, policy)  # what Python itself does once
    found: dict[str | None, list[dict[str, float]]] = {policy: [] for policy in POLICIES}
    for i in range(rounds):
      for policy in random.Random(i).sample(POLICIES, len(POLICIES)):
        found[policy].append(seconds_of(make, policy))
    for policy, times in found.items():
      loss, args = make()
      traced = jax.make_jaxpr(_gradient(loss, policy))(*args)
      row: dict[str, float] = {"equations": sum(1 for _ in equations_in(traced))}
      for phase in PHASES:
        ratios = [a[phase] / b[phase] for a, b in zip(times, found[None], strict=True)]
        row[f"{phase}_s"] = statistics.median(t[phase] for t in times)
        row[f"{phase}_ratio"] = statistics.median(ratios)
      rows[policy or "float32"] = row
      cells = (f"{row[f'{phase}_s']:9.3f} s ({row[f'{phase}_ratio']:.2f})" for phase in PHASES)
      print(f"{model:26}{policy or 'float32':10}{row['equations']:6} equations", *cells, flush=True)
  return report


def table(report: dict[str, Any]) -> str:
  """Seconds of the first trace and of the second, and their ratios to float32's."""
  lines = [
    "| gradient of | equations | first trace s (ratio) | again s (ratio) |",
    "|---|---|---|---|",
  ]
  for model, rows in report["models"].items():
    for name, row in rows.items():
      cells = (f"{row[f'{phase}_s']:.3f} ({row[f'{phase}_ratio']:.2f})" for phase in PHASES)
      lines.append(f"| {model}, {name} | {row['equations']} | {' | '.join(cells)} |")
  return "\n".join([*lines, "", provenance(report)])
