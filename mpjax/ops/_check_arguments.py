"""Checks the arguments of `linear_cross_entropy`, each with an error of one line."""

from __future__ import annotations

import numbers
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def check_arguments(
  x: Any,
  kernel: Any,
  labels: Any,
  bias: Any,
  where: Any,
  rows: Any,
  label_smoothing: Any,
  z_loss: Any,
  as_average: Any = False,
) -> None:
  """Raises the errors of `linear_cross_entropy` that shapes, dtypes and known values show."""
  of_dtype = {"x": jnp.floating, "kernel": jnp.floating, "labels": jnp.integer, "bias": jnp.floating}
  arrays = {"x": x, "kernel": kernel, "labels": labels, "bias": bias, "where": where}
  for name, array in arrays.items():
    kind = of_dtype.get(name, jnp.bool_)
    if array is None and name in ("bias", "where"):
      continue
    if not hasattr(array, "dtype") or not jnp.issubdtype(array.dtype, kind):
      raise TypeError(f"{name}={_shown(array)}: expected an array of {_NAMES[kind]}")
  if x.ndim < 1 or not x.size:
    raise ValueError(f"x={_shown(x)}: expected rows of [..., D], at least one")
  if kernel.ndim != 2 or kernel.shape[0] != x.shape[-1] or not kernel.size:
    raise ValueError(f"kernel={_shown(kernel)}: expected [{x.shape[-1]}, V], as x={_shown(x)}")
  if bias is not None and bias.shape != kernel.shape[1:]:
    raise ValueError(f"bias={_shown(bias)}: expected [{kernel.shape[1]}], as kernel={_shown(kernel)}")
  for name in ("labels", "where"):
    if arrays[name] is not None and arrays[name].shape != x.shape[:-1]:
      raise ValueError(f"{name}={_shown(arrays[name])}: expected {list(x.shape[:-1])}, as x={_shown(x)}")
  if not isinstance(rows, (int, np.integer)) or isinstance(rows, bool):
    raise TypeError(f"rows={rows!r}: expected an integer")
  if rows < 1:
    raise ValueError(f"rows={rows}: expected a positive integer")
  for name, value in (("label_smoothing", label_smoothing), ("z_loss", z_loss)):
    if not isinstance(value, numbers.Real) or isinstance(value, bool):
      raise TypeError(f"{name}={value!r}: expected a number")
  if not isinstance(as_average, (bool, np.bool_)):
    raise TypeError(f"as_average={as_average!r}: expected True or False")
  if not 0 <= label_smoothing < 1:
    raise ValueError(f"label_smoothing={label_smoothing}: expected a number of at least 0 and below 1")
  if not 0 <= z_loss < float("inf"):
    raise ValueError(f"z_loss={z_loss}: expected a finite number that is not negative")
  _check_range(labels, where, kernel.shape[1])


_NAMES = {jnp.floating: "floating numbers", jnp.integer: "integers", jnp.bool_: "booleans"}


def _check_range(labels: Any, where: Any, classes: int) -> None:
  known = lambda a: not isinstance(a, jax.core.Tracer) and getattr(a, "is_fully_addressable", True)
  if not (known(labels) and known(where)):
    return
  wrong = (np.asarray(labels) < 0) | (np.asarray(labels) >= classes)
  wrong = wrong if where is None else wrong & np.asarray(where)
  if wrong.any():
    value, place = np.asarray(labels)[wrong][0], np.argwhere(wrong)[0].tolist()
    raise ValueError(
      f"labels{place}={value}: expected 0 to {classes - 1}, one of the {classes} classes of the kernel; "
      "exclude rows with where="
    )


def _shown(x: Any) -> str:
  return f"{x.dtype}{list(x.shape)}" if hasattr(x, "dtype") else f"{x!r} ({type(x).__name__})"
