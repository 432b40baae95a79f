"""Finds gradients that depend on the loss scale because a backward rule is not linear."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Float32

from mpjax._types import AnyJaxpr, Array, PyTree
from mpjax.jaxpr import equations_in
from mpjax.loss_scale import hide, scale_dependent, unscale
from mpjax.numerics._instrumented_step import scaled_gradients
from mpjax.numerics._kept_programs import kept
from mpjax.step import TrainState, TrainStep

# The ratio of the two scales for a program with float16, whose range a scale of 1 would not fit.
_APART = 4.0


class ScaleDependent(NamedTuple):
  """A parameter whose unscaled gradient changes with the loss scale.

  Attributes:
    path: tree path of the parameter.
    scales: two loss scales.
    norms: norms of its gradient at each of them.
  """

  path: str
  scales: tuple[float, float]
  norms: tuple[float, float]


def scale_dependence(
  reference: TrainStep, state: TrainState, batch: PyTree, scale: float
) -> tuple[ScaleDependent, ...]:
  """Compares the gradients of a float32 step without a loss scale and with one.

  Powers of two do not change a digit in float32, so a difference is not rounding. If the model itself casts
  to float16, its range may need a loss scale: then two scales that are near each other are compared.

  Args:
    reference: a step in float32.
    state: its state, without a loss scale.
    batch: the batch.
    scale: the loss scale.
  """

  def gradients(state: TrainState, batch: PyTree, scale: Float32[Array, ""]) -> PyTree:
    return unscale(hide(scaled_gradients(reference, state, batch, scale)), scale)

  run = kept(reference, "scale dependence", lambda: jax.jit(gradients))
  program = run.trace(state, batch, jnp.float32(scale)).jaxpr
  scales = (scale / _APART, scale) if _has_float16(program) else (1.0, scale)
  found = scale_dependent(lambda at: run(state, batch, jnp.float32(at)), scales)
  return tuple(ScaleDependent(path, scales, norms) for path, norms in found.items())


def _has_float16(jaxpr: AnyJaxpr) -> bool:
  made = (v.aval for equation in equations_in(jaxpr) for v in equation.outvars)
  return any(getattr(aval, "dtype", None) == jnp.float16 for aval in made)
