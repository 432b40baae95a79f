"""How an optimiser uses its gradients: which it reads, and which parameters it may change."""

from __future__ import annotations

import contextlib
import enum
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from mpjax._types import Atom, Jaxpr, JaxprEqn, PyTree
from mpjax.jaxpr import Calls, Forward, dtype_of, inputs_read, is_variable
from mpjax.loss_scale import StructureError, keep_dtypes

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
    read: for each parameter, whether an update of this step or a later one depends on its gradient.
    moving: for each parameter, whether its update can be non-zero; it cannot for a frozen one.
  """

  read: PyTree[bool]
  moving: PyTree[bool]


def flow_of(tx: optax.GradientTransformationExtraArgs, params: PyTree, **extra: object) -> Flow | None:
  """Returns an optimiser's `Flow` over many steps; `None` if a trace cannot tell.

  `params` are shapes, also of the gradients; `extra` are keyword arguments for its update.
  """

  def update(grads: PyTree, state: PyTree, params: PyTree) -> tuple[PyTree, PyTree]:
    updates, new_state = tx.update(grads, state, params, **extra)
    return updates, keep_dtypes(new_state, state)

  # A mapped axis is missing; or the first update changes the state's structure, as in optax.monitor; or the
  # update asks for a value, as `bool` of an array does.
  untraceable = (NameError, StructureError, jax.errors.JAXTypeError, jax.errors.JAXIndexError)
  with contextlib.suppress(*untraceable):
    state = jax.eval_shape(tx.init, params)
    closed, (updates, _) = jax.make_jaxpr(update, return_shape=True)(params, state, params)
    sizes = [len(jax.tree.leaves(tree)) for tree in (params, state, updates)]
    return Flow(*(jax.tree.unflatten(jax.tree.structure(params), x) for x in _flow(closed.jaxpr, *sizes)))
  return None


def _flow(jaxpr: Jaxpr, gradients: int, state: int, updates: int) -> tuple[list[bool], list[bool]]:
  """Returns the fields of `Flow` for a program of so many gradients, arrays of the state and updates."""
  needed = [i < updates for i in range(len(jaxpr.outvars))]
  while True:
    inputs = inputs_read(jaxpr, needed)
    # A part of the state matters if an update reads it in the next step.
    of_state = zip(needed[updates:], inputs[gradients : gradients + state], strict=True)
    after = [*needed[:updates], *(a or b for a, b in of_state)]
    if after == needed:
      break
    needed = after
  content = _Contents().solve(jaxpr, [_Content.ANYTHING] * len(jaxpr.invars)).outputs
  return inputs[:gradients], [x is not _Content.ZEROS for x in content[:updates]]


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
