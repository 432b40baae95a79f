"""Sizes of products, and the products that are worth FP8."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax

from mpjax.fp8 import Recipe


class Sizes(NamedTuple):
  """A product as [m, k] x [k, n], without batch dimensions; a symbolic dimension is `None`."""

  m: int | None
  k: int | None
  n: int | None


def sizes_of(
  lhs_shape: tuple[Any, ...], rhs_shape: tuple[Any, ...], dimension_numbers: jax.lax.DotDimensionNumbers
) -> Sizes:
  """Returns the sizes of a `dot_general`, its dimensions folded."""
  (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = dimension_numbers

  def folded(sizes: list[Any]) -> int | None:
    return math.prod(sizes) if all(isinstance(size, int) for size in sizes) else None

  return Sizes(
    folded([size for i, size in enumerate(lhs_shape) if i not in (*lhs_contract, *lhs_batch)]),
    folded([lhs_shape[i] for i in lhs_contract]),
    folded([size for i, size in enumerate(rhs_shape) if i not in (*rhs_contract, *rhs_batch)]),
  )


def unfit(sizes: Sizes, recipe: Recipe) -> str | None:
  """Returns why a product of these sizes is not quantised; `None` if it is.

  All three dimensions count: each is contracted in one of the forward and the two backward products.
  """
  named = {"M": sizes.m, "K": sizes.k, "N": sizes.n}
  known = {name: size for name, size in named.items() if size is not None}
  if len(known) < len(named):
    return "a dimension is symbolic, so it may not be a multiple of 16"
  shown = " x ".join(f"{name}={size}" for name, size in known.items())
  odd = [name for name, size in known.items() if size % recipe.multiple]
  if odd:
    return f"{shown}: {', '.join(odd)} is not a multiple of {recipe.multiple}"
  if min(known.values()) < recipe.min_dim:
    return f"{shown}: smaller than fp8.min_dim={recipe.min_dim}"
  return None
