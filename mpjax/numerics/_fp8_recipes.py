"""`compare_fp8_recipes`: the error of each product's operands in FP8 and NVFP4, by extent of a scale."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mpjax._render.plain_text import table
from mpjax._types import Array, JaxprEqn, PolicyLike, PyTree
from mpjax.fp8._blocks import quantise_mx, quantise_nvfp4, rotate
from mpjax.fp8._recipe import BLOCKS
from mpjax.fp8._scaling import amax_of, quantise, scale_of
from mpjax.jaxpr import (
  Rule,
  bind_again,
  bodies_of,
  call_kind,
  dtype_of,
  equations_in,
  inside,
  interpret,
  into_bodies,
  module_path,
  shape_of,
  source_line,
)
from mpjax.numerics._arguments import step_of
from mpjax.numerics._batches import listed
from mpjax.numerics._instrumented_step import differentiated, reference_state, reference_step
from mpjax.products import conv_operands, conv_result, windows_of

FORMATS = {
  "E4M3": np.dtype(jnp.float8_e4m3fn),
  "E5M2": np.dtype(jnp.float8_e5m2),
  "B11": np.dtype(jnp.float8_e4m3b11fnuz),
}
# `E4M3 tensor` is what recipe: current does; `E4M3 mx` is MXFP8, which TPU v5 and v6, with B11, do not have.
RECIPES = (
  *(f"{name} {scale}" for name in ("E4M3", "E5M2") for scale in ("tensor", "channel", "mx", "delayed")),
  *(f"B11 {scale}" for scale in ("tensor", "channel", "delayed")),
  "NVFP4",
)
OPERANDS = LHS, RHS, GRADIENT = ("lhs", "rhs", "gradient")
_PRODUCTS = (jax.lax.dot_general_p, jax.lax.conv_general_dilated_p)
# Position of the largest value in the figures of an operand.
_AMAX = 1 + 4 * len(RECIPES)


_Place = tuple[JaxprEqn, ...]  # the calls around a product, and the product


class _Product(NamedTuple):
  path: str
  equation: JaxprEqn


@dataclasses.dataclass(frozen=True)
class Fp8Operand:
  """The error that each recipe makes in one operand of a matrix product.

  Attributes:
    module: module path of the product.
    line: line of the user's program, such as `model.py:31`.
    operand: `lhs` or `rhs` of the forward product, or `gradient`, the gradient of its result.
    shape: shape of the operand.
    errors: by recipe, |quantised - value| / |value|; `None` if blocks do not fit. Channels and blocks of lhs
      and rhs run along the dimensions that the product sums; those of the gradient run along those that the
      gradient of lhs sums.
    underflow: by recipe, the share of nonzero values that become zero; or `None`.
    transposed: `errors` in the other product that reads the operand. For lhs and gradient it computes the
      gradient of rhs (the weight's); for rhs it computes the gradient of lhs.
    transposed_underflow: `underflow` in that product.
  """

  module: str
  line: str
  operand: str
  shape: tuple[int, ...]
  errors: dict[str, float | None]
  underflow: dict[str, float | None]
  transposed: dict[str, float | None]
  transposed_underflow: dict[str, float | None]


@dataclasses.dataclass(frozen=True)
class Fp8Comparison:
  """The errors that recipes below 16 bits make in the operands of a model's products.

  Attributes:
    operands: three for each product, in program order.
    recipes: names of the recipes, such as `E4M3 tensor`; `B11` is E4M3B11FNUZ, that of TPU v5 and v6.
  """

  operands: tuple[Fp8Operand, ...]
  recipes: tuple[str, ...]

  def of(self, module: str, operand: str | None = None) -> list[Fp8Operand]:
    """Returns the operands of a module's products; only `operand` (such as `lhs`) if it is given."""
    return [o for o in self.operands if o.module == module and operand in (None, o.operand)]

  def to_dict(self) -> dict[str, Any]:
    """Returns plain data."""
    return {"recipes": list(self.recipes), "operands": [dataclasses.asdict(o) for o in self.operands]}

  def __str__(self) -> str:
    cell = lambda error: "" if error is None else f"{error:.2g}"
    lost = lambda share: f" ({100 * share:.2g}% lost)" if share and share >= 1e-3 else ""
    rows = [["module", "operand", *self.recipes]]
    for o in self.operands:
      for name, errors, gone in (
        (o.operand, o.errors, o.underflow),
        (f"{o.operand} transposed", o.transposed, o.transposed_underflow),
      ):
        rows.append([o.module, name, *(f"{cell(errors[r])}{lost(gone[r])}" for r in self.recipes)])
    return "\n".join(line for (line,) in table(rows))


def compare_fp8_recipes(
  target: Any,
  state: PyTree,
  batch: PyTree,
  policy: PolicyLike | None = None,
  *,
  earlier: PyTree | None = None,
  **init: Any,
) -> Fp8Comparison:
  """Compares the errors of low-precision recipes in the operands and output gradient of each matrix product.

  ```python
  comparison = mpjax.numerics.compare_fp8_recipes(loss_fn, params, batch)
  print(comparison)  # a row for each operand, a column for each recipe
  ```

  Runs the loss and its gradients once in float32, whatever the policy. Only copies are quantised; the run
  itself stays in float32.

  The values that share a scale are a `tensor` (recipe: current), a `channel` (the values that are summed
  together; recipe: per_channel) or 32 values of a channel (recipe: mx). `NVFP4` is recipe: nvfp4, with rhs as
  the weight, gradients rounded at random, and operands of the weight's gradient rotated. With `earlier`
  batches there is also `delayed`: its scale comes from the largest value in those batches, and larger values
  are clipped. Two products read each operand and sum along different dimensions, so each operand has figures
  for both. In a convolution whose windows overlap, a value is in several sums: its operands have figures only
  for `tensor` and `delayed`.

  Products inside a `while_loop`, a `shard_map` or a custom derivative rule are left out, and products that
  the loss does not depend on. The steps of a loop share one row, without a figure for `delayed`.

  Args:
    target: a `TrainStep`, or a loss function as `mpjax.make_train_step` takes it.
    state: a `TrainState`; for a loss function its parameters (a tree of arrays or an `nnx.Module`).
    batch: a tree of arrays.
    policy: the policy of the step; it only says in which dtype parameters are kept.
    earlier: one or a list of earlier batches with the same shapes, for `delayed`. They run with the same
      parameters.
    init: for a loss function, the other arguments of `TrainStep.init` (`rng`, `model_state`).

  Returns:
    An `Fp8Comparison`: `str()` gives a table, `operands` and `to_dict()` the data.

  Raises:
    ValueError: for arguments that do not go together.
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
  # Each new tracing makes new equations, in the same order.
  probes = {i: jnp.zeros((3, _AMAX + 1)) for i in range(len(found))}
  products.clear()
  look = jax.jit(run)
  for before in [] if earlier is None else listed(earlier):
    for i, stats in look(probes, state, before).items():
      once = stats[:, :1] == 1  # a loop adds up the largest values of its steps
      history = jnp.maximum(probes[i][:, _AMAX:], jnp.where(once, stats[:, _AMAX:], 0))
      probes[i] = probes[i].at[:, _AMAX:].set(history)
  seen = jax.device_get(look(probes, state, batch))
  recipes = tuple(r for r in RECIPES if earlier is not None or not r.endswith("delayed"))
  pairs = zip(found.values(), seen.values(), strict=True)
  return Fp8Comparison(
    tuple(o for product, stats in pairs for o in _operands(product, stats, recipes)), recipes
  )


def _watched(
  fun: Callable[..., Any],
  args: tuple[Any, ...],
  kwargs: dict[str, Any],
  probes: dict[int, Array],
  products: dict[_Place, _Product],
) -> Any:
  """Returns `fun(*args, **kwargs)`, and observes each product that has a probe.

  Args:
    fun: a function.
    args: its arguments.
    kwargs: its keyword arguments.
    probes: the probes, by number of the product.
    products: receives the products by place, in program order.
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
      here, place = inside(path, module_path(equation)), (*calls, equation)
      kind = call_kind(equation)
      if kind is not None:  # a custom derivative rule stays unchanged
        entered = not kind.is_custom_rule and _has_product(equation)
        if not entered:
          return bind_again(equation, operands)
        return into_bodies(equation, operands, rule_in(here, place))
      out = bind_again(equation, operands)
      if not _is_product(equation):
        return out
      # Several calls may share a body, and a body may be traced more than once.
      number = numbers.setdefault(place, len(products))
      products[place] = _Product(here, equation)
      if number not in probes:
        return out
      lhs, rhs = (jax.lax.stop_gradient(x) for x in operands)
      if equation.primitive is jax.lax.dot_general_p:
        return [_look(out[0], lhs, rhs, probes[number], equation.params["dimension_numbers"])]
      windows = windows_of(equation)
      if windows is None:
        return [_look(out[0], lhs, rhs, probes[number], None)]
      x, w = conv_operands(lhs, rhs, windows)
      dims = (((x.ndim - 1,), (0,)), ((), ()))
      order = (windows.out_spec[0], *windows.out_spec[2:], windows.out_spec[1])
      return [conv_result(_look(out[0].transpose(order), x, w, probes[number], dims), windows)]

    return rule

  return jax.tree.unflatten(jax.tree.structure(shapes), interpret(closed, arrays, rule_in("", ())))


def _is_product(equation: JaxprEqn) -> bool:
  return equation.primitive in _PRODUCTS and all(
    jnp.issubdtype(dtype_of(v), jnp.floating) for v in equation.invars[:2]
  )


def _has_product(equation: JaxprEqn) -> bool:
  return any(e.primitive in _PRODUCTS for body in bodies_of(equation) for e in equations_in(body))


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _look(out: Array, lhs: Array, rhs: Array, probe: Array, dims: Any) -> Array:
  """Returns `out`; the probe's cotangent holds the figures of the operands and of the cotangent.

  `dims` is the product's dimension numbers; `None` for a convolution whose windows overlap.
  """
  return out


def _look_forward(
  out: Array, lhs: Array, rhs: Array, probe: Array, dims: Any
) -> tuple[Array, tuple[Array, Array, tuple[Array, Array]]]:
  kept = [
    _kept(x, name, *_summed(x, dims, i), probe[i, _AMAX])
    for i, (x, name) in enumerate(((lhs, LHS), (rhs, RHS)))
  ]
  return out, (jnp.stack(kept), probe[2, _AMAX], (jnp.zeros_like(lhs), jnp.zeros_like(rhs)))


def _look_backward(
  dims: Any, residuals: tuple[Array, Array, tuple[Array, Array]], ct: Array
) -> tuple[Array, ...]:
  of_operands, amax, (lhs, rhs) = residuals
  along: tuple[Sequence[int] | None, Sequence[int] | None] = (None, None)
  if dims is not None:
    (_, contracted), (_, batch) = dims
    first = ct.ndim - (rhs.ndim - len(contracted) - len(batch))
    along = range(first, ct.ndim), range(len(batch), first)
  of_ct = _kept(ct, GRADIENT, *along, amax)
  return ct, lhs, rhs, jnp.concatenate([of_operands, of_ct[None]])


_look.defvjp(_look_forward, _look_backward)


def _summed(x: Array, dims: Any, i: int) -> tuple[Sequence[int] | None, Sequence[int] | None]:
  """Returns the dimensions of operand `i` that the product sums, and those that the other product sums."""
  if dims is None:
    return None, None
  summed, batch = (each[i] for each in dims)
  return summed, [d for d in range(x.ndim) if d not in (*summed, *batch)]


def _kept(
  x: Array,
  name: str,
  summed: Sequence[int] | None,
  summed_next: Sequence[int] | None,
  earlier: Array,
) -> Array:
  """Returns the figures of an operand: float32[2 + 4 * recipes].

  They are 1; by recipe the squared relative error and the share that is lost; both again for the other
  product that reads the operand; and the operand's largest value.

  Args:
    x: the operand.
    name: the name of the operand, of `OPERANDS`.
    summed: dimensions that the product sums; `None` if a value is in several sums.
    summed_next: dimensions that the other product sums.
    earlier: the largest value of earlier batches, f32[]; 0 without earlier batches.
  """
  x = x.astype(jnp.float32)
  amax = amax_of(x)
  # In a unit that is a power of two, squares stay in float32's range and scales of blocks do not change.
  unit = scale_of(amax, jnp.float8_e5m2, pow2=True)
  x, whole = x * unit, {}
  for key, dtype in FORMATS.items():
    whole[f"{key} tensor"] = _figures(x, _with_scale(x, scale_of(amax * unit, dtype), dtype))
    late = _figures(x, _with_scale(x, scale_of(earlier * unit, dtype), dtype))
    whole[f"{key} delayed"] = tuple(jnp.where(earlier > 0, figure, jnp.nan) for figure in late)
  both = []
  for is_next, along in enumerate((summed, summed_next)):
    if along is None:
      figures = {recipe: whole.get(recipe, (jnp.nan, jnp.nan)) for recipe in RECIPES}
      both += [figures[recipe][i] for i in (0, 1) for recipe in RECIPES]
      continue
    rest = [i for i in range(x.ndim) if i not in along]
    rows = jnp.transpose(x, (*rest, *along))
    # [rows, summed values]
    rows = rows.reshape(math.prod(x.shape[i] for i in rest), math.prod(x.shape[i] for i in along))
    figures = dict(whole)
    for key, dtype in FORMATS.items():
      scale = scale_of(amax_of(rows, 1), dtype, pow2=False)[:, None]
      figures[f"{key} channel"] = _figures(rows, _with_scale(rows, scale, dtype))
      if key != "B11":
        figures[f"{key} mx"] = _figures(rows, _in_mx(rows, dtype))
    if is_next and name != RHS and not rows.shape[1] % BLOCKS["nvfp4"]:  # for the gradient of the weight
      rows = rotate(rows)
    figures["NVFP4"] = _figures(rows, _in_nvfp4(rows, name))
    both += [figures[recipe][i] for i in (0, 1) for recipe in RECIPES]
  return jnp.stack([jnp.ones([]), *both, amax]).astype(jnp.float32)


def _figures(x: Array, back: Array) -> tuple[Array, ...]:
  """Returns the squared relative error of quantised values, and the share of values that are lost."""
  whole, there = jnp.sum(x * x), x != 0
  error = jnp.sum((back - x) ** 2) / jnp.where(whole > 0, whole, 1)
  return error, jnp.sum(there & (back == 0)) / jnp.maximum(jnp.sum(there), 1)


def _with_scale(x: Array, scale: Array, dtype: np.dtype) -> Array:
  return quantise(x * scale, jnp.ones([]), dtype).astype(jnp.float32) / scale


def _in_mx(rows: Array, dtype: np.dtype) -> Array:
  """Returns float32 rows after a round trip through MXFP8; NaN if blocks do not fit."""
  size = BLOCKS["mx"]
  if rows.shape[1] % size:
    return jnp.full_like(rows, jnp.nan)
  q, units = quantise_mx(rows, dtype)
  return q.astype(jnp.float32) * jnp.repeat(units.astype(jnp.float32), size, 1)


def _in_nvfp4(rows: Array, name: str) -> Array:
  """Returns float32 rows after a round trip through NVFP4, as recipe: nvfp4 makes it of an operand."""
  size = BLOCKS["nvfp4"]
  if rows.shape[1] % size or (name == RHS and rows.shape[0] % size):
    return jnp.full_like(rows, jnp.nan)
  q, units, scale = quantise_nvfp4(rows, squares=name == RHS, stochastic=name == GRADIENT)
  return q.astype(jnp.float32) * jnp.repeat(units.astype(jnp.float32), size, 1) / scale


def _operands(product: _Product, stats: np.ndarray, recipes: Sequence[str]) -> list[Fp8Operand]:
  """Returns the operands of a product; empty if the loss does not depend on it."""
  if not stats[0, 0]:
    return []
  path, equation = product
  shapes = [shape_of(v) for v in (*equation.invars[:2], *equation.outvars)]
  found = []
  for name, shape, kept in zip(OPERANDS, shapes, stats.astype(np.float64), strict=True):
    means = (kept[1:_AMAX] / kept[0]).reshape(2, 2, len(RECIPES))
    figures: list[dict[str, float | None]] = []
    for squares, shares in means:
      by_recipe = {r: (e, s) for r, e, s in zip(RECIPES, squares, shares, strict=True) if r in recipes}
      known = {recipe: not math.isnan(square) for recipe, (square, _) in by_recipe.items()}
      figures += [
        {recipe: math.sqrt(square) if known[recipe] else None for recipe, (square, _) in by_recipe.items()},
        {recipe: float(share) if known[recipe] else None for recipe, (_, share) in by_recipe.items()},
      ]
    found.append(Fp8Operand(path, source_line(equation), name, tuple(shape), *figures))
  return found
