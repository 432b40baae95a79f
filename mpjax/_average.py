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
  """A mean over unequal parts: tokens without padding, positive pairs, valid rows.

  ```python
  def masked_loss(params, batch):
    losses = optax.softmax_cross_entropy_with_integer_labels(model(params, batch["x"]), batch["labels"])
    return mpjax.Average(jnp.sum(losses * batch["mask"]), jnp.sum(batch["mask"]))

  step = mpjax.make_train_step(masked_loss, optax.adamw(1e-3), policy="bf16", accumulate=2)
  ```

  For loss and gradients, `make_train_step` computes `sum(total) / sum(count)` over micro-batches and devices,
  for every division of the batch. A plain mean would be averaged as if all parts counted the same.

  Elsewhere its value is `total / count`: `float(average)`, `jnp.asarray(average)`, `average.value`.
  Arithmetic with numbers works: `Average(...) + 0.01 * penalty`. Write it first: an array before it would
  drop the count, which is an error if the batch is divided. `mpjax.value_and_grad` differentiates it; for
  `jax.grad`, return its `value`. A pytree of two leaves.

  Attributes:
    total: the sum, a number [].
    count: the number of terms in the sum, a number [], which must not depend on parameters. With a count of
      0 the value is the total.
  """

  total: ArrayLike
  count: ArrayLike

  @property
  def value(self) -> Array:
    """The mean, f32[] (f64[] for float64)."""
    total = jnp.asarray(self.total)
    return total.astype(at_least_float32(total.dtype)) / nonzero(jnp.asarray(self.count))

  def __jax_array__(self) -> Array:
    if _divided.get():
      raise TypeError(
        "an mpjax.Average became a plain number, without its count, in a loss function with a divided batch: "
        "write it first, as in average + penalty or average * 0.5; or use average.value"
      )
    return self.value

  __array_ufunc__ = None  # arithmetic with a NumPy number uses the methods below

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


# Whether the loss function that is traced has a divided batch.
_divided: contextvars.ContextVar[bool] = contextvars.ContextVar("mpjax_divided", default=False)


@contextlib.contextmanager
def divided(parts: int) -> Iterator[None]:
  """Makes an `Average` that would lose its count raise an error, if a batch is in several parts."""
  token = _divided.set(parts > 1)
  try:
    yield
  finally:
    _divided.reset(token)


def _number(x: ArrayLike | Average) -> Array:
  """Returns a number as an array; `TypeError` for an average, which has its own count."""
  if isinstance(x, Average):
    raise TypeError(
      "two averages, each with its own count, have no sum over the parts of a batch: put one of them among "
      "the metrics, or use one count for both, as in Average(total_a + total_b, count)"
    )
  return jnp.asarray(x)


def worth(x: ArrayLike | Average) -> Array:
  """Returns the value of an `Average`, and anything else as it is."""
  return x.value if is_average(x) else jnp.asarray(x)


def nonzero(count: Array) -> Array:
  """Returns the divisor of a sum: its count, or 1 for a count of 0."""
  return jnp.where(count == 0, 1, count)


def sum_of(stacked: Average) -> Average:
  """Returns the average over all parts, whose totals and counts are stacked, [parts]."""

  def summed(x: ArrayLike) -> Array:
    x = jnp.asarray(x)
    return x.sum(0, dtype=at_least_float32(x.dtype) if jnp.issubdtype(x.dtype, jnp.floating) else None)

  return Average(summed(stacked.total), summed(stacked.count))


@jax.custom_jvp
def constant(count: ArrayLike) -> Float32[Array, ""]:
  """Returns a count in float32 that must not be differentiated.

  Raises:
    ValueError: under differentiation, if the count depends on the differentiated values.
  """
  return jnp.asarray(count, jnp.float32)


@functools.partial(constant.defjvp, symbolic_zeros=True)
def _constant_jvp(primals: tuple[Any], tangents: tuple[Any]) -> tuple[Array, Array]:
  count = constant(primals[0])
  if not isinstance(tangents[0], jax.custom_derivatives.SymbolicZero):
    raise ValueError(
      "the count of an mpjax.Average depends on the parameters, so the gradient of the average differs from "
      "that of its total: pass jax.lax.stop_gradient(count), or return total / count, a plain loss"
    )
  return count, jnp.zeros_like(count)


def is_average(x: object) -> TypeIs[Average]:
  """Returns whether `x` is an `Average`, for `is_leaf`."""
  return isinstance(x, Average)
