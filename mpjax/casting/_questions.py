"""Questions about an equation that a plan asks before it decides."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from mpjax.casting._kinds import castable


def gives(equation: Any, half: Any) -> bool:
  """Whether all results are in the half dtype."""
  return half is not None and all(v.aval.dtype == half for v in equation.outvars)


def contracts_all(equation: Any) -> bool:
  """Whether a `dot_general` leaves no dimension of either operand but batch ones: a vector times a vector."""
  if equation.primitive is not jax.lax.dot_general_p:
    return False
  contracted, batch = equation.params["dimension_numbers"]
  used = [len(c) + len(b) for c, b in zip(contracted, batch, strict=True)]
  return used == [len(a.aval.shape) for a in equation.invars]


def of_its_own(aval: Any) -> bool:
  """Whether a value is in a floating dtype that the user chose."""
  dtype = getattr(aval, "dtype", None)
  return dtype is not None and not castable(aval) and jax.numpy.issubdtype(dtype, np.inexact)


def pinned_precision(equation: Any) -> bool:
  """Whether a product states a precision of its own, or an algorithm, which names its operands' dtypes."""
  precision = equation.params.get("precision")
  if precision is None:
    return False
  if isinstance(precision, tuple):
    ambient = getattr(jax.config, "jax_default_matmul_precision", None)
    return jax.lax.Precision.HIGHEST in precision and str(ambient) not in ("highest", "float32")
  return True
