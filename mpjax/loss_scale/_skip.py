"""The skip of a non-finite step: zero updates and the old state instead of the optimiser's."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.tree_util import PyTreeDef
from jaxtyping import Array, ArrayLike, Bool, PyTree, Shaped

from mpjax import _compat
from mpjax._types import Atom, ClosedJaxpr, JaxprEqn, Var
from mpjax.dtypes import at_least_float32, cast_like
from mpjax.jaxpr import Calls, Forward, bind_again, dtype_of, inputs_read, interpret, is_variable
from mpjax.loss_scale._finite import all_finite, is_inexact

State = TypeVar("State")
# The result is zero if all operands are, or if one is zero and the other a number.
_KEEPS_ZEROS = {
  jax.lax.broadcast_in_dim_p,
  jax.lax.convert_element_type_p,
  jax.lax.reshape_p,
  jax.lax.neg_p,
  jax.lax.mul_p,
}


class Flow(NamedTuple):
  """Which gradients and updates of an optimiser matter.

  Attributes:
    read: for each leaf of the gradients, whether an update of this step or a later one depends on it.
    moving: for each leaf of the updates, whether it can be non-zero; it cannot for a frozen parameter.
  """

  read: list[bool]
  moving: list[bool]


class Guarded(NamedTuple):
  """The outcome of `update_if_finite`.

  Attributes:
    updates: the optimiser's updates, or zeros.
    state: the new state, or the old.
    grads_finite: bool[]; whether the gradients that matter are finite.
    updates_finite: bool[]; whether the updated parameters, and the other state, are finite.
  """

  updates: PyTree
  state: PyTree
  grads_finite: Bool[Array, ""]
  updates_finite: Bool[Array, ""]


@dataclasses.dataclass(frozen=True)
class Guard:
  """What must be finite for a step to be taken.

  Attributes:
    judge: (for each leaf of the gradients whether it matters) -> bool[], whether those leaves are finite.
    params: the parameters, or `None`.
    apply: (parameter, update) -> the updated parameter.
    agree: makes one decision of the decisions along mapped axes.
    others: bool[]; whether the other state that the step changes is finite.
    flows: each `Flow`, by the shapes of gradients and state; a cache, since outside `jit` a trace takes
      as long as a step.
  """

  judge: Callable[[Sequence[bool]], Bool[Array, ""]]
  params: PyTree
  apply: Callable[[Array, Array], Array]
  agree: Callable[[Bool[Array, ""]], Bool[Array, ""]]
  others: Bool[Array, ""] | bool
  flows: dict[Hashable, Flow]

  def made(self, updates: PyTree, moving: Sequence[bool]) -> Bool[Array, ""]:
    """Returns whether the updated parameters and the other state are finite.

    Args:
      updates: the optimiser's updates.
      moving: for each leaf whether it can be non-zero.
    """
    of_updates: PyTreeDef = jax.tree.structure(updates)
    made = jax.tree.leaves(updates)
    if of_updates == jax.tree.structure(self.params):
      made = [self._after(p, u) for p, u in zip(jax.tree.leaves(self.params), made, strict=True)]
    return self.agree(all_finite([x for x, moves in zip(made, moving, strict=True) if moves]) & self.others)

  def _after(self, p: Array, u: Array) -> Array:
    """Returns a parameter after its update, and 0 if it was not finite before, as a mask of -inf."""
    after = self.apply(p, u)
    known = is_inexact(p) and jnp.shape(p) == jnp.shape(after)
    return jnp.where(jnp.isfinite(p), after, 0) if known else after


def update_if_finite(
  update: Callable[[PyTree, State], tuple[PyTree, State]],
  gradients: PyTree,
  old_state: State,
  guard: Guard,
  branch_on_cpu: bool = False,
  skip: bool = True,
) -> Guarded:
  """Takes an optimiser's step if the gradients and the results are finite.

  Inside `jit` the values of the new state are selected where `update` defines them, since that takes less
  memory (see `_select_where_defined`). Outside `jit`, and for an `update` that cannot be traced by itself,
  all values are selected at the end, which gives the same numbers.

  A gradient that `update` does not read, such as that of a frozen parameter, has no influence.

  Args:
    update: (gradients, state) -> (updates, state); called twice if it cannot be traced by itself.
    gradients: the gradients for `update`.
    old_state: the state to keep on a skip.
    guard: what must be finite.
    branch_on_cpu: skip by a branch in a program for a CPU, where that gives the same result. XLA for
      accelerators fuses selects with the optimiser, but not branches. XLA for CPU reads a half-precision
      gradient, transposed and widened, once for each moment and once for the update. A branch is not fused
      with the code before it, so that the gradient is read once.
    skip: `False` takes each step, and only reports what was finite.

  Returns:
    Updates; the state in the dtypes of `old_state`; on explicit mesh axes with its shardings.

  Raises:
    ValueError: if `update` changes the structure of the state.
  """
  key = _shapes((gradients, old_state))
  in_program = skip and _is_traced((gradients, old_state))
  traced = _trace(update, gradients, old_state) if in_program or key not in guard.flows else None
  if traced is not None:
    guard.flows.setdefault(key, traced.flow(gradients))
  if in_program and traced is not None:
    return _select_where_defined(traced, guard.flows[key], gradients, old_state, guard, branch_on_cpu)
  updates, new_state = update(gradients, old_state)
  every = lambda tree: [True] * len(jax.tree.leaves(tree))
  flow = guard.flows.get(key, Flow(every(gradients), every(updates)))
  grads_finite = guard.judge(flow.read)
  updates_finite = guard.made(updates, flow.moving)
  if not skip:
    return Guarded(updates, keep_dtypes(new_state, old_state), grads_finite, updates_finite)
  taken = grads_finite & updates_finite
  select = lambda new, old: keep_if(taken, new, old) if is_array(new) else new
  zeroed = jax.tree.map(lambda u: select(u, jnp.zeros_like(u) if is_array(u) else u), updates)
  state = jax.tree.map(select, keep_dtypes(new_state, old_state), old_state)
  return Guarded(zeroed, state, grads_finite, updates_finite)


def after_update(p: Array, u: Array) -> Array:
  """Returns a parameter after its update, or the update if it cannot be added, as for quantised data."""
  p, u = jnp.asarray(p), jnp.asarray(u)
  adds = all(jnp.issubdtype(x.dtype, jnp.inexact) and jnp.finfo(x.dtype).bits >= 16 for x in (p, u))
  wide = at_least_float32(p.dtype)
  if not adds or p.shape != u.shape or not jnp.can_cast(u.dtype, wide, "same_kind"):
    return u
  return (p.astype(wide) + u.astype(wide)).astype(p.dtype)


def keep_if(
  finite: Bool[Array, ""], new: Shaped[ArrayLike, "*shape"], old: Shaped[ArrayLike, "*shape"]
) -> Shaped[Array, "*shape"]:
  """Returns `new` if `finite`, else `old`; divided over explicit mesh axes as `old` is."""
  kind = jax.typeof(old)
  if _compat.is_explicit(kind) and jax.typeof(new).sharding != kind.sharding:
    new = jax.sharding.reshard(new, kind.sharding)
  return jnp.where(finite, new, old)


@dataclasses.dataclass(frozen=True)
class _Traced:
  """The program of an update.

  Attributes:
    program: from the arrays in the leaves of gradients and state to the arrays in updates and new state.
    updates: the structure of the updates.
    state: the structure of the new state.
    others: all leaves of both, with `None` for the arrays.
  """

  program: ClosedJaxpr
  updates: PyTreeDef
  state: PyTreeDef
  others: list[object]

  @property
  def cut(self) -> int:
    """The number of arrays among the updates, which come first."""
    return sum(other is None for other in self.others[: self.updates.num_leaves])

  def trees(self, arrays: Sequence[Array]) -> tuple[PyTree, PyTree]:
    """Returns updates and state from the program's outputs."""
    remaining = iter(arrays)
    leaves = [next(remaining) if other is None else other for other in self.others]
    n = self.updates.num_leaves
    return jax.tree.unflatten(self.updates, leaves[:n]), jax.tree.unflatten(self.state, leaves[n:])

  def flow(self, gradients: PyTree) -> Flow:
    """Returns the program's `Flow`, over many steps."""
    jaxpr = self.program.jaxpr
    arrays = len(_arrays(gradients))
    needed = [i < self.cut for i in range(len(jaxpr.outvars))]
    while True:
      inputs = inputs_read(jaxpr, needed)
      # A part of the state matters if an update reads it in the next step.
      of_state = zip(needed[self.cut :], inputs[arrays:], strict=True)
      after = [*needed[: self.cut], *(a or b for a, b in of_state)]
      if after == needed:
        break
      needed = after
    content = _Contents().solve(jaxpr, [_Content.ANYTHING] * len(jaxpr.invars)).outputs
    reads, moves = iter(inputs), (x is not _Content.ZEROS for x in content)
    of_updates = self.others[: self.updates.num_leaves]
    return Flow(
      [is_array(leaf) and next(reads) for leaf in jax.tree.leaves(gradients)],
      [other is None and next(moves) for other in of_updates],
    )


def flow_of(tx: optax.GradientTransformation, params: PyTree, **extra: object) -> Flow | None:
  """Returns an optimiser's `Flow` for these parameters; `None` if a trace cannot tell.

  Args:
    tx: any optax transform.
    params: tree of arrays, of the gradients' structure and shapes.
    **extra: keyword arguments for its update.
  """
  found: list[Flow] = []

  def look(params: PyTree) -> None:
    update = lambda grads, state: tx.update(grads, state, params, **extra)
    traced = _trace(update, params, tx.init(params))
    if traced is not None:
      found.append(traced.flow(params))

  # A mapped axis is missing; or the first update changes the state's structure, as in optax.monitor.
  with contextlib.suppress(NameError, StructureError):
    jax.eval_shape(look, params)
  return found[0] if found else None


class _Content(enum.IntEnum):
  """What a value is for all inputs. If it may be one of two, the later holds."""

  ZEROS = 0
  FINITE = 1  # a literal, or converted from an integer
  ANYTHING = 2


class _Contents(Forward[_Content]):
  def start(self, atom: Atom) -> _Content:
    if is_variable(atom) or not np.isfinite(atom.val).all():
      return _Content.ANYTHING
    return _Content.FINITE if np.any(atom.val) or not np.size(atom.val) else _Content.ZEROS

  def join(self, a: _Content, b: _Content) -> _Content:
    return max(a, b)

  def transfer(self, equation: JaxprEqn, operands: list[_Content], calls: Calls) -> list[_Content]:
    made = _Content.ANYTHING
    if equation.primitive in _KEEPS_ZEROS and _Content.ZEROS in operands:
      made = _Content.ZEROS if max(operands) < _Content.ANYTHING else made
    elif equation.primitive is jax.lax.convert_element_type_p:
      is_whole = not jnp.issubdtype(dtype_of(equation.invars[0]), jnp.inexact)
      made = _Content.FINITE if is_whole else made
    return [made] * len(equation.outvars)


def _trace(
  update: Callable[[PyTree, State], tuple[PyTree, State]], gradients: PyTree, old_state: State
) -> _Traced | None:
  """Returns the program of `update`; `None` if it reads a traced value, as `bool` of an array does."""
  rest: list[Any] = []
  leaves, structure = jax.tree.flatten((gradients, old_state))

  def arrays(given: list[Array]) -> list[Array]:
    made, new_state = update(*jax.tree.unflatten(structure, _merged(leaves, given)))
    parts = [jax.tree.flatten(made), jax.tree.flatten(keep_dtypes(new_state, old_state))]
    out = [*parts[0][0], *parts[1][0]]
    rest[:] = [parts[0][1], parts[1][1], [None if is_array(leaf) else leaf for leaf in out]]
    return [leaf for leaf in out if is_array(leaf)]

  try:
    return _Traced(jax.make_jaxpr(arrays)(_arrays(leaves)), *rest)
  except (jax.errors.JAXTypeError, jax.errors.JAXIndexError):
    return None


def _arrays(tree: PyTree) -> list[Array]:
  return [leaf for leaf in jax.tree.leaves(tree) if is_array(leaf)]


def _merged(leaves: list[Any], arrays: list[Array]) -> list[Any]:
  """Returns leaves with their arrays replaced by others."""
  remaining = iter(arrays)
  return [next(remaining) if is_array(leaf) else leaf for leaf in leaves]


def _shapes(tree: PyTree) -> Hashable:
  leaves, structure = jax.tree.flatten(tree)
  return structure, *((np.shape(leaf), getattr(leaf, "dtype", type(leaf))) for leaf in leaves)


def _is_traced(tree: PyTree) -> bool:
  return any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(tree))


def _select_where_defined(
  traced: _Traced, flow: Flow, gradients: PyTree, old_state: State, guard: Guard, branch_on_cpu: bool
) -> Guarded:
  """Does the work of `update_if_finite`, on the program of `update`.

  An optimiser computes its updates from its new state. If the state were selected at the end, memory would
  hold both the new state, which the updates read, and the selected one, which is returned. So each value of
  the state is replaced by the selected one as soon as it is computed, and the updates read that. On a finite
  step the two are the same; on a skipped step the updates are not used.

  Whether the updates are finite comes from the program without selects, whose other results are not used:
  a compiler computes it where it checks the gradients.
  """
  program, cut = traced.program, traced.cut
  given, state = _arrays(gradients), _arrays(old_state)
  grads_finite = guard.judge(flow.read)
  old_leaves = jax.tree.leaves(old_state)
  of_state = zip(traced.others[traced.updates.num_leaves :], old_leaves, strict=True)
  old_arrays = [old for other, old in of_state if other is None]

  def by_selects(grads_finite: Bool[Array, ""]) -> list[Array]:
    # XLA for CPU would merge the new state here with that of the step, and keep it in memory for both.
    made = interpret(program, [*given, *jax.lax.optimization_barrier(state)], bind_again)
    updates_finite = guard.made(traced.trees(made)[0], flow.moving)
    taken = grads_finite & updates_finite
    return [*_by_selects(program, [*given, *state], taken, cut, old_arrays), updates_finite]

  def by_branch(grads_finite: Bool[Array, ""]) -> list[Array]:
    zeros = lambda: [jnp.zeros(aval.shape, aval.dtype) for aval in program.out_avals[:cut]]
    skipped = lambda: [*zeros(), *old_arrays, jnp.asarray(True)]
    return jax.lax.cond(grads_finite, lambda: by_selects(jnp.asarray(True)), skipped)

  if branch_on_cpu and _may_branch(program):
    values = jax.lax.platform_dependent(grads_finite, cpu=by_branch, default=by_selects)
  else:
    values = by_selects(grads_finite)
  *values, updates_finite = values
  return Guarded(*traced.trees(values), grads_finite, updates_finite)


def _by_selects(
  program: ClosedJaxpr, given: list[Array], finite: Bool[Array, ""], cut: int, old_arrays: list[Array]
) -> list[Array]:
  """Returns the outputs of `program`, selected: the first `cut` are updates, the others the state."""
  state_atoms = program.jaxpr.outvars[cut:]
  passed_through = {*program.jaxpr.constvars, *program.jaxpr.invars}
  selected: dict[Var, Array] = {}
  for atom, old in zip(state_atoms, old_arrays, strict=True):
    # Leaves out what `update` passes through, and, of a value that the state holds twice, the second.
    if is_variable(atom) and atom not in passed_through:
      selected.setdefault(atom, old)

  def select_at_definition(equation: JaxprEqn, operands: list[Array]) -> list[Array]:
    made = zip(equation.outvars, bind_again(equation, operands), strict=True)
    return [keep_if(finite, value, selected[v]) if v in selected else value for v, value in made]

  values = interpret(program, given, select_at_definition)
  zeroed = [jnp.where(finite, value, jnp.zeros_like(value)) for value in values[:cut]]
  kept = [
    value if is_variable(atom) and selected.get(atom) is old else keep_if(finite, value, old)
    for atom, value, old in zip(state_atoms, values[cut:], old_arrays, strict=True)
  ]
  return [*zeroed, *kept]


def _may_branch(program: ClosedJaxpr) -> bool:
  """Returns whether a branch gives the same: no effects (collectives have one), not inside `shard_map`."""
  return not program.effects and not jax.sharding.get_abstract_mesh().axis_names


class StructureError(ValueError):
  """A transform's update changes the structure of its state."""


def keep_dtypes(new_state: State, old_state: State) -> State:
  """Casts `new_state` to the dtypes of `old_state`: wide gradients must not widen half-precision moments.

  Raises:
    StructureError: if the two differ in structure.
  """
  old_structure: PyTreeDef = jax.tree.structure(old_state)
  if jax.tree.structure(new_state) != old_structure:
    raise StructureError(
      f"the wrapped transform changed the structure of its state from {old_structure} "
      f"to {jax.tree.structure(new_state)}"
    )
  kept: State = cast_like(new_state, old_state)
  return kept


def is_array(leaf: object) -> bool:
  """Returns whether JAX can trace `leaf` as an array; it cannot trace `float0`."""
  if isinstance(leaf, (bool, int, float, complex)):
    return True
  return isinstance(leaf, (jax.Array, np.ndarray, np.generic)) and leaf.dtype != jax.dtypes.float0
