"""`find_nonfinite`: a training step operation by operation, until one makes NaN or infinity."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.tree_util import KeyPath

from mpjax._types import PyTree
from mpjax.dtypes import cast_floating
from mpjax.loss_scale import get_loss_scale
from mpjax.loss_scale._monitor import NonFinite
from mpjax.loss_scale._overwritten import map_parts
from mpjax.loss_scale._state_access import find_loss_scales
from mpjax.numerics.nonfinite._evaluate import Evaluation
from mpjax.numerics.nonfinite._origins import Origin, count, is_finite
from mpjax.numerics.nonfinite._report import NonfiniteReport
from mpjax.step import TrainState, TrainStep

_MOST_OTHERS = 8


def find_nonfinite(
  step: TrainStep, state: TrainState, batch: PyTree, *, reference: bool = True
) -> NonfiniteReport:
  """Names the first operation of a training step that made a non-finite value, and what to try.

  ```python
  print(mpjax.find_nonfinite(step, state, batch))
  ```

  The loss and gradients are computed once more, operation by operation in program order, under the step's
  policy and at the state's loss scale; nothing is updated or donated. To blame is an operation whose result
  has NaN or infinity that its operands do not explain, and from which non-finite values lead to the loss or
  a gradient without a gap: the infinities of a mask that a softmax turns to zeros are nobody's fault.

  Args:
    step: the training step.
    state: the state before the step, as `step.init` or a checkpoint gives it.
    batch: the batch of the step.
    reference: compute a step that is non-finite in float32 too, without loss scaling.

  Returns:
    A `NonfiniteReport`; print it.
  """
  found = _hunt(step, state, batch)
  if found.finite or not reference:
    return found
  policy = step.policy
  narrow = policy.compute_dtype.itemsize < 4 or policy.param_dtype.itemsize < 4
  if not narrow and not policy.fp8 and not policy.overrides and found.loss_scale == 1:
    return dataclasses.replace(found, in_float32=True)
  wide = state.replace(
    params=map_parts(lambda p: cast_floating(p, jnp.float32), lambda p: p, state.params),
    opt_state=(),
    fp8_state={},
  )
  same = _hunt(step.with_policy("fp32"), wide, batch)
  return dataclasses.replace(found, in_float32=not same.finite, reference=same)


def _hunt(step: TrainStep, state: TrainState, batch: PyTree) -> NonfiniteReport:
  # Divided over devices it would be one operation; what overflows in their sum alone is seen below.
  whole = step.without_mesh()
  with contextlib.nullcontext() if step.layout is None else step.layout.in_mesh():
    closed, shapes = jax.make_jaxpr(whole.loss_and_gradients, return_shape=True)(state, batch)
  evaluation = Evaluation(step.accumulate)
  values = evaluation.run(closed, _inputs(state, batch))
  names = ["loss" if len(p) == 1 else "gradients" + _text(p[1:]) for p, _ in _leaves(shapes)]
  results = _nonfinite(names, [value.array for value in values])
  reached = {i for value in values for i in value.blame}
  sources = [evaluation.sources[i] for i in sorted(reached)]
  to_blame = [source for source in sources if not source.meant] or sources
  origins = [source.origin for source in to_blame if source.origin is not None]
  inputs = {source.name: source.counts for source in to_blame if source.counts is not None}
  places = _places(origins)
  others = places if inputs else places[1:]
  has_scale = bool(find_loss_scales(state.opt_state))
  return NonfiniteReport(
    origin=origins[0] if origins and not inputs else None,
    inputs=inputs,
    others=tuple(others[:_MOST_OTHERS]),
    results=results,
    compiled=_nonfinite(names, jax.tree.leaves(step.gradients(state, batch))),
    gradients=len(values) - 1,
    loss_scale=float(get_loss_scale(state.opt_state).scale) if has_scale else 1.0,
    policy=str(step.policy),
    compute_dtype=step.policy.compute_dtype.name,
    autocast=step.policy.autocast,
    summed=_summed(step),
  )


def _summed(step: TrainStep) -> str:
  layout, dtype = step.layout, step.policy.reduce_dtype
  if layout is None or layout.shards == 1 or dtype is None or dtype.itemsize > 2:
    return ""
  return f"{dtype.name} over {layout.shards} devices"


def _inputs(state: TrainState, batch: PyTree) -> list[tuple[str, Any, bool]]:
  """Returns the name and array of each leaf, and whether infinities below zero in it are a mask's."""
  named = [(_text(path).lstrip("."), leaf, False) for path, leaf in _leaves(state)]
  named += [("batch" + _text(path), leaf, True) for path, leaf in _leaves(batch)]
  return [(name, jnp.asarray(leaf), mask) for name, leaf, mask in named]


def _leaves(tree: PyTree) -> list[tuple[Any, Any]]:
  return jax.tree_util.tree_flatten_with_path(tree)[0]


def _text(path: KeyPath) -> str:
  return jax.tree_util.keystr(path)


def _nonfinite(names: list[str], arrays: list[Any]) -> dict[str, NonFinite]:
  """Returns the counts of the arrays that are not finite."""
  named = zip(names, arrays, strict=True)
  return {name: count(array) for name, array in named if not is_finite(array)}


def _places(origins: list[Origin]) -> list[Origin]:
  """Returns the first origin of each module and line: where an operation fails, its derivative often does."""
  found: dict[Any, Origin] = {}
  for origin in origins:
    found.setdefault((origin.module, origin.line or origin.primitive), origin)
  return list(found.values())
