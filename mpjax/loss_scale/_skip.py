"""The skip of a non-finite step: selects in the place where they cost least, and on a CPU a branch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from mpjax import _compat


def apply_if(
  finite: jax.Array, update: Callable[[], tuple[Any, Any]], old_state: Any, branch_on_cpu: bool = False
) -> tuple[Any, Any]:
  """`update()` where `finite`, else zero updates and `old_state`; by selects, or by a branch on a CPU.

  The value of a state leaf is selected where `update` defines it, so what `update` goes on to compute from
  the new state reads the selected one. On a finite step the two are the same; on a skipped step all of it
  is thrown away. Selected at the end instead, the new and the selected state would both have to be held
  in memory, since the updates are computed from the first and the second is what is kept.

  XLA for accelerators fuses selects, and no branch, with the optimiser. XLA for CPU reads a half-precision
  gradient, transposed and widened, anew for each moment and for the update; a branch is not fused with what
  comes before, so that it does so once.

  Args:
    finite: bool[]; batched under `vmap`.
    update: makes updates and state; traced once.
    old_state: the state to keep on a skip.
    branch_on_cpu: whether a program for a CPU is given the branch, where that does the same.

  Returns:
    Updates, and the state in the dtypes of `old_state`.

  Raises:
    ValueError: if `update` changes the structure of the state.
  """
  outputs: list[Any] = []

  def arrays() -> list[Any]:
    updates, new_state = update()
    outputs[:] = updates, keep_dtypes(new_state, old_state)
    return [leaf for leaf in jax.tree.leaves(outputs) if _compat.is_array(leaf)]

  closed = jax.make_jaxpr(arrays)()
  updates, new_state = outputs
  leaves = zip(jax.tree.leaves(new_state), jax.tree.leaves(old_state), strict=True)
  old_arrays = [old for new, old in leaves if _compat.is_array(new)]
  cut = len(closed.jaxpr.outvars) - len(old_arrays)
  state_atoms = closed.jaxpr.outvars[cut:]
  passed_through = set(closed.jaxpr.constvars)
  selected: dict[Any, Any] = {}
  for atom, old in zip(state_atoms, old_arrays, strict=True):
    # Not what `update` passes through; and of a value that it keeps twice only the first.
    if _compat.is_variable(atom) and atom not in passed_through:
      selected.setdefault(atom, old)

  def at_definition(variable: Any, value: Any) -> Any:
    return jnp.where(finite, value, selected[variable]) if variable in selected else value

  def by_selects() -> list[Any]:
    values = _compat.eval_jaxpr(closed, at_definition)
    zeroed = [jnp.where(finite, value, jnp.zeros_like(value)) for value in values[:cut]]
    kept = [
      value if _compat.is_variable(atom) and selected.get(atom) is old else jnp.where(finite, value, old)
      for atom, value, old in zip(state_atoms, values[cut:], old_arrays, strict=True)
    ]
    return [*zeroed, *kept]

  def by_branch() -> list[Any]:
    skipped = lambda: [
      *(jnp.zeros(v.aval.shape, v.aval.dtype) for v in closed.jaxpr.outvars[:cut]),
      *old_arrays,
    ]
    return jax.lax.cond(finite, lambda: _compat.eval_jaxpr(closed, lambda _, value: value), skipped)

  if branch_on_cpu and _may_branch(finite, closed):
    arrays_out = jax.lax.platform_dependent(cpu=by_branch, default=by_selects)
  else:
    arrays_out = by_selects()
  return _with_arrays(updates, arrays_out[:cut]), _with_arrays(new_state, arrays_out[cut:])


def _may_branch(finite: Any, closed: Any) -> bool:
  """Whether a branch would do the same: not outside `jit`, with effects, or where devices could disagree."""
  return isinstance(finite, jax.core.Tracer) and not closed.effects and not _compat.axes_in_scope()


def keep_dtypes(new_state: Any, old_state: Any) -> Any:
  """`new_state` in the dtypes of `old_state`: widened gradients must not widen half-precision moments.

  Raises:
    ValueError: if the two differ in structure.
  """
  old_structure: Any = jax.tree.structure(old_state)
  if jax.tree.structure(new_state) != old_structure:
    raise ValueError(
      f"the wrapped transform changed the structure of its state from {old_structure} "
      f"to {jax.tree.structure(new_state)}"
    )

  def cast(new: Any, old: Any) -> Any:
    same = not hasattr(old, "dtype") or jnp.asarray(new).dtype == old.dtype
    return new if same else jnp.asarray(new).astype(old.dtype)

  return jax.tree.map(cast, new_state, old_state)


def _with_arrays(tree: Any, values: list[Any]) -> Any:
  """`tree` with its arrays replaced, in order; other leaves stay."""
  remaining = iter(values)
  return jax.tree.map(lambda leaf: next(remaining) if _compat.is_array(leaf) else leaf, tree)
