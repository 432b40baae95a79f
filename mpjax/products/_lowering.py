"""The lowering of primitives by platform, with a jitted call where a primitive is applied eagerly."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import mlir

from mpjax._types import Array


def lower_as(primitive: Primitive, compute: Callable[..., Any], platform: str | None = None) -> None:
  """Lowers a primitive of one result to the computation of a function, on one platform or on every other."""
  mlir.register_lowering(primitive, mlir.lower_fun(compute, multiple_results=False), platform=platform)


def compute_by_platform(primitive: Primitive, compute: Callable[..., Array]) -> None:
  """Computes a primitive, also eagerly, by a function that is told the platform: `None` for any other."""
  for platform in (None, "cpu", "cuda", "rocm", "tpu"):
    lower_as(primitive, functools.partial(compute, platform=platform), platform)
  primitive.def_impl(functools.partial(_eager, primitive))


@functools.partial(jax.jit, static_argnames=("primitive", "parameters"))
def _compiled(primitive: Primitive, *operands: Array, parameters: tuple[tuple[str, Any], ...]) -> Array:
  return primitive.bind(*operands, **dict(parameters))


def _eager(primitive: Primitive, *operands: Array, **parameters: Any) -> Array:
  with jax.disable_jit(False):  # otherwise `_compiled` would call this again
    return _compiled(primitive, *operands, parameters=tuple(parameters.items()))
