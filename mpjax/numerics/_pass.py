"""One pass over a batch: the loss of a training step, its gradients and updates, and values at its points."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Hashable, Iterator
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from mpjax._average import worth
from mpjax._types import Array, PyTree
from mpjax.casting import float32_where_there_is_one, plan_of
from mpjax.dtypes import cast_like
from mpjax.loss_scale import find_scaler, hide, is_inexact, unscale
from mpjax.numerics._batches import rows
from mpjax.numerics._points import Point, points_of, watched
from mpjax.numerics._seen import Seen, on_no_axes, see
from mpjax.numerics._updates import UpdateSums, update_sums
from mpjax.optim import unstored
from mpjax.patterns import named_leaves
from mpjax.policy import Policy, get_policy, matmul_precision
from mpjax.sharding import on_device
from mpjax.step import TrainState, TrainStep, Transform, merged, only, state_of, unrounded

T = TypeVar("T")

# Bytes on a device that the values at the points and their gradients may take, in addition to a step.
_FITS = 1 << 29
# Products run in FP8 if their dimensions are multiples of this.
_FP8_ROWS = 16


class Left(NamedTuple):
  """A value and its cotangent; also the probe as whose cotangents they leave a program.

  Attributes:
    value: [*steps, *repeats, *shape], in the value's dtype.
    gradient: the same shape and dtype.
    reached: float32[*steps, *repeats]: 1; 0 if the loss does not depend on the value.
  """

  value: Any
  gradient: Any
  reached: Any


class Looked(NamedTuple):
  """What a pass keeps, on the devices.

  Attributes:
    loss: float32[], unscaled.
    points: by module and name, summaries of a point's value and of its unscaled gradient, [*steps].
    gradients: summaries of unscaled gradients by tree path of the parameter.
    updates: sums by tree path, for master weights and the optimiser's updates of them, in float32. Empty if
      not asked for.
  """

  loss: Array
  points: dict[tuple[str, str], tuple[Seen, Seen]]
  gradients: dict[str, Seen]
  updates: dict[str, UpdateSums]

  def seen(self) -> Iterator[tuple[tuple[Any, ...], Seen]]:
    """Yields (kind, module and name or path, steps) and the summary of all that a pass kept, on the host."""
    for name, both in self.points.items():
      for index in np.ndindex(*both[0].top.shape):
        for kind, seen in zip(("activation", "activation gradient"), both, strict=True):
          if (one := seen[index]).count:  # otherwise the loss does not depend on it
            yield (kind, name, index), one
    for path, seen in self.gradients.items():
      yield ("weight gradient", path), seen


@dataclasses.dataclass(frozen=True)
class Pass:
  """A pass over the first rows of a batch; it does not change the state.

  Attributes:
    points: the values that it observes.
    rows: number of rows that it looks at.
    run: (state, batch) -> the loss, `Left` and the number of values that it does not depend on by point,
      gradients by path, (weight, update) by path.
  """

  points: list[Point]
  rows: int
  run: Callable[..., tuple[Array, list[tuple[Left, Array]], dict[str, Array], dict[str, tuple[Array, Array]]]]

  def __call__(self, state: TrainState, batch: PyTree) -> Looked:
    """Runs the pass, and summarises what leaves it."""
    loss, left, gradients, updates = self.run(state, batch)
    scaler = find_scaler(state.opt_state)
    scale = 1.0 if scaler is None else scaler.scale
    both = lambda one, apart, absent: (
      see(one.value, apart, absent=absent),
      see(one.gradient, apart, scale, absent),
    )
    points = zip(self.points, left, strict=True)
    return Looked(
      loss,
      {(p.module, p.name): both(one, len(p.steps), absent) for p, (one, absent) in points},
      {path: see(x) for path, x in gradients.items()},
      {path: update_sums(*pair) for path, pair in updates.items()},
    )


@jax.custom_vjp
def leave(x: Array, probe: Left) -> Array:
  """Returns `x`; the probe's cotangent is `x` and its cotangent.

  Args:
    x: a floating array.
    probe: a probe; nothing depends on it.
  """
  return x


def _leave_backward(x: Array, ct: Array) -> tuple[Array, Left]:
  value, gradient = (on_no_axes(lambda x: x, one) for one in (x, ct))
  return ct, Left(value, gradient, jnp.ones([]))


leave.defvjp(lambda x, probe: (x, x), _leave_backward)


def kept(step: TrainStep, key: Hashable, make: Callable[[], T]) -> T:
  """Returns what a step keeps under a key; `make` makes it the first time."""
  if key not in step.kept:
    step.kept[key] = make()
  found: T = step.kept[key]
  return found


def step_under(step: TrainStep, policy: Policy) -> TrainStep:
  """Returns a step under another policy, always the same one."""
  return kept(step, ("under", policy), lambda: step.with_policy(policy))


def reference_step(step: TrainStep) -> TrainStep:
  """Returns the step with everything in float32 and full-precision matrix products on every device."""
  return step_under(step, get_policy({"base": "fp32", "matmul_precision": "highest"}))


def reference_state(state: TrainState) -> TrainState:
  """Returns the state with float32 parameters and without an optimiser, thus without a loss scale."""
  params = get_policy("fp32").cast_to_param(state.arrays)
  return state.replace(arrays=params, opt_state=(), fp8_state={})


def passes(sides: list[tuple[TrainStep, TrainState]], batch: PyTree, *, updates: bool) -> list[Pass]:
  """Returns the pass of each step for batches of a batch's shapes; all look at the same rows.

  They look at as many rows as fit in memory with all that leaves a pass; at all rows if the loss does not
  take fewer.

  Args:
    sides: steps of one loss function with their states.
    batch: a batch; only its shapes matter.
    updates: whether the first step's optimiser runs, too.
  """
  of_rows = lambda batch: [_points(step, state, batch) for step, state in sides]
  points, n = of_rows(batch), rows(batch)
  size = lambda p: 2 * jnp.dtype(p.dtype).itemsize * math.prod((*p.steps, *p.repeats, *p.shape))
  needed = max(sum(map(size, found)) for found in points)
  chosen = _rows_that_fit(batch, needed, any(step.policy.fp8 for step, _ in sides))
  if chosen < n:
    try:
      points = of_rows(jax.eval_shape(lambda batch: _first_rows(chosen, batch), batch))
    except (TypeError, ValueError):  # such as a reshape to a number of rows
      chosen = n

  def of_side(step: TrainStep, state: TrainState, found: list[Point], updates: bool) -> Pass:
    make = lambda: Pass(found, chosen, _program(step, found, chosen, updates))
    return kept(step, ("pass", _types((state, batch)), chosen, updates), make)

  both = enumerate(zip(sides, points, strict=True))
  return [of_side(*side, found, updates and i == 0) for i, (side, found) in both]


def _points(step: TrainStep, state: TrainState, batch: PyTree) -> list[Point]:
  return kept(step, ("points", _types((state, batch))), lambda: loss_points(step, state, batch))


def _rows_that_fit(batch: PyTree, needed: int, in_fp8: bool) -> int:
  """Returns the number of rows to look at, if all that leaves a pass over the whole batch takes `needed`."""
  leaves, n = [leaf for leaf in jax.tree.leaves(batch) if np.ndim(leaf)], rows(batch)
  if needed <= _FITS or any(len(leaf) != n for leaf in leaves):
    return n
  shardings = [leaf.sharding for leaf in leaves if isinstance(leaf, jax.Array)]
  least = max((len(sharding.device_set) for sharding in shardings), default=1)
  if in_fp8:  # of another number of rows, other products would run in FP8
    least = math.lcm(least, _FP8_ROWS)
  return min(max(n * _FITS // needed // least, 1) * least, n)


def _first_rows(n: int, batch: PyTree) -> PyTree:
  """Returns a batch's first rows; if they are fewer than all, each leaf has rows or is a scalar."""
  return batch if n == rows(batch) else jax.tree.map(lambda x: x[:n] if np.ndim(x) else x, batch)


def _types(tree: PyTree) -> Hashable:
  """Returns what a program depends on: the structure and types of its arguments."""
  leaves, structure = jax.tree.flatten(tree)
  return structure, tuple(jax.typeof(x) for x in leaves)


def loss_points(step: TrainStep, state: TrainState, batch: PyTree) -> list[Point]:
  """Returns the values of the loss function that a pass observes; computes nothing."""
  found: list[Point] = []

  def find(fun: Callable[..., Any], policy: Policy | None, **_: Any) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
      found[:] = points_of(plan_of(fun, args, kwargs, policy)).values()
      return fun(*args, **kwargs)

    return run

  with tracing(step):  # the function also runs unchanged
    jax.eval_shape(lambda state, batch: _loss(step, state, batch, find)[0], state, batch)
  return found


def _program(step: TrainStep, points: list[Point], n: int, updates: bool) -> Callable[..., Any]:
  def probe(point: Point) -> Left:
    loops = (*point.steps, *point.repeats)
    zeros = jnp.zeros((*loops, *point.shape), point.dtype)
    return Left(zeros, zeros, jnp.zeros(loops, jnp.float32))

  @jax.jit
  def run(state: TrainState, batch: PyTree) -> Any:
    state, batch = on_device(state), _first_rows(n, batch)
    weights = step.loss.compute_params(state)

    def scaled_loss(params: PyTree, probes: list[Left]) -> tuple[Array, Array]:
      def watch(fun: Callable[..., Any], policy: Policy | None, **options: Any) -> Callable[..., Any]:
        return watched(fun, policy, probes, leave, **options)

      return _loss(step, state, batch, watch, merged(params, weights))

    with tracing(step):
      passed = jax.value_and_grad(scaled_loss, argnums=(0, 1), has_aux=True)
      (_, loss), (grads, left) = passed(_inexact(weights), [probe(point) for point in points])
      grads, _ = step.trained.arguments(state, grads)
    of_updates = _updates(step, state, grads, loss) if updates else {}
    scaler = find_scaler(state.opt_state)
    grads = hide(grads) if scaler is None else unscale(hide(grads), scaler.scale)
    of_points = [(one, _absent(point, one)) for point, one in zip(points, left, strict=True)]
    return loss, of_points, dict(float_leaves(grads)), of_updates

  return run


@contextlib.contextmanager
def tracing(step: TrainStep) -> Iterator[None]:
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
  scaled, out = loss.scaled(params, state.fp8_state, batch, loss.keys(state.step_key, batch), state)
  return scaled, worth(out.loss)


def _updates(
  step: TrainStep, state: TrainState, grads: PyTree, loss: Array
) -> dict[str, tuple[Array, Array]]:
  """Returns each (master) weight with the optimiser's update of it, by tree path."""
  params = step.trained.parameters(state)
  masters, layers = unrounded(params, step.layers(state))
  updates, _ = step.tx.update(cast_like(grads, params), unstored(state_of(layers)), masters, value=loss)
  weights = dict(float_leaves(hide(masters)))
  return {path: (weights[path], update) for path, update in float_leaves(hide(updates))}


def _absent(point: Point, left: Left) -> Array:
  """Returns uint32[*steps]: the number of a point's values in each step that the loss does not depend on."""
  loops = tuple(range(len(point.steps), left.reached.ndim))
  return jnp.sum(left.reached == 0, axis=loops, dtype=jnp.uint32) * np.uint32(math.prod(point.shape))


def _inexact(params: PyTree) -> PyTree:
  """Returns the parameters that may have a gradient, with `optax.MaskedNode` for the others."""
  return only(jax.tree.map(is_inexact, params), params)


def float_leaves(tree: PyTree) -> list[tuple[str, Any]]:
  """Returns the floating leaves that are not empty, with their tree paths."""
  return [
    (name, leaf)
    for name, leaf in named_leaves(tree)
    if jnp.issubdtype(leaf.dtype, jnp.floating) and leaf.size
  ]
