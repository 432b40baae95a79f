"""The products of JAX that mpjax's own stand for."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import Primitive

from mpjax import _compat
from mpjax._types import JaxprEqn
from mpjax.products._fp8_dot_general import fp8_dot_general_p
from mpjax.products._fp8_ragged_dot import fp8_ragged_dot_p
from mpjax.products._half_products import PLAIN

_FP8 = {fp8_dot_general_p: jax.lax.dot_general_p, fp8_ragged_dot_p: _compat.ragged_dot_general_p}


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
