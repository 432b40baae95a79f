"""diffrax: a neural ODE, solved with an adaptive step in a checkpointed loop, whose residuals have Python values."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import equinox.internal as eqxi
import jax
import jax.numpy as jnp
import numpy as np
import optax

from tests.models.code_bases._loops import Run, run


def _solve(field: Callable[..., Any], y0: jax.Array, times: jax.Array, tolerance: float = 1e-3) -> Any:
  """Integrates from the first time to the last by Heun's method with an adaptive step.

  Returns:
    Times and solution at the times that were asked for, the number of steps, and whether it came to the end.
  """
  loop = functools.partial(eqxi.while_loop, kind="checkpointed")

  def step(carry: Any) -> Any:
    t, dt, y, index, saved, steps = carry
    end = jnp.minimum(t + dt, times[-1])
    h = jnp.where(t < end, end - t, 1)  # of a row that waits for others
    k1 = field(t, y)
    k2 = field(end, y + h * k1)
    new, error = y + h * (k1 + k2) / 2, h * (k2 - k1) / 2
    size = tolerance + tolerance * jnp.maximum(jnp.abs(y), jnp.abs(new))
    scaled = jnp.sqrt(jnp.mean(jax.lax.stop_gradient(error / size) ** 2))
    is_kept = scaled < 1
    factor = jnp.clip(0.9 * jax.lax.rsqrt(jnp.maximum(scaled, 1e-3)), 0.2, 5.0)

    def save(carry: Any) -> Any:
      index, (saved_t, saved_y) = carry
      at = times[index]
      theta = (at - t) / h
      between = y + theta * h * (k1 + theta * (k2 - k1) / 2)
      return index + 1, (saved_t.at[index].set(at), saved_y.at[index].set(between))

    is_here = lambda carry: (
      is_kept & (times[jnp.minimum(carry[0], len(times) - 1)] <= end) & (carry[0] < len(times))
    )
    index, saved = loop(is_here, save, (index, saved), max_steps=len(times))
    t, y = jnp.where(is_kept, end, t), jnp.where(is_kept, new, y)
    return t, h * factor, y, index, saved, steps + 1

  saved = (jnp.full(times.shape, times[0]), jnp.zeros((len(times), *y0.shape)).at[0].set(y0))
  first = (times[0], times[1] - times[0], y0, 1, saved, 0)
  goes_on = lambda carry: carry[0] < times[-1]
  t, *_, saved, steps = loop(goes_on, step, first, max_steps=256, checkpoints=16)
  return *saved, steps, t >= times[-1]


class Ode(NamedTuple):
  """A neural ODE that learns a spiral.

  Attributes:
    solution: (params, batch) -> what `_solve` returns, for each row.
    loss: (params, batch) -> float32[].
    params: arrays of the field.
    batch: first values, times, and the solution at them.
  """

  solution: Callable[..., Any]
  loss: Callable[..., jax.Array]
  params: Any
  batch: tuple[np.ndarray, np.ndarray, np.ndarray]


def ode() -> Ode:
  """Returns a neural ODE, the loss of which holds the solver and all."""
  rng = np.random.default_rng(0)
  times = np.linspace(0, 1.5, 12, dtype=np.float32)
  turn = np.array([[-0.1, 2.0], [-2.0, -0.1]])
  y0 = rng.uniform(-1, 1, (16, 2)).astype(np.float32)
  flows = [np.linalg.matrix_power(np.eye(2) + turn * 1e-3, round(1000 * float(t))) for t in times]
  wanted = np.stack([y0 @ flow.T for flow in flows], axis=1).astype(np.float32)
  model = eqx.nn.MLP(2, 2, 32, 2, activation=jax.nn.softplus, key=jax.random.key(0))
  params, static = eqx.partition(model, eqx.is_inexact_array)

  def solution(params: Any, batch: Any) -> Any:
    model = eqx.combine(params, static)
    return jax.vmap(lambda y0: _solve(lambda t, y: model(y), y0, batch[1]))(batch[0])

  def loss(params: Any, batch: Any) -> jax.Array:
    return jnp.mean((solution(params, batch)[1] - batch[2]) ** 2)

  return Ode(solution, loss, params, (y0, times, wanted))


def diffrax(policy: str | None) -> Run:
  """A neural ODE in training: the whole loss is under autocast, solver and all."""
  at = ode()
  _, losses, skipped = run(at.loss, at.params, optax.adabelief(3e-3), policy, [at.batch] * 12)
  return Run(losses, skipped, {})
