"""The skip of a non-finite step: zero updates and the old state in place of what the optimiser makes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import PyTreeDef
from jaxtyping import Array, ArrayLike, Bool, PyTree, Shaped

from mpjax import _compat
from mpjax._tree import cast_like
from mpjax._types import ClosedJaxpr, JaxprEqn, Var
from mpjax.jaxpr import as_function, bind_again, interpret, is_variable

State = TypeVar("State")


def apply_if(
  finite: Bool[Array, ""],
  update: Callable[[], tuple[PyTree, State]],
  old_state: State,
  branch_on_cpu: bool = False,
) -> tuple[PyTree, State]:
  """Returns `update()` where `finite`, else zero updates and `old_state`.

  Inside `jit` the values of the new state are selected where `update` defines them, since that takes less
  memory (see `_select_where_defined`). Outside `jit`, and for an `update` that cannot be traced by itself,
  all is selected at the end, which gives the same numbers.

  Args:
    finite: bool[]; batched under `vmap`.
    update: makes updates and state; called again if it cannot be traced by itself.
    old_state: the state to keep on a skip.
    branch_on_cpu: skip by a branch in a program for a CPU, where that does the same. XLA for accelerators
      fuses selects, and no branch, with the optimiser. XLA for CPU reads a half-precision gradient,
      transposed and widened, anew for each moment and for the update; a branch is not fused with what comes
      before, so that it does so once.

  Returns:
    Updates, and the state in the dtypes of `old_state`, on explicit mesh axes with its shardings.

  Raises:
    ValueError: if `update` changes the structure of the state.
  """
  traced = _trace(update, old_state) if isinstance(finite, jax.core.Tracer) else None
  if traced is not None:
    return _select_where_defined(finite, traced, old_state, branch_on_cpu)
  updates, new_state = update()
  select = lambda new, old: keep_if(finite, new, old) if is_array(new) else new
  zeroed = jax.tree.map(lambda u: select(u, jnp.zeros_like(u) if is_array(u) else u), updates)
  return zeroed, jax.tree.map(select, keep_dtypes(new_state, old_state), old_state)


def keep_if(
  finite: Bool[Array, ""], new: Shaped[ArrayLike, "*shape"], old: Shaped[ArrayLike, "*shape"]
) -> Shaped[Array, "*shape"]:
  """Returns `new` where `finite`, else `old`; divided over explicit mesh axes as `old` is."""
  kind = jax.typeof(old)
  if _compat.is_explicit(kind) and jax.typeof(new).sharding != kind.sharding:
    new = jax.sharding.reshard(new, kind.sharding)
  return jnp.where(finite, new, old)


class _Traced(NamedTuple):
  """The program of an update.

  Attributes:
    program: gives the arrays among the leaves of updates and new state.
    structure: of the two.
    others: all leaves, with `None` for the arrays.
  """

  program: ClosedJaxpr
  structure: PyTreeDef
  others: list[object]


def _trace(update: Callable[[], tuple[PyTree, State]], old_state: State) -> _Traced | None:
  """Returns the program of `update`; `None` if that looks at a value, as `bool` of an array does."""
  rest: list[Any] = []

  def arrays() -> list[Array]:
    updates, new_state = update()
    leaves, structure = jax.tree.flatten((updates, keep_dtypes(new_state, old_state)))
    rest[:] = [structure, [None if is_array(leaf) else leaf for leaf in leaves]]
    return [leaf for leaf in leaves if is_array(leaf)]

  try:
    return _Traced(jax.make_jaxpr(arrays)(), *rest)
  except (jax.errors.JAXTypeError, jax.errors.JAXIndexError):
    return None


def _select_where_defined(
  finite: Bool[Array, ""], traced: _Traced, old_state: State, branch_on_cpu: bool
) -> tuple[PyTree, State]:
  """Does what `apply_if` does, on the program of `update`.

  An optimiser computes its updates from its new state. Selected at the end, the new state and the kept one
  would both be held in memory: the updates read the first, the second is what is returned. So a state's value
  is replaced by the selected one as soon as it is there, and the updates read that. On a finite step the two
  are the same; on a skipped step the updates are thrown away.
  """
  program, structure, others = traced
  old_leaves = jax.tree.leaves(old_state)
  of_state = zip(others[len(others) - len(old_leaves) :], old_leaves, strict=True)
  old_arrays = [old for other, old in of_state if other is None]
  cut = len(program.jaxpr.outvars) - len(old_arrays)
  by_selects = lambda: _by_selects(program, finite, cut, old_arrays)
  if branch_on_cpu and _may_branch(program):
    zeros = lambda: [jnp.zeros(aval.shape, aval.dtype) for aval in program.out_avals[:cut]]
    skipped = lambda: [*zeros(), *old_arrays]
    by_branch = lambda: jax.lax.cond(finite, as_function(program), skipped)
    values = jax.lax.platform_dependent(cpu=by_branch, default=by_selects)
  else:
    values = by_selects()
  remaining = iter(values)
  updates, state = jax.tree.unflatten(
    structure, [next(remaining) if other is None else other for other in others]
  )
  return updates, state


def _by_selects(
  program: ClosedJaxpr, finite: Bool[Array, ""], cut: int, old_arrays: list[Array]
) -> list[Array]:
  """Returns the outputs of `program`: the first `cut` are updates, the others the state, both selected."""
  state_atoms = program.jaxpr.outvars[cut:]
  passed_through = set(program.jaxpr.constvars)
  selected: dict[Var, Array] = {}
  for atom, old in zip(state_atoms, old_arrays, strict=True):
    # Not what `update` passes through; and of a value that it keeps twice only the first.
    if is_variable(atom) and atom not in passed_through:
      selected.setdefault(atom, old)

  def select_at_definition(equation: JaxprEqn, operands: list[Array]) -> list[Array]:
    made = zip(equation.outvars, bind_again(equation, operands), strict=True)
    return [keep_if(finite, value, selected[v]) if v in selected else value for v, value in made]

  values = interpret(program, (), select_at_definition)
  zeroed = [jnp.where(finite, value, jnp.zeros_like(value)) for value in values[:cut]]
  kept = [
    value if is_variable(atom) and selected.get(atom) is old else keep_if(finite, value, old)
    for atom, value, old in zip(state_atoms, values[cut:], old_arrays, strict=True)
  ]
  return [*zeroed, *kept]


def _may_branch(program: ClosedJaxpr) -> bool:
  """Returns whether a branch does the same: without effects (collectives have one), outside `shard_map`."""
  return not program.effects and not jax.sharding.get_abstract_mesh().axis_names


def keep_dtypes(new_state: State, old_state: State) -> State:
  """Casts `new_state` to the dtypes of `old_state`: widened gradients must not widen half-precision moments.

  Raises:
    ValueError: if the two differ in structure.
  """
  old_structure: PyTreeDef = jax.tree.structure(old_state)
  if jax.tree.structure(new_state) != old_structure:
    raise ValueError(
      f"the wrapped transform changed the structure of its state from {old_structure} "
      f"to {jax.tree.structure(new_state)}"
    )
  kept: State = cast_like(new_state, old_state)
  return kept


def is_array(leaf: object) -> bool:
  """Returns whether JAX can trace `leaf` as an array; it cannot for `float0`."""
  if isinstance(leaf, (bool, int, float, complex)):
    return True
  return isinstance(leaf, (jax.Array, np.ndarray, np.generic)) and leaf.dtype != jax.dtypes.float0
