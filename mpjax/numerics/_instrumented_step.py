"""One pass over a batch: loss, gradients and update of a training step, kept as summaries."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from mpjax._average import worth
from mpjax._types import Array, PyTree
from mpjax.casting._half_precision import float32_where_there_is_one
from mpjax.dtypes import cast_like
from mpjax.loss_scale import find_scaler, hide, is_inexact, map_parts, unscale
from mpjax.numerics._batches import most_pieces
from mpjax.numerics._kept_programs import step_under
from mpjax.numerics._probes import Point, find_points, watched
from mpjax.numerics._summary import Summary, look
from mpjax.numerics._tensors import full_summary
from mpjax.numerics._update_sums import UpdateSums, update_sums
from mpjax.numerics._whole_tensors import Left, kept_whole, leave, pair_kept_whole
from mpjax.optim import unstored
from mpjax.patterns import named_leaves
from mpjax.policy import Policy, get_policy, matmul_precision
from mpjax.sharding import on_device
from mpjax.step import (
  TrainState,
  TrainStep,
  Transform,
  first_of_batch,
  merged,
  only,
  split_batch,
  state_of,
  unrounded,
)

# (state, batch, pieces) to the loss divided by the pieces, its gradients, and the summary of each point.
ProbedGradients = Callable[[TrainState, PyTree, int], tuple[Array, PyTree, list[Any]]]


class Seen(NamedTuple):
  """The results that a pass keeps; float32 on the device.

  Attributes:
    loss: [], unscaled.
    watched: for each point [pieces, *steps, 2, size]: summaries of the value and of its gradient.
    parameters: [size] by tree path.
    gradients: [size] by tree path, unscaled.
    updates: sums by tree path, for master weights and the optimiser's updates of them, in float32. Empty if
      not asked for.
  """

  loss: jax.Array
  watched: list[Any]
  parameters: dict[str, Any]
  gradients: dict[str, Any]
  updates: dict[str, UpdateSums]


def reference_step(step: TrainStep) -> TrainStep:
  """Returns the step with everything in float32 and full-precision matrix products on every device."""
  return step_under(step, get_policy({"base": "fp32", "matmul_precision": "highest"}))


def reference_state(state: TrainState) -> TrainState:
  """Returns the state with float32 parameters and without an optimiser, thus without a loss scale."""
  params = get_policy("fp32").cast_to_param(state.arrays)
  return state.replace(arrays=params, opt_state=(), fp8_state={})


def loss_points(step: TrainStep, state: TrainState, batch: PyTree) -> list[Point]:
  """Returns the values of the loss function that a pass observes; computes nothing."""
  found: list[Point] = []

  def find(fun: Callable[..., Any], policy: Policy | None, **_: Any) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
      found[:] = find_points(fun, policy)(*args, **kwargs)
      return fun(*args, **kwargs)

    return run

  with _tracing(step):  # the function also runs unchanged
    jax.eval_shape(lambda state, batch: _loss(step, state, batch, find)[0], state, batch)
  return found


def make_pass(
  step: TrainStep,
  points: list[Point],
  summary: Summary,
  *,
  scale: float = 1.0,
  updates: Summary | None = None,
  save_memory: bool = False,
  pieces: int = 1,
  whole: bool = False,
) -> Callable[[TrainState, PyTree], Seen]:
  """Returns a jitted pass: (state, batch) -> Seen; the state does not change.

  Args:
    step: the step.
    points: its `loss_points`.
    summary: the summary of each tensor.
    scale: the loss scale; gradients of activations are divided by it.
    updates: the summary of the ratios of updates to weights; `None`: the optimiser does not run.
    save_memory: whether the backward pass recomputes all but the results of matrix products.
    pieces: number of parts in which the batch's rows run, one after the other; part `i` is `i::pieces`.
    whole: leave the summaries of values that occur once a step to `condensed`, which has one program for all
      arrays of a length. Otherwise each summary is compiled separately, which takes several times as long as
      the step.
  """
  gradients = _probed_gradients(step, points, summary, scale, save_memory, whole)

  def run(state: TrainState, batch: PyTree) -> Seen:
    state = on_device(state)
    with _tracing(step):
      loss, grads, kept = _over_pieces(gradients, state, batch, pieces)
      grads, _ = step.trained.arguments(state, grads)
    sums = pair_kept_whole if whole else functools.partial(update_sums, updates or summary)
    of_updates = _updates(step, state, grads, loss, sums) if updates else {}
    scaler = find_scaler(state.opt_state)
    if scaler is not None:
      grads = unscale(hide(grads), scaler.scale)
    each = kept_whole if whole else summary
    params, grads = ({path: each(x) for path, x in _leaves(hide(tree))} for tree in (state.arrays, grads))
    return Seen(loss, kept, params, grads, of_updates)

  return jax.jit(run)


def _probed_gradients(
  step: TrainStep, points: list[Point], summary: Summary, scale: float, save_memory: bool, whole: bool
) -> ProbedGradients:
  """Returns a function from (state, batch, pieces) to loss / pieces, its gradients, and the summaries."""

  def see(x: Array, probe: Array | Left) -> Array:
    return leave(x, probe) if isinstance(probe, Left) else look(x, probe, summary, scale)

  def probe(point: Point) -> Array | Left:
    if whole and not point.repeated:
      return Left.probe(point)
    return jnp.zeros((*point.steps, 2, summary.size), jnp.float32)

  def gradients(state: TrainState, batch: PyTree, pieces: int) -> tuple[Array, PyTree, list[Any]]:
    weights = step.loss.compute_params(state)

    def scaled_loss(params: PyTree, probes: list[Any]) -> tuple[Array, Array]:
      def watch(fun: Callable[..., Any], policy: Policy | None, **options: Any) -> Callable[..., Any]:
        return watched(fun, policy, probes, see, **options)

      scaled, loss = _loss(step, state, batch, watch, merged(params, weights))
      # Gradients of the mean over all rows.
      return scaled / pieces, loss / pieces

    if save_memory:
      scaled_loss = jax.checkpoint(scaled_loss, policy=jax.checkpoint_policies.dots_saveable)
    probes = [probe(point) for point in points]
    passed = jax.value_and_grad(scaled_loss, argnums=(0, 1), has_aux=True)
    (_, loss), (grads, kept) = passed(_inexact(weights), probes)
    return loss, grads, kept

  return gradients


def _over_pieces(
  gradients: ProbedGradients, state: TrainState, batch: PyTree, pieces: int
) -> tuple[Array, PyTree, list[Any]]:
  """Returns the loss, its gradients in at least float32, and the summaries of the pieces: [pieces, ...]."""
  wide = lambda p: jnp.zeros_like(p, jnp.promote_types(p.dtype, jnp.float32))
  first = (jnp.zeros([], jnp.float32), jax.tree.map(wide, _inexact(state.arrays)))

  def add(total: tuple[Array, PyTree], piece: PyTree) -> tuple[tuple[Array, PyTree], list[Any]]:
    loss, grads, kept = gradients(state, piece, pieces)
    grads = map_parts(lambda t, g: t + g.astype(t.dtype), jnp.maximum, total[1], grads)
    return (total[0] + loss, grads), kept

  if pieces == 1:
    (loss, grads), kept = add(first, batch)
    return loss, grads, jax.tree.map(lambda x: x[None], kept)
  (loss, grads), kept = jax.lax.scan(add, first, split_batch(pieces, batch))
  return loss, grads, kept


def loss_and_gradients(step: TrainStep, state: TrainState, batch: PyTree) -> tuple[Array, PyTree]:
  """Returns the unscaled loss under the step's policy, and its gradients times the loss scale."""
  weights = step.loss.compute_params(state)

  def scaled_loss(params: PyTree) -> tuple[Array, Array]:
    return _loss(step, state, batch, step.loss.transform, merged(params, weights))

  with _tracing(step):
    (_, loss), grads = jax.value_and_grad(scaled_loss, has_aux=True)(_inexact(weights))
  return loss, grads


def differentiated(step: TrainStep, state: TrainState, batch: PyTree, transform: Transform) -> Array:
  """Returns the scaled loss, with another transform in place of autocast."""
  with _tracing(step):
    return _loss(step, state, batch, transform)[0]


def plain_loss(step: TrainStep) -> Callable[[TrainState, PyTree], Array]:
  """Returns a function from (state, batch) to the unscaled loss."""

  def plain(state: TrainState, batch: PyTree) -> Array:
    with _tracing(step):
      return _loss(step, state, batch, lambda fun, policy, **_: fun)[1]

  return plain


def is_mean_of_pieces(step: TrainStep, state: TrainState, batch: PyTree, pieces: int) -> bool:
  """Returns whether the loss of a batch is the mean of its pieces' losses; false for sums and contrasts.

  Args:
    step: a step in float32, whose rounding is far below the difference that a sum makes.
    state: its state.
    batch: a batch whose leaves have the same number of rows.
    pieces: number of parts into which the rows are split.
  """
  loss = plain_loss(step)

  def parts(state: TrainState, batch: PyTree) -> Array:
    split = split_batch(pieces, batch)
    return jax.lax.map(lambda piece: loss(state, piece), split).mean()

  try:
    there = [float(jax.jit(run)(state, batch)) for run in (loss, parts)]
  except (TypeError, ValueError):  # a leaf that does not have the batch's rows
    return False
  return math.isclose(*there, rel_tol=1e-4)


def inspection_programs(
  step: TrainStep, state: TrainState, batch: PyTree
) -> dict[str, tuple[Callable[[TrainState, PyTree], Any], TrainState]]:
  """Returns the programs that an inspection of updates runs, each with the state that it takes.

  They are the two passes, `policy` and `float32`, in as many pieces as possible, and `check`, the loss that
  shows whether the batch's loss is the mean of the pieces' losses. Nothing is computed: states and batches
  may be shapes.

  ```python
  for name, (program, its_state) in mpjax.numerics.inspection_programs(step, state, batch).items():
    print(name, program.lower(its_state, batch).cost_analysis())
  ```

  Args:
    step: a step of `mpjax.make_train_step`.
    state: its `TrainState`, as arrays or `jax.ShapeDtypeStruct`.
    batch: a tree of arrays or of `jax.ShapeDtypeStruct`.

  Returns:
    By name, a jitted function of (state, batch) and the state to give it.
  """
  summary, pieces = full_summary(2.0**16), most_pieces(batch)
  part = jax.eval_shape(lambda batch: first_of_batch(pieces, batch), batch)
  narrow = Summary.of([], sketch=True)
  mine = make_pass(step, loss_points(step, state, part), narrow, updates=summary, pieces=pieces)
  reference, wide = reference_step(step), reference_state(state)
  points = loss_points(reference, wide, part)
  theirs = make_pass(reference, points, summary, save_memory=True, pieces=pieces)
  return {
    "policy": (mine, state),
    "float32": (theirs, wide),
    "check": (jax.jit(plain_loss(reference)), wide),
  }


@contextlib.contextmanager
def _tracing(step: TrainStep) -> Iterator[None]:
  """Makes JAX trace a step's loss in its precision, on its mesh, and with float32 forms of regions."""
  mesh = contextlib.nullcontext() if step.layout is None else step.layout.in_mesh()
  with matmul_precision(step.policy), float32_where_there_is_one(), mesh:
    yield


def _loss(
  step: TrainStep, state: TrainState, batch: PyTree, transform: Transform, params: PyTree = None
) -> tuple[Array, Array]:
  """Returns the scaled loss and the unscaled loss, over the rows of all devices."""
  loss = dataclasses.replace(step.without_mesh().loss, transform=transform)
  params = loss.compute_params(state) if params is None else params
  scaled, out = loss.scaled(params, state.fp8_state, batch, loss.keys(state, batch), state)
  return scaled, worth(out.loss)


def _updates(
  step: TrainStep, state: TrainState, grads: PyTree, loss: jax.Array, sums: Callable[[Array, Array], Any]
) -> dict[str, Any]:
  params = step.trained.parameters(state)
  masters, layers = unrounded(params, step.layers(state))
  before = unstored(state_of(layers))
  updates, _ = step.tx.update(cast_like(grads, params), before, masters, value=loss)
  weights = dict(_leaves(hide(masters)))
  return {path: sums(weights[path], update) for path, update in _leaves(hide(updates))}


def _inexact(params: PyTree) -> PyTree:
  """Returns the parameters that may have a gradient, with `optax.MaskedNode` for the others."""
  return only(jax.tree.map(is_inexact, params), params)


def _leaves(tree: PyTree) -> list[tuple[str, Any]]:
  """Returns the floating leaves with their tree paths."""
  return [
    (name, leaf)
    for name, leaf in named_leaves(tree)
    if jnp.issubdtype(leaf.dtype, jnp.floating) and leaf.size
  ]
