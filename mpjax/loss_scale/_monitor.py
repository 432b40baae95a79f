"""Records of a loss scale: metrics, the history of the scale, and the leaves that caused a skip."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from mpjax import _compat
from mpjax._types import Array, ArrayLike, Metrics, PyTree
from mpjax.loss_scale._finite import is_inexact
from mpjax.loss_scale._overwritten import hide, show
from mpjax.loss_scale._state_access import find_loss_scales, find_states, get_loss_scale
from mpjax.patterns import path_text
from mpjax.policy._loss_scaling import positive_integer

_FIELDS = ("good_steps", "skipped_steps", "consecutive_skips", "grads_finite", "updates_finite")


@dataclasses.dataclass(frozen=True)
class NonFinite:
  """Counts of an array's elements: NaN, +inf, -inf, and all."""

  nan: int
  posinf: int
  neginf: int
  size: int

  def __str__(self) -> str:
    counts = ((self.nan, "NaN"), (self.posinf, "+inf"), (self.neginf, "-inf"))
    return ", ".join(f"{n} {kind}" for n, kind in counts if n) + f" of {self.size}"


@dataclasses.dataclass(frozen=True)
class SkipReport:
  """The reason for the last skipped step.

  Attributes:
    step: the number of updates before it.
    loss_scale: the loss scale at that step.
    leaves: non-finite gradients by tree path.
  """

  step: int
  loss_scale: float
  leaves: dict[str, NonFinite]

  def __str__(self) -> str:
    rows = [f"  {path}: {counts}" for path, counts in self.leaves.items()]
    return "\n".join([f"step {self.step} was skipped at loss scale {self.loss_scale:g}:", *rows])


class TrackSkipsState(NamedTuple):
  """State of `track_skips`.

  Attributes:
    inner_state: state of the wrapped transform.
    step: array of shape [] and dtype int32; updates so far.
    scales: array of shape [history] and dtype float32; the scale of each step, a ring.
    finite: array of shape [history] and dtype bool; whether each step was applied.
    skipped_at: array of shape [] and dtype int32; the last skipped step, -1 for none.
    skipped_scale: array of shape [] and dtype float32; its loss scale.
    counts: tree of the gradients' structure; arrays of shape [4] and dtype int32: the numbers of NaN, +inf
      and -inf elements at that step, and of all elements.
  """

  inner_state: PyTree
  step: jax.Array
  scales: jax.Array
  finite: jax.Array
  skipped_at: jax.Array
  skipped_scale: jax.Array
  counts: PyTree


def loss_scale_metrics(opt_state: PyTree) -> Metrics:
  """Returns the loss scale and its counters, for a logger; works inside `jit`.

  ```python
  print(mpjax.loss_scale.loss_scale_metrics(opt_state))
  ```

  Args:
    opt_state: what `mpjax.get_loss_scale` takes; with several loss scales the names include the path.

  Returns:
    `loss_scale` f32[], `good_steps`, `skipped_steps`, `consecutive_skips` i32[], `grads_finite`,
    `updates_finite` bool[]; `{}` without a loss scale, so that one loop serves every policy.
  """
  found = find_loss_scales(opt_state)
  metrics = {}
  for path, state in found.items():
    prefix = "" if len(found) == 1 else f"{path}/"
    metrics[f"{prefix}loss_scale"] = state.scale
    metrics |= {f"{prefix}{name}": getattr(state, name) for name in _FIELDS}
  return metrics


def nonfinite_leaves(tree: PyTree) -> dict[str, NonFinite]:
  """Returns the leaves of `tree` that hold NaN or infinity, by path; copies the counts to the host.

  ```python
  for path, counts in mpjax.loss_scale.nonfinite_leaves(grads).items():
    print(path, counts)  # blocks/0/kernel 2 NaN of 256
  ```

  Args:
    tree: any pytree, such as gradients; leaves that are not inexact are ignored.

  Returns:
    By tree path an object with the numbers of NaN, +inf and -inf elements and the size; empty if all is
    finite.
  """
  return _rows(_count(tree))


def track_skips(
  tx: optax.GradientTransformation, *, history: int = 128, axis_name: Hashable | None = None
) -> optax.GradientTransformationExtraArgs:
  """Wraps a transform that holds a loss scale, and records its history and the reasons for skips.

  ```python
  tx = mpjax.loss_scale.track_skips(mpjax.dynamic_loss_scale(optax.adamw(1e-3)))
  opt_state = tx.init(params)
  print(mpjax.loss_scale.skip_report(opt_state))  # after some steps
  ```

  A conditional counts the elements of each leaf only on a skipped step (under `vmap`, which turns
  conditionals into selects, on every step). `skip_report` and `scale_history` read the record.

  Args:
    tx: a transform with one loss scale somewhere in its state.
    history: the number of steps whose scale is kept.
    axis_name: the mapped axis over which counts are summed, for gradients that differ along it. Leave it out
      if gradients are averaged already. `shard_map` with `check_vma=True` does not need it.

  Returns:
    A transform with a `TrackSkipsState`; its updates are those of `tx`.

  Raises:
    ValueError: if `history` is not a positive integer; at `init`, if `tx` does not have exactly one loss
      scale.
  """
  history = positive_integer("history", history)
  tx = optax.with_extra_args_support(tx)

  def init(params: PyTree) -> TrackSkipsState:
    inner_state = tx.init(params)
    get_loss_scale(inner_state)
    return TrackSkipsState(
      inner_state=inner_state,
      step=jnp.zeros([], jnp.int32),
      scales=jnp.zeros([history], jnp.float32),
      finite=jnp.ones([history], bool),
      skipped_at=jnp.full([], -1, jnp.int32),
      skipped_scale=jnp.zeros([], jnp.float32),
      counts=jax.tree.map(lambda _: jnp.zeros([4], jnp.int32), params),
    )

  def update(
    updates: PyTree, state: TrackSkipsState, params: PyTree = None, **extra_args: object
  ) -> tuple[PyTree, TrackSkipsState]:
    new_updates, inner_state = tx.update(updates, state.inner_state, params, **extra_args)
    finite = get_loss_scale(inner_state).taken
    scale = get_loss_scale(state.inner_state).scale

    def count() -> PyTree:
      gradients = hide(updates)
      tracked = bool(_compat.varying_axes(gradients))

      def summed(leaf: Array, n: Array) -> Array:
        axes = tuple(_compat.varying_axes(leaf)) if tracked else axis_name
        return jax.lax.psum(n, axes) if axes else n

      counts = jax.tree.map(summed, gradients, _count(gradients))
      return _in_structure_of(state.counts, show(updates, counts, state.counts))

    slot = state.step % history
    return new_updates, TrackSkipsState(
      inner_state=inner_state,
      step=state.step + 1,
      scales=state.scales.at[slot].set(scale),
      finite=state.finite.at[slot].set(finite),
      skipped_at=jnp.where(finite, state.skipped_at, state.step),
      skipped_scale=jnp.where(finite, state.skipped_scale, scale),
      counts=jax.lax.cond(finite, lambda: state.counts, count),
    )

  return optax.GradientTransformationExtraArgs(init, update)


def skip_report(opt_state: PyTree) -> SkipReport | None:
  """Returns why the last skipped step was skipped, as `track_skips` recorded it; `None` without a skip.

  ```python
  tx = mpjax.loss_scale.track_skips(mpjax.dynamic_loss_scale(optax.adamw(1e-3)))
  opt_state = tx.init(params)
  print(mpjax.loss_scale.skip_report(opt_state))  # None: no step so far
  ```

  Args:
    opt_state: an optimiser's state with the record of one `track_skips`; concrete, not traced.

  Returns:
    An object with `step`, `loss_scale` and `leaves`, whose `str` is a table.

  Raises:
    ValueError: if `opt_state` holds no record, or several.
  """
  state = _record(opt_state)
  if int(state.skipped_at) < 0:
    return None
  return SkipReport(int(state.skipped_at), float(state.skipped_scale), _rows(state.counts))


def scale_history(opt_state: PyTree) -> dict[str, np.ndarray]:
  """Returns the last steps of `track_skips`' record, oldest first.

  ```python
  tx = mpjax.loss_scale.track_skips(mpjax.dynamic_loss_scale(optax.adamw(1e-3)))
  opt_state = tx.init(params)
  scales = mpjax.loss_scale.scale_history(opt_state)["loss_scale"]  # empty: no step so far
  ```

  Args:
    opt_state: an optimiser's state with the record of one `track_skips`; concrete, not traced.

  Returns:
    Arrays of one length: `step` int, `loss_scale` float32 (the factor of each loss) and
    `grads_finite` bool.

  Raises:
    ValueError: if `opt_state` holds no record, or several.
  """
  state = _record(opt_state)
  last, size = int(state.step), state.scales.shape[0]
  steps = np.arange(max(last - size, 0), last)
  return {
    "step": steps,
    "loss_scale": np.asarray(state.scales)[steps % size],
    "grads_finite": np.asarray(state.finite)[steps % size],
  }


def _record(opt_state: PyTree) -> TrackSkipsState:
  found = find_states(opt_state, TrackSkipsState)
  if len(found) != 1:
    raise ValueError(
      f"{len(found)} records of skipped steps in this optimiser state: expected one, from "
      "mpjax.loss_scale.track_skips(mpjax.dynamic_loss_scale(...))"
    )
  record = next(iter(found.values()))
  if np.ndim(record.step):
    raise ValueError(
      f"a record of {np.shape(record.step)} members: pass the state of one member, as in "
      "jax.tree.map(lambda x: x[0], opt_state)"
    )
  return record


def _in_structure_of(old: PyTree, counts: PyTree) -> PyTree:
  """Returns `counts` with zeros for leaves that have no gradient."""
  is_none = lambda x: x is None
  new = jax.tree_util.tree_flatten_with_path(counts, is_leaf=is_none)[0]
  found = {jax.tree_util.keystr(path): leaf for path, leaf in new if leaf is not None}
  return jax.tree_util.tree_map_with_path(
    lambda path, zero: found.get(jax.tree_util.keystr(path), jnp.zeros_like(zero)), old
  )


def _count(tree: PyTree) -> PyTree:
  """Counts the elements of every leaf that are NaN, +inf, -inf, and all: i32[4]."""

  def leaf(x: ArrayLike) -> jax.Array:
    size = jnp.asarray(min(np.size(x), 2**31 - 1), jnp.int32)
    if not is_inexact(x):
      return jnp.stack([jnp.zeros([], jnp.int32)] * 3 + [size])
    x = jnp.asarray(x)
    parts = [x.real, x.imag] if jnp.iscomplexobj(x) else [x]
    kinds = (jnp.isnan, jnp.isposinf, jnp.isneginf)
    counts = [sum((kind(p) for p in parts[1:]), kind(parts[0])).sum(dtype=jnp.int32) for kind in kinds]
    return jnp.stack([*counts, size])

  return jax.tree.map(leaf, tree)


def _rows(counts: PyTree) -> dict[str, NonFinite]:
  rows = {}
  for path, leaf in jax.tree_util.tree_flatten_with_path(jax.device_get(counts))[0]:
    row = NonFinite(*(int(n) for n in leaf))
    if row.nan or row.posinf or row.neginf:
      rows[path_text(path) or "value"] = row
  return rows
