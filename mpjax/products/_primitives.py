"""mpjax's own products as primitives: the product of JAX that each stands for, and their lowering."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir, xla

from mpjax._types import JaxprEqn
from mpjax.jaxpr import PrimitiveFacts, Trait, register, register_as

# By primitive, the product of JAX with the same value.
PLAIN: dict[Primitive, Primitive] = {}  # of operands in half precision
_FP8: dict[Primitive, Primitive] = {}


def half_primitive(plain: Primitive) -> Primitive:
  """Returns a primitive of the name and the facts of a product of JAX."""
  primitive = Primitive(plain.name)
  register_as(primitive, plain)
  PLAIN[primitive] = plain
  return primitive


def fp8_primitive(name: str, plain: Primitive) -> Primitive:
  """Returns a primitive for a product that quantises its operands itself."""
  primitive = Primitive(name)
  why, traits = "an FP8 product, whose operands are quantised already", Trait.PRODUCT | Trait.READS_STORED
  register(primitive, PrimitiveFacts("opaque", why, recompute=False, traits=traits))
  _FP8[primitive] = plain
  return primitive


def is_fp8(equation: JaxprEqn) -> bool:
  """Returns whether an equation is a product with FP8 operands."""
  return equation.primitive in _FP8


def plain_primitive(primitive: Primitive) -> Primitive:
  """Returns JAX's product for mpjax's own; any other primitive unchanged."""
  return _FP8.get(primitive) or PLAIN.get(primitive, primitive)


@functools.lru_cache(maxsize=128)
def as_product(policy: Callable[..., Any]) -> Callable[..., Any]:
  """Returns a policy of `jax.checkpoint` that treats mpjax's own products as JAX's."""

  def asked(primitive: Primitive, *args: object, **params: object) -> object:
    return policy(plain_primitive(primitive), *args, **params)

  return asked


def lower_as(primitive: Primitive, compute: Callable[..., Any], platform: str | None = None) -> None:
  """Lowers a primitive of one result to the computation of a function, on one platform or on every other."""
  mlir.register_lowering(primitive, mlir.lower_fun(compute, multiple_results=False), platform=platform)


def return_first(primitive: Primitive) -> None:
  """Makes a primitive return its first operand, whatever its parameters."""

  def first(x: Any, *_: Any, **__: Any) -> Any:
    return x

  primitive.def_impl(first)
  primitive.def_abstract_eval(first)
  lower_as(primitive, first)


def define(
  primitive: Primitive, type_of: Any, compute: Any, jvp: Any, transpose: Callable[..., Any], batch: Any
) -> None:
  """Gives a product its rules.

  `compute`, also called eagerly, gets the platform, `None` for any other. `transpose` gets the cotangent and
  the position of the operand whose cotangent it returns, before the operands.
  """

  def transposed(ct: Any, *operands: Any, **parameters: Any) -> list[Any]:
    # An operand's original, if it has one, comes after it: its cotangent is not rounded.
    place = max(i for i, x in enumerate(operands) if isinstance(x, ad.UndefinedPrimal))
    out = [None] * len(operands)
    if not isinstance(ct, ad.Zero):
      out[place] = transpose(ct, place, *operands, **parameters)
    return out

  primitive.def_abstract_eval(type_of)
  ad.primitive_jvps[primitive] = jvp
  ad.primitive_transposes[primitive] = transposed
  batching.fancy_primitive_batchers[primitive] = batch
  for platform in (None, "cpu", "cuda", "rocm", "tpu"):
    lower_as(primitive, functools.partial(compute, platform=platform), platform)
  primitive.def_impl(functools.partial(xla.apply_primitive, primitive))
