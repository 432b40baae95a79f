"""Norms of gradients by module, as sums of squares on the host, because squares leave float32's range."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import jax
import jax.numpy as jnp

from mpjax._types import Array, PyTree
from mpjax.dtypes import at_least_float32
from mpjax.jaxpr import layer_pattern
from mpjax.patterns import named_leaves


@jax.jit
def minus(a: PyTree, b: PyTree) -> PyTree:
  """Returns the difference of two trees in float32 or wider."""
  return jax.tree.map(lambda x, y: _wide(x) - _wide(y), a, b)


@jax.jit
def plus(a: PyTree, b: PyTree) -> PyTree:
  """Returns the sum of two trees in float32 or wider."""
  return jax.tree.map(lambda x, y: _wide(x) + _wide(y), a, b)


def squares(tree: PyTree) -> dict[str, float]:
  """Returns the sum of squares by module; equal layers share a name such as `blocks/*/up`.

  A parameter at the root of the tree is its own module.
  """
  found: dict[str, float] = {}
  for (name, _), sums in zip(named_leaves(tree), jax.device_get(_leaf_squares(tree)), strict=True):
    largest, square = map(float, sums)
    path = name.removeprefix("params/")
    module = layer_pattern(path.rpartition("/")[0] or path)
    found[module] = found.get(module, 0.0) + largest**2 * square
  return found


def added(parts: Iterable[Mapping[str, float]]) -> dict[str, float]:
  """Returns the sums of squares of several trees together."""
  found: dict[str, float] = {}
  for part in parts:
    for module, square in part.items():
      found[module] = found.get(module, 0.0) + square
  return found


def total(of: Mapping[str, float]) -> float:
  """Returns the sum over modules; infinity if one is not finite."""
  return math.fsum(of.values()) if all(map(math.isfinite, of.values())) else math.inf


def ratios(of: Mapping[str, float], to: Mapping[str, float]) -> dict[str, float]:
  """Returns the ratio of two norms by module."""
  return {module: ratio(square, to[module]) for module, square in of.items()}


def ratio(of: float, to: float) -> float:
  """Returns the ratio of two norms from their squares; 0 if both are 0."""
  if not math.isfinite(of) or (of and not to):
    return math.inf
  return math.sqrt(of / to) if to else 0.0


@jax.jit
def _leaf_squares(tree: PyTree) -> list[tuple[Array, Array]]:
  """Returns the largest magnitude of each leaf, and the sum of squares in that unit, to stay in range."""

  def of(x: Array) -> tuple[Array, Array]:
    size = jnp.abs(_wide(x))
    largest = jnp.max(size, initial=0.0)
    return largest, jnp.sum(jnp.square(size / jnp.where(largest == 0, 1, largest)))

  return [of(x) for x in jax.tree.leaves(tree)]


def _wide(x: Array) -> Array:
  return x.astype(at_least_float32(x.dtype))
