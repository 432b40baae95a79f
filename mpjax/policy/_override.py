"""`Override`: what a policy changes for the modules whose path a pattern matches."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np

from mpjax.dtypes import check_dtype, one_of

CHOICES = {"loop_carry": ("float32", "half"), "recompute": ("islands", "nothing")}


@dataclasses.dataclass(frozen=True)
class Override:
  """Changes of a policy for the modules whose path a pattern matches; `None` leaves a field unchanged.

  Attributes:
    compute_dtype: float32, bfloat16 or float16, for matrix products and the operations after them.
    fp8: whether the products are FP8, by the recipe of the policy; with a `compute_dtype`, `None` is `False`.
    loop_carry: the dtype of the carry of a `scan` or `while`, `"float32"` or `"half"`.
    recompute: `"islands"` if the backward pass recomputes float32 islands, `"nothing"` if it keeps them.
  """

  compute_dtype: np.dtype | None = None
  fp8: bool | None = None
  loop_carry: str | None = None
  recompute: str | None = None

  def __post_init__(self) -> None:
    dtype = self.compute_dtype
    if dtype is not None:
      dtype = check_dtype("compute_dtype", dtype)
      object.__setattr__(self, "compute_dtype", dtype)
      object.__setattr__(self, "fp8", bool(self.fp8))
      if dtype.itemsize > 4:
        raise ValueError(f"compute_dtype={dtype.name!r}: autocast computes in float32 or in half precision")
    if self.fp8 and (dtype is None or dtype.itemsize != 2):
      raise ValueError("fp8 needs a half-precision compute_dtype in the same override")
    for key, choices in CHOICES.items():
      if getattr(self, key) not in (None, *choices):
        raise ValueError(f"{key}={getattr(self, key)!r}: {one_of(getattr(self, key), choices)}")

  def to_dict(self) -> dict[str, Any]:
    """Returns the override as plain data, which a policy's `overrides` take back."""
    out: dict[str, Any] = {key: getattr(self, key) for key in CHOICES if getattr(self, key) is not None}
    if self.fp8:
      out["base"] = "fp8"
    elif self.fp8 is False and self.compute_dtype is None:
      out["fp8"] = None
    if self.compute_dtype is not None and not (self.fp8 and self.compute_dtype == jnp.bfloat16):
      out["compute_dtype"] = self.compute_dtype.name
    return out

  def shorthand(self) -> str | dict[str, Any]:
    """Returns the same in short: the name of a dtype or `fp8`, if it says no more."""
    values = self.to_dict()
    alone = values.keys() in ({"base"}, {"compute_dtype"})
    return next(iter(values.values())) if alone else values
