"""How primitives are computed: lowering by platform, and a jitted call where one is applied eagerly."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import mlir

from mpjax._types import Array


def lower_as(primitive: Primitive, compute: Callable[..., Any], platform: str | None = None) -> None:
  """Has a primitive of one result compile to what a function computes, on one platform or on every other."""
  mlir.register_lowering(primitive, mlir.lower_fun(compute, multiple_results=False), platform=platform)


def compute_by_platform(primitive: Primitive, by_platform: Mapping[str | None, Callable[..., Array]]) -> None:
  """Has a primitive computed by a function for each platform, `None` for all others; the same eagerly."""
  for platform, compute in by_platform.items():
    lower_as(primitive, compute, platform)
  primitive.def_impl(functools.partial(_eager, primitive))


@functools.partial(jax.jit, static_argnames=("primitive", "parameters"))
def _compiled(primitive: Primitive, *operands: Array, parameters: tuple[tuple[str, Any], ...]) -> Array:
  return primitive.bind(*operands, **dict(parameters))


def _eager(primitive: Primitive, *operands: Array, **parameters: Any) -> Array:
  with jax.disable_jit(False):  # or `_compiled` would end here again
    return _compiled(primitive, *operands, parameters=tuple(parameters.items()))
