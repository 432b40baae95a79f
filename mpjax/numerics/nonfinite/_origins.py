"""Origins of non-finite values: the operation, its operands, and the loops around it."""

from __future__ import annotations

import dataclasses
import functools
import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mpjax import _compat
from mpjax._types import Array, JaxprEqn
from mpjax.jaxpr import (
  BACKWARD,
  Trait,
  facts,
  has,
  inside,
  module_path,
  phase_of,
  source_line,
  transform_place,
)
from mpjax.loss_scale import NonFinite, is_inexact


@dataclasses.dataclass(frozen=True)
class Operand:
  """A floating operand of an operation.

  Attributes:
    dtype: name of its dtype.
    shape: its shape.
    largest: its largest finite magnitude; 0.0 without a finite value.
    zeros: number of elements that are zero.
    nonfinite: numbers of NaN, +inf and -inf.
  """

  dtype: str
  shape: tuple[int, ...]
  largest: float
  zeros: int
  nonfinite: NonFinite


@dataclasses.dataclass(frozen=True)
class Iteration:
  """One iteration of a loop.

  Attributes:
    index: its number from 0; for a `scan`, the row of the scanned arrays, also if the scan runs in reverse.
    length: number of iterations; `None` for a `while` loop.
    micro_batch: whether the loop is the step's own loop over the micro-batches of `accumulate`.
  """

  index: int
  length: int | None
  micro_batch: bool = False

  def __str__(self) -> str:
    if self.length is None:
      return f"iteration {self.index + 1} of a while loop"
    kind = "micro-batch" if self.micro_batch else "iteration"
    return f"{kind} {self.index + 1} of {self.length}"


@dataclasses.dataclass(frozen=True)
class Place:
  """The place of an equation in the program.

  Attributes:
    module: path of its module, such as `GPT/blocks/3/mlp`; empty outside modules. In an optimiser, an optax
      transform such as `scale_by_adam`.
    line: file and line of the user's program, such as `model.py:31`; empty if not known.
    backward: whether only the gradient needs it, not the loss.
    iterations: the iterations of the loops around it, outermost first.
    of_optimizer: whether it is in the optimiser.
  """

  module: str = ""
  line: str = ""
  backward: bool = False
  iterations: tuple[Iteration, ...] = ()
  of_optimizer: bool = False

  def at(self, equation: JaxprEqn, of_loss: bool) -> Place:
    """Returns the place of an equation in the body at this place; the loss may depend on its results."""
    if self.of_optimizer:
      module, line = transform_place(equation)
      return dataclasses.replace(self, module=module or self.module, line=line or self.line)
    return dataclasses.replace(
      self,
      module=inside(self.module, module_path(equation)),
      line=source_line(equation) or self.line,
      backward=self.backward or not of_loss or phase_of(equation) == BACKWARD,
    )

  def in_iteration(self, index: int, length: int | None, micro_batch: bool = False) -> Place:
    """Returns this place in one iteration of the loop."""
    return dataclasses.replace(self, iterations=(*self.iterations, Iteration(index, length, micro_batch)))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Origin(Place):
  """An operation with a non-finite result that its operands do not explain.

  Attributes:
    primitive: name of the JAX primitive.
    dtype: name of the dtype of the result.
    shape: shape of the result.
    nonfinite: numbers of NaN, +inf and -inf in the result.
    operands: the floating operands.
    float32_largest: the largest magnitude of the same operation in float32 on the same operands; infinity if
      it is not finite there either; `None` if the operation is already in float32, or was not computed again.
    whole: whether it stands for a loop that is finite when it runs operation by operation.
    constant: whether the program itself contains the infinity or NaN, and `primitive` reads it.
  """

  primitive: str
  dtype: str
  shape: tuple[int, ...]
  nonfinite: NonFinite
  operands: tuple[Operand, ...]
  float32_largest: float | None = None
  whole: bool = False
  constant: bool = False

  @property
  def overflowed(self) -> bool:
    """Returns whether the result is beyond the range of its dtype, but finite in float32."""
    return self.float32_largest is not None and bool(np.isfinite(self.float32_largest))


@jax.jit
def _is_finite(x: jax.Array) -> jax.Array:
  return jnp.isfinite(_readable(x)).all()


@jax.jit
def _counts(x: jax.Array) -> tuple[jax.Array, ...]:
  x = _readable(x)
  real = jnp.abs(x) if jnp.iscomplexobj(x) else x
  nan, infinite = jnp.isnan(x), jnp.isinf(x)
  largest = jnp.max(jnp.where(jnp.isfinite(x), jnp.abs(x), 0), initial=0.0)
  number = lambda mask: mask.sum(dtype=jnp.int32)
  return number(nan), number(infinite & (real > 0)), number(infinite & (real < 0)), number(x == 0), largest


def _readable(x: jax.Array) -> jax.Array:
  return x.astype(jnp.float32) if jnp.finfo(x.dtype).bits < 16 else x


@jax.jit
def explained(operands: list[jax.Array]) -> jax.Array:
  """Returns a mask of the places where an operand is non-finite; operands have one shape, or are scalars."""
  bad = [~jnp.isfinite(_readable(x)) for x in operands]
  return functools.reduce(operator.or_, bad)


@jax.jit
def made_here(out: jax.Array, operands: list[jax.Array]) -> jax.Array:
  """Returns whether a result is non-finite where no operand is; operands have its shape, or are scalars."""
  return (~jnp.isfinite(_readable(out)) & ~explained(operands)).any()


def is_finite(x: Array) -> bool:
  """Returns whether an array is finite, and waits for it; True for a dtype that is not floating."""
  return not is_inexact(x) or bool(_is_finite(x))


def count(x: Array) -> NonFinite:
  """Counts the elements of a floating array that are NaN, +inf and -inf."""
  return describe(x).nonfinite


def describe(x: Array) -> Operand:
  """Returns the description of an operand."""
  nan, posinf, neginf, zeros, largest = jax.device_get(_counts(x))
  counts = NonFinite(int(nan), int(posinf), int(neginf), np.size(x))
  return Operand(jnp.result_type(x).name, np.shape(x), float(largest), int(zeros), counts)


def float32_largest(equation: JaxprEqn, operands: list[Array], dtype: np.dtype) -> float | None:
  """Returns the largest magnitude of an operation repeated in float32; `None` if casts do not suffice."""
  arithmetic = has(equation, Trait.ELEMENTWISE | Trait.ACCUMULATES)
  if not arithmetic or facts(equation).list == "opaque" or jnp.finfo(dtype).bits >= 32:
    return None
  changes: dict[str, Any] = {}
  for key in ("preferred_element_type", "new_dtype"):
    if equation.params.get(key) is not None:
      changes[key] = np.dtype(np.float32)
  if "precision" in equation.params:
    changes["precision"] = None  # an algorithm works only for the dtypes in its name
  wide = [jnp.asarray(x).astype(jnp.float32) if is_inexact(x) else x for x in operands]
  (out,) = _compat.bind(equation, wide, **changes)
  floating = [x for x in wide if is_inexact(x)]
  if of_places(equation, floating, out.shape):
    out = jnp.where(explained(floating), 0, out)
  return describe(out).largest if is_finite(out) else np.inf


def of_places(equation: JaxprEqn, operands: list[Array], shape: tuple[int, ...]) -> bool:
  """Returns whether each element of a result depends only on the operands' elements there and on scalars."""
  return has(equation, Trait.ELEMENTWISE) and all(np.shape(x) in ((), shape) for x in operands)
