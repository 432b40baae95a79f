"""Checks the arguments of `linear_cross_entropy`, each with an error of one line."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

_KINDS: dict[str, tuple[type, str]] = {
  "x": (np.floating, "floating numbers"),
  "kernel": (np.floating, "floating numbers"),
  "labels": (np.integer, "integers"),
  "bias": (np.floating, "floating numbers"),
  "where": (np.bool_, "booleans"),
}
_OPTIONS: dict[str, tuple[type, Callable[[Any], bool], str]] = {
  "rows": (numbers.Integral, lambda n: n >= 1, "a positive integer"),
  "label_smoothing": (numbers.Real, lambda n: 0 <= n < 1, "a number of at least 0 and below 1"),
  "z_loss": (numbers.Real, lambda n: 0 <= n < math.inf, "a finite number that is not negative"),
}


def check_arguments(arrays: dict[str, Any], options: dict[str, Any]) -> None:
  """Raises the errors of `linear_cross_entropy` that shapes, dtypes and known values show.

  Args:
    arrays: its arrays by name; `bias` and `where` may be `None`.
    options: its numbers by name.
  """
  arrays = {name: x for name, x in arrays.items() if x is not None or name not in ("bias", "where")}
  for name, array in arrays.items():
    kind, words = _KINDS[name]
    if not jnp.issubdtype(getattr(array, "dtype", np.void), kind):
      raise TypeError(f"{name}={_shown(array)}: expected an array of {words}")
  x, kernel = arrays["x"], arrays["kernel"]
  if x.ndim < 1 or not x.size:
    raise ValueError(f"x={_shown(x)}: expected rows of [..., D], at least one")
  if kernel.ndim != 2 or kernel.shape[0] != x.shape[-1] or not kernel.size:
    raise ValueError(f"kernel={_shown(kernel)}: expected [{x.shape[-1]}, V], as x={_shown(x)}")
  for name, like, shape in (
    ("bias", "kernel", kernel.shape[1:]),
    ("labels", "x", x.shape[:-1]),
    ("where", "x", x.shape[:-1]),
  ):
    if name in arrays and arrays[name].shape != shape:
      as_of = f"as {like}={_shown(arrays[like])}"
      raise ValueError(f"{name}={_shown(arrays[name])}: expected {list(shape)}, {as_of}")
  for name, value in options.items():
    number, holds, words = _OPTIONS[name]
    if not isinstance(value, number):
      raise TypeError(f"{name}={value!r}: expected {words}")
    if not holds(value):
      raise ValueError(f"{name}={value}: expected {words}")
  _check_range(arrays["labels"], arrays.get("where"), kernel.shape[1])


def _check_range(labels: Any, where: Any, classes: int) -> None:
  if any(
    isinstance(a, jax.core.Tracer) or not getattr(a, "is_fully_addressable", True) for a in (labels, where)
  ):
    return
  labels = np.asarray(labels)
  wrong = ((labels < 0) | (labels >= classes)) & (True if where is None else np.asarray(where))
  if wrong.any():
    raise ValueError(
      f"labels{np.argwhere(wrong)[0].tolist()}={labels[wrong][0]}: expected 0 to {classes - 1}, one of the "
      f"{classes} classes of the kernel; exclude rows with where="
    )


def _shown(x: Any) -> str:
  return f"{x.dtype}{list(x.shape)}" if hasattr(x, "dtype") else f"{x!r} ({type(x).__name__})"
