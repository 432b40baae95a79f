"""Metrics of a loss scale, and the leaves of a tree that are not finite."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from mpjax._types import Array, ArrayLike, Metrics, PyTree
from mpjax.loss_scale._guard import is_inexact
from mpjax.loss_scale._state_access import find_loss_scales
from mpjax.patterns import path_text

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
  leaves = [leaf for leaf in jax.tree_util.tree_leaves_with_path(tree) if is_inexact(leaf[1])]
  counts = jax.device_get([_counts(x) for _, x in leaves])
  return {
    path_text(path) or "value": NonFinite(*(int(n) for n in (*found, np.size(x))))
    for (path, x), found in zip(leaves, counts, strict=True)
    if any(found)
  }


def _counts(x: ArrayLike) -> list[Array]:
  """Returns how many elements are NaN, +inf and -inf, in either part of a complex number: three i32[]."""
  x = jnp.asarray(x)
  parts = [x.real, x.imag] if jnp.iscomplexobj(x) else [x]
  kinds = (jnp.isnan, jnp.isposinf, jnp.isneginf)
  return [functools.reduce(jnp.logical_or, map(kind, parts)).sum(dtype=jnp.int32) for kind in kinds]
