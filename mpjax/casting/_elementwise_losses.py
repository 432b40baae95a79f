"""Losses that are computed element by element: a squared error, a cross entropy of independent logits.

A product's fused epilogue can compute such a loss and its gradient at once, without storing the result of the
product. Compilers store it anyway, and both products of the backward pass recompute the gradient from it,
and read the targets again. So the gradient crosses an optimisation barrier: it is computed and stored
once. A softmax first needs its whole rows: its result is stored anyway, and a barrier would store another
array. A barrier does not pay either if the result is small compared with the product's operands.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import jax
from jax.core import AbstractValue
from jax.extend.core import Primitive
from jax.interpreters import ad, batching

from mpjax._types import Array, Jaxpr, Var
from mpjax.casting._cast_plan import Decision, Mode
from mpjax.casting._casting_rules import CastingRules
from mpjax.casting._kinds import Held, Kind, castable, size
from mpjax.casting._place import Place
from mpjax.jaxpr import Trait, bodies_of, facts, has, register_as, variables_of
from mpjax.products import lower_as

_STORED = Trait.READS_STORED | Trait.STORES_RESULT | Trait.MOVES | Trait.PRODUCT

store_gradient_p = Primitive("store_gradient")  # the identity; its transpose is an optimisation barrier
register_as(store_gradient_p, jax.lax.copy_p)


def _itself(x: AbstractValue) -> AbstractValue:
  return x


def _transposed(ct: Array | ad.Zero, _: object) -> list[Array | ad.Zero]:
  return [ct if isinstance(ct, ad.Zero) else jax.lax.optimization_barrier(ct)]


store_gradient_p.def_impl(_itself)
store_gradient_p.def_abstract_eval(_itself)
ad.deflinear2(store_gradient_p, _transposed)
batching.defvectorized(store_gradient_p)
lower_as(store_gradient_p, _itself)


def stores_gradient(
  i: int,
  decisions: Sequence[Decision],
  jaxpr: Jaxpr,
  held: Mapping[Var, Held],
  rules: CastingRules,
  place: Place,
) -> bool:
  """Returns whether an equation is the last product before an elementwise loss, which stores its gradient.

  Args:
    i: the index of the equation.
    decisions: in the order of the program.
    jaxpr: the program.
    held: how each variable is held.
    rules: the rules.
    place: the place of the program.
  """
  made, roles = decisions[i], place.roles
  if roles is None or place.in_loop or not place.islands:
    return False
  if not has(made.equation, Trait.PRODUCT) or made.mode is not Mode.HALF or made.fp8 is not None:
    return False
  (result,) = made.equation.outvars
  if not roles.is_head(result) or any(size(v) > size(result) for v in _activations(made, held)):
    return False
  return rules.computes_again(made.path) and _is_by_element(result, decisions[i + 1 :], jaxpr, held, rules)


def _activations(made: Decision, held: Mapping[Var, Held]) -> list[Var]:
  return [v for v in variables_of(made.equation.invars) if held[v].kind is not Kind.FLEXIBLE]


def _is_by_element(
  result: Var, decisions: Sequence[Decision], jaxpr: Jaxpr, held: Mapping[Var, Held], rules: CastingRules
) -> bool:
  """Returns whether a result is only used in an elementwise comparison with targets, and then summed."""
  full, reduced = {result}, set[Var]()
  compared = False  # with targets, which would be read again
  for made in decisions:
    equation = made.equation
    read, outs = set(variables_of(equation.invars)), equation.outvars
    if not read & full:
      if read & reduced:
        reduced.update(outs)
        if any(size(v) >= size(result) for v in outs):
          return False
      continue
    compared = compared or any(size(v) >= size(result) for v in read - full)
    others = (v for v in read - full if castable(v.aval) and size(v) > 1)
    if read & reduced or any(held[v].kind is not Kind.FLEXIBLE for v in others):
      return False
    if all(size(v) == size(result) for v in outs):
      if any(facts(p).traits & _STORED for p in rules.primitives([equation])):
        return False
      full.update(outs)
    elif has(equation, Trait.ACCUMULATES) and not bodies_of(equation):
      reduced.update(outs)
    else:
      return False
  return compared and bool(reduced) and not full & set(variables_of(jaxpr.outvars))
