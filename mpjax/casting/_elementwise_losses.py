"""Losses that are computed element by element: a squared error, a cross entropy of independent logits.

A product's fused epilogue can compute such a loss and its gradient at once, without storing the result of the
product. Compilers store it anyway, and both products of the backward pass recompute the gradient from it,
and read the targets again. So the gradient crosses an optimisation barrier: it is computed and stored
once. A softmax first needs its whole rows: its result is stored anyway, and a barrier would store another
array. A barrier does not pay either if the result is small compared with the product's operands.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
from jax.core import AbstractValue
from jax.extend.core import Primitive
from jax.interpreters import ad, batching

from mpjax._types import Array, Var
from mpjax.casting._cast_plan import Node
from mpjax.casting._casting_rules import CastingRules
from mpjax.casting._kinds import size
from mpjax.jaxpr import Trait, facts, register_as, variables_of
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


def is_by_element(nodes: Sequence[Node], result: Var, rules: CastingRules) -> bool:
  """Returns whether equations use each element of a value alone, until they sum."""
  made = {result}  # and what is made of it
  for equation in (node.equation for node in nodes):
    read = made & set(variables_of(equation.invars))
    made.update(equation.outvars if read else ())
    if read and any(size(v) >= size(result) for v in equation.outvars):
      stored = any(facts(p).traits & _STORED for p in rules.primitives([equation]))
      if stored or any(size(v) < size(result) for v in read):
        return False
  return True
