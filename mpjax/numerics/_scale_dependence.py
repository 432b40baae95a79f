"""Gradients that depend on the loss scale, since a backward rule on the way to them is not linear."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Float32

from mpjax._types import AnyJaxpr, Array, PyTree
from mpjax.jaxpr import equations_in
from mpjax.loss_scale._finite import unscale
from mpjax.loss_scale._overwritten import hide
from mpjax.loss_scale._two_scales import scale_dependent
from mpjax.numerics._instrumented_step import scaled_gradients
from mpjax.numerics._kept_programs import kept
from mpjax.step import TrainState, TrainStep

# Of a program with float16 in it, whose range a scale of 1 would not fit.
_APART = 4.0


class ScaleDependent(NamedTuple):
  """A parameter whose unscaled gradient is another one at another loss scale.

  Attributes:
    path: of the parameter.
    scales: two loss scales.
    norms: of its gradient at either.
  """

  path: str
  scales: tuple[float, float]
  norms: tuple[float, float]


def scale_dependence(
  reference: TrainStep, state: TrainState, batch: PyTree, scale: float
) -> tuple[ScaleDependent, ...]:
  """Compares the gradients of a step in float32 without a loss scale with those under one.

  Powers of two change no digit there, so that what differs is no rounding. Where the model casts to float16
  by itself, two scales that are near each other are compared, as its range may need one.

  Args:
    reference: a step in float32.
    state: for it, without a loss scale.
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
