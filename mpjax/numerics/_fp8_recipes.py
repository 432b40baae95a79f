"""`compare_fp8_recipes`: what FP8 would do to each product's operands, by format and extent of a scale."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mpjax._plain_text import table
from mpjax._types import Array, JaxprEqn, PolicyLike, PyTree
from mpjax.fp8._recipe import BLOCK
from mpjax.fp8._scaling import amax_of, quantise, quantise_blocks, scale_of
from mpjax.jaxpr import (
  bind_again,
  bodies_of,
  call_kind,
  dtype_of,
  inside,
  interpret,
  module_path,
  open_jaxpr,
  shape_of,
  source_line,
)
from mpjax.numerics._inspection import step_of
from mpjax.numerics._instrumented_step import differentiated, reference_state, reference_step
from mpjax.numerics._random_rounding import Rule, into_bodies

FORMATS = {"E4M3": np.dtype(jnp.float8_e4m3fn), "E5M2": np.dtype(jnp.float8_e5m2)}
SCALES = ("tensor", "row", "block")
# `E4M3 tensor` is what recipe: current does, and delayed but for the age of its scale; `E4M3 block` is MXFP8.
RECIPES = tuple(f"{name} {scale}" for name in FORMATS for scale in SCALES)
OPERANDS = ("lhs", "rhs", "gradient")


_Place = tuple[int, ...]  # identities of the calls that a product is in, and its own


class _Product(NamedTuple):
  path: str
  equation: JaxprEqn


@dataclasses.dataclass(frozen=True)
class Fp8Operand:
  """One operand of a matrix product, as FP8 recipes would quantise it.

  Attributes:
    module: module path of the product.
    line: of the user's program, `model.py:31`.
    operand: `lhs` or `rhs` of the forward product, or the `gradient` of its result.
    shape: of the operand.
    errors: by recipe of `RECIPES`, |quantised - value| / |value|; `None` where blocks do not fit.
    underflow: the share of the values that are not zero which become zero; or `None`.
  """

  module: str
  line: str
  operand: str
  shape: tuple[int, ...]
  errors: dict[str, float | None]
  underflow: dict[str, float | None]


@dataclasses.dataclass(frozen=True)
class Fp8Comparison:
  """The operands of a model's products, as FP8 recipes would quantise them.

  Attributes:
    operands: in the order of the program, three for each product.
  """

  operands: tuple[Fp8Operand, ...]

  def of(self, module: str, operand: str | None = None) -> list[Fp8Operand]:
    """Returns the operands of a module's products; those of one kind, if it is named."""
    return [o for o in self.operands if o.module == module and operand in (None, o.operand)]

  def to_dict(self) -> dict[str, Any]:
    """Returns plain data."""
    return {"recipes": list(RECIPES), "operands": [dataclasses.asdict(o) for o in self.operands]}

  def __str__(self) -> str:
    cell = lambda error: "" if error is None else f"{error:.2g}"
    lost = lambda share: f" ({100 * share:.2g}% lost)" if share and share >= 1e-3 else ""
    rows = [["module", "operand", *RECIPES]]
    for o in self.operands:
      rows.append([o.module, o.operand, *(f"{cell(o.errors[r])}{lost(o.underflow[r])}" for r in RECIPES)])
    return "\n".join(line for (line,) in table(rows))


def compare_fp8_recipes(
  target: Any, state: PyTree, batch: PyTree, policy: PolicyLike | None = None, **init: Any
) -> Fp8Comparison:
  """Says what FP8 would do to both operands and the output gradient of each matrix product, recipe by recipe.

  Runs the loss and its gradients once in float32, whatever the policy, and quantises nothing on the way. A
  scale is shared by a `tensor` (recipe: current; delayed has the same but for its age), by a `row`, the
  values that are summed together, or by a `block` of 32 of those (recipe: block). Rows and blocks of a
  gradient go along what its product with rhs sums.

  ```python
  print(mpjax.compare_fp8_recipes(loss_fn, params, batch))
  ```

  Not looked at are convolutions, products inside a `while_loop`, a `shard_map` or a custom derivative rule,
  and those that the loss does not depend on. The steps of a loop are taken together.

  Args:
    target: a `TrainStep`, or a loss function as `mpjax.make_train_step` takes it.
    state: a `TrainState`; for a loss function its parameters or `nnx.Module`.
    batch: a tree of arrays.
    policy: of the step; says how parameters are kept, no more.
    init: for a loss function, what `TrainStep.init` takes besides (`rng`, `model_state`).
  """
  step, state, _ = step_of(target, state, policy, None, init)
  step, state = reference_step(step), reference_state(state)
  products: dict[_Place, _Product] = {}

  def watch(probes: dict[int, Array]) -> Callable[..., Callable[..., Any]]:
    def transform(fun: Callable[..., Any], *_: Any, **__: Any) -> Callable[..., Any]:
      return lambda *args, **kwargs: _watched(fun, args, kwargs, probes, products)

    return transform

  def run(probes: dict[int, Array], state: Any, batch: PyTree) -> dict[int, Array]:
    return jax.grad(lambda probes: differentiated(step, state, batch, watch(probes)))(probes)

  jax.eval_shape(lambda state, batch: differentiated(step, state, batch, watch({})), state, batch)
  found = dict(products)
  # Of the tracings to come, the equations are others: their order is the same.
  probes = {i: jnp.zeros((3, 1 + 2 * len(RECIPES))) for i in range(len(found))}
  products.clear()
  seen = jax.device_get(jax.jit(run)(probes, state, batch))
  pairs = zip(found.values(), seen.values(), strict=True)
  return Fp8Comparison(tuple(o for product, stats in pairs for o in _operands(product, stats)))


def _watched(
  fun: Callable[..., Any],
  args: tuple[Any, ...],
  kwargs: dict[str, Any],
  probes: dict[int, Array],
  products: dict[_Place, _Product],
) -> Any:
  """Returns `fun(*args, **kwargs)`, with a look at each product that there is a probe for.

  Args:
    fun: a function.
    args: its arguments.
    kwargs: its keyword arguments.
    probes: by number of the product.
    products: is given the products, by place, in the order in which they are come by.
  """
  leaves, structure = jax.tree.flatten((args, kwargs))
  traced = [i for i, x in enumerate(leaves) if isinstance(x, (jax.Array, np.ndarray))]

  def of_arrays(*arrays: Array) -> Any:
    filled = list(leaves)
    for i, x in zip(traced, arrays, strict=True):
      filled[i] = x
    args, kwargs = jax.tree.unflatten(structure, filled)
    return fun(*args, **kwargs)

  arrays = [leaves[i] for i in traced]
  closed, shapes = jax.make_jaxpr(of_arrays, return_shape=True)(*arrays)
  numbers: dict[_Place, int] = {}

  def rule_in(path: str, calls: _Place) -> Rule:
    def rule(equation: JaxprEqn, operands: list[Any]) -> Sequence[Any]:
      here, place = inside(path, module_path(equation)), (*calls, id(equation))
      kind = call_kind(equation)
      if kind is not None:  # a derivative rule of the user's stays what it is
        entered = not kind.is_custom_rule and any(map(_has_product, bodies_of(equation)))
        if not entered:
          return bind_again(equation, operands)
        return into_bodies(equation, operands, rule_in(here, place))
      out = bind_again(equation, operands)
      if not _is_product(equation):
        return out
      # Bodies may be shared by several calls, and be traced more than once.
      number = numbers.setdefault(place, len(products))
      products[place] = _Product(here, equation)
      if number not in probes:
        return out
      lhs, rhs = (jax.lax.stop_gradient(x) for x in operands)
      return [_look(out[0], lhs, rhs, probes[number], equation.params["dimension_numbers"])]

    return rule

  return jax.tree.unflatten(jax.tree.structure(shapes), interpret(closed, arrays, rule_in("", ())))


def _is_product(equation: JaxprEqn) -> bool:
  floating = all(jnp.issubdtype(dtype_of(v), jnp.floating) for v in equation.invars[:2])
  return equation.primitive is jax.lax.dot_general_p and floating


def _has_product(jaxpr: Any) -> bool:
  equations = open_jaxpr(jaxpr).eqns
  return any(e.primitive is jax.lax.dot_general_p or any(map(_has_product, bodies_of(e))) for e in equations)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _look(out: Array, lhs: Array, rhs: Array, probe: Array, dims: Any) -> Array:
  """Returns `out`; the probe's cotangent is what is kept of the operands and of the cotangent."""
  return out


def _look_forward(
  out: Array, lhs: Array, rhs: Array, probe: Array, dims: Any
) -> tuple[Array, tuple[Array, Array, tuple[Array, Array]]]:
  (of_lhs, of_rhs), _ = dims
  return out, (_kept(lhs, of_lhs), _kept(rhs, of_rhs), (jnp.zeros_like(lhs), jnp.zeros_like(rhs)))


def _look_backward(
  dims: Any, residuals: tuple[Array, Array, tuple[Array, Array]], ct: Array
) -> tuple[Array, ...]:
  of_lhs, of_rhs, (lhs, rhs) = residuals
  (_, contracted), (_, batch) = dims
  free = rhs.ndim - len(contracted) - len(batch)
  of_ct = _kept(ct, tuple(range(ct.ndim - free, ct.ndim)))
  return ct, lhs, rhs, jnp.stack([of_lhs, of_rhs, of_ct])


_look.defvjp(_look_forward, _look_backward)


def _kept(x: Array, contracted: Sequence[int]) -> Array:
  """Returns float32[1 + 2 * recipes]: 1, and by recipe the squared relative error, the share that is lost."""
  rest = [i for i in range(x.ndim) if i not in contracted]
  rows = jnp.transpose(x, (*rest, *contracted)).astype(jnp.float32)
  rows = rows.reshape(math.prod(x.shape[i] for i in rest), -1)  # [rows, what is summed]
  # In a unit that is a power of two, which moves no scale of a block, squares are in float32's range.
  rows = rows * scale_of(amax_of(rows), jnp.float8_e5m2, pow2=True)
  whole, there = jnp.sum(rows * rows), rows != 0
  whole = jnp.where(whole > 0, whole, 1)
  errors, shares = [], []
  for dtype in FORMATS.values():
    for scale in SCALES:
      back = _quantised(rows, dtype, scale)
      errors.append(jnp.sum((back - rows) ** 2) / whole)
      shares.append(jnp.sum(there & (back == 0)) / jnp.maximum(jnp.sum(there), 1))
  return jnp.stack([jnp.ones([]), *errors, *shares]).astype(jnp.float32)


def _quantised(rows: Array, dtype: np.dtype, scale: str) -> Array:
  """Returns float32 rows as they come back from FP8; NaN where blocks do not fit."""
  if scale == "block":
    if rows.shape[1] % BLOCK:
      return jnp.full_like(rows, jnp.nan)
    q, units = quantise_blocks(rows, 1, BLOCK, dtype)
    return q.astype(jnp.float32) * jnp.repeat(units.astype(jnp.float32), BLOCK, 1)
  factor = scale_of(amax_of(rows, int(scale == "row")), dtype)
  return quantise(rows, factor, dtype).astype(jnp.float32) / (factor[:, None] if scale == "row" else factor)


def _operands(product: _Product, stats: np.ndarray) -> list[Fp8Operand]:
  """Returns what is known of a product: nothing if the loss does not depend on it."""
  if not stats[0, 0]:
    return []
  path, equation = product
  shapes = [shape_of(v) for v in (*equation.invars[:2], *equation.outvars)]
  n, found = len(RECIPES), []
  for name, shape, kept in zip(OPERANDS, shapes, stats.astype(np.float64), strict=True):
    means = kept[1:] / kept[0]
    known = lambda x: None if math.isnan(x) else float(x)
    errors = {recipe: known(math.sqrt(x)) for recipe, x in zip(RECIPES, means[:n], strict=True)}
    share = dict(zip(RECIPES, means[n:], strict=True))
    underflow = {recipe: None if errors[recipe] is None else float(share[recipe]) for recipe in RECIPES}
    found.append(Fp8Operand(path, source_line(equation), name, tuple(shape), errors, underflow))
  return found
