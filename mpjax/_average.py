"""`Average`: a mean as its sum and its count, so that parts of a batch add up exactly."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float32

from mpjax._types import Array, ArrayLike
from mpjax.dtypes import at_least_float32

if TYPE_CHECKING:
  from typing_extensions import TypeIs


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Average:
  """A mean whose parts may count unequally: tokens that are no padding, positive pairs, rows that are valid.

  ```python
  def loss_fn(params, batch):
    losses = cross_entropy(model(params, batch["tokens"]), batch["labels"])  # [rows, tokens]
    return mpjax.Average(jnp.sum(losses * batch["mask"]), jnp.sum(batch["mask"]))
  ```

  `make_train_step` makes of it `sum(total) / sum(count)` over micro-batches and devices, loss and gradients,
  however a batch is divided. A plain mean would be averaged as if all parts counted the same.

  Elsewhere it is worth `total / count`: `float(average)`, `jnp.asarray(average)`, `average.value`. It takes
  numbers as a number does: `Average(...) + 0.01 * penalty`. Write it first: an array before it would drop the
  count, which is an error where a batch is divided. `mpjax.value_and_grad` differentiates it; under
  `jax.grad` a function has to return its `value`. A pytree of two leaves.

  Attributes:
    total: the sum, a number [].
    count: of what was summed, a number [], which must not depend on parameters; 0 for nothing, whose average
      is the total.
  """

  total: ArrayLike
  count: ArrayLike

  @property
  def value(self) -> Array:
    """The mean, f32[] (float64 of float64)."""
    total = jnp.asarray(self.total)
    return total.astype(at_least_float32(total.dtype)) / nonzero(jnp.asarray(self.count))

  def __jax_array__(self) -> Array:
    if _divided.get():
      raise TypeError(
        "an mpjax.Average became a plain number in a loss function whose batch is divided, where its count "
        "is needed: write it first, as in average + penalty or average * 0.5; or say average.value"
      )
    return self.value

  __array_ufunc__ = None  # a number of NumPy leaves arithmetic to the methods below

  def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
    return np.array(self.value, dtype)

  def __float__(self) -> float:
    return float(self.value)

  def __format__(self, spec: str) -> str:
    return format(self.value, spec)

  def __add__(self, other: ArrayLike) -> Average:
    return Average(jnp.asarray(self.total) + _number(other) * jnp.asarray(self.count), self.count)

  __radd__ = __add__

  def __sub__(self, other: ArrayLike) -> Average:
    return self + -_number(other)

  def __rsub__(self, other: ArrayLike) -> Average:
    return -self + other

  def __mul__(self, factor: ArrayLike) -> Average:
    return Average(jnp.asarray(self.total) * _number(factor), self.count)

  __rmul__ = __mul__

  def __truediv__(self, divisor: ArrayLike) -> Average:
    return Average(jnp.asarray(self.total) / _number(divisor), self.count)

  def __neg__(self) -> Average:
    return self * -1

  def __lt__(self, other: ArrayLike | Average) -> Array:
    return self.value < worth(other)

  def __le__(self, other: ArrayLike | Average) -> Array:
    return self.value <= worth(other)

  def __gt__(self, other: ArrayLike | Average) -> Array:
    return self.value > worth(other)

  def __ge__(self, other: ArrayLike | Average) -> Array:
    return self.value >= worth(other)


# Whether a loss function is traced whose batch is divided into parts.
_divided: contextvars.ContextVar[bool] = contextvars.ContextVar("mpjax_divided", default=False)


@contextlib.contextmanager
def divided(parts: int) -> Iterator[None]:
  """Has an `Average` that would lose its count be an error, where a batch is in several parts."""
  token = _divided.set(parts > 1)
  try:
    yield
  finally:
    _divided.reset(token)


def _number(x: ArrayLike | Average) -> Array:
  """Returns a number as an array; `TypeError` for an average, which has a count of its own."""
  if isinstance(x, Average):
    raise TypeError(
      "two averages, each with a count of its own, have no sum that parts of a batch add up to: put one of "
      "them among the metrics, or sum both over one count, as in Average(total_a + total_b, count)"
    )
  return jnp.asarray(x)


def worth(x: ArrayLike | Average) -> Array:
  """Returns the value of an `Average`, and anything else as it is."""
  return x.value if is_average(x) else jnp.asarray(x)


def nonzero(count: Array) -> Array:
  """Returns what a sum is divided by: its count, or 1 for nothing."""
  return jnp.where(count == 0, 1, count)


def sum_of(stacked: Average) -> Average:
  """Returns the average over all of the parts whose totals and counts are stacked, [parts]."""

  def summed(x: ArrayLike) -> Array:
    x = jnp.asarray(x)
    return x.sum(0, dtype=at_least_float32(x.dtype) if jnp.issubdtype(x.dtype, jnp.floating) else None)

  return Average(summed(stacked.total), summed(stacked.count))


@jax.custom_jvp
def constant(count: ArrayLike) -> Float32[Array, ""]:
  """Returns a count in float32; an error where it is differentiated.

  Raises:
    ValueError: under differentiation, if the count depends on what is differentiated.
  """
  return jnp.asarray(count, jnp.float32)


@functools.partial(constant.defjvp, symbolic_zeros=True)
def _constant_jvp(primals: tuple[Any], tangents: tuple[Any]) -> tuple[Array, Array]:
  count = constant(primals[0])
  if not isinstance(tangents[0], jax.custom_derivatives.SymbolicZero):
    raise ValueError(
      "the count of an mpjax.Average depends on the parameters, so that the gradient of the average is not "
      "that of its total: pass jax.lax.stop_gradient(count), or return total / count, a plain loss"
    )
  return count, jnp.zeros_like(count)


def is_average(x: object) -> TypeIs[Average]:
  """Returns whether `x` is an `Average`, for `is_leaf`."""
  return isinstance(x, Average)
