"""`fp8_dot_general`: a bilinear primitive with FP8 operands, in the forward and both backward products.

As a primitive it is differentiated like `dot_general` (forward and reverse, to any order). The platform
that it is lowered for decides whether FP8 units or wider ones multiply; the numbers are the same.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import ad, batching

from mpjax import _compat
from mpjax._types import DTypeLike
from mpjax.fp8 import Recipe
from mpjax.fp8._hardware import on_device
from mpjax.fp8._recipe import RecipeLike, parse_recipe
from mpjax.fp8._saved_operands import not_differentiable
from mpjax.fp8._scaling import quantise, scale_of
from mpjax.jaxpr import PrimitiveFacts, Trait, register
from mpjax.products._amax_probe import batch_size, to_front
from mpjax.products._block_products import multiply_blocks, require_whole_blocks
from mpjax.products._dimensions import Dims, batched_product, gradient_product, sum_of_tangents
from mpjax.products._half_products import half_dot_general_p
from mpjax.products._lowering import compute_by_platform
from mpjax.products._member_scales import Scales, amax_within, members_of_result, with_dimension
from mpjax.products._spec import ACTIVATION, GRADIENT, UNKNOWN, WEIGHT, Spec, require_wide, spec_of

_LARGEST = 2.0**127  # also of bfloat16


def fp8_dot_general(
  lhs: Array,
  rhs: Array,
  dimension_numbers: jax.lax.DotDimensionNumbers,
  recipe: RecipeLike = "current",
  *,
  scales: tuple[Array, Array, Array] | None = None,
  out_dtype: DTypeLike | None = None,
  gradient_operand: tuple[bool, bool] = (False, False),
  weight_operand: tuple[bool, bool] = (False, True),
  native: bool | None = None,
) -> Array:
  """Computes `jax.lax.dot_general` with FP8 operands and float32 accumulation, forward and backward.

  ```python
  y = mpjax.fp8_dot_general(x, params["body"]["kernel"], (((1,), (0,)), ((), ())))
  ```

  Operands are scaled, saturated and rounded to `recipe.forward_dtype`, incoming gradients to
  `recipe.gradient_dtype`. Scaling the result back is exact to float32 if the product of the two amaxes is
  between 1e-31 and 1e43; below, the result is zero.

  Args:
    lhs: floating, any shape.
    rhs: floating.
    dimension_numbers: see `jax.lax.dot_general`.
    recipe: a `Recipe`, its mapping or its name; `delayed` needs `scales`; `auto` is this device's.
    scales: float32[] for lhs, rhs and the gradient; `None`: from the tensors. For `delayed` they are powers
      of two.
    out_dtype: dtype of the result; `None`: that of lhs.
    gradient_operand: which operands are gradients themselves.
    weight_operand: which operands are weights, which `nvfp4` quantises in squares.
    native: whether FP8 units multiply; `None`: if the platform has them.

  Returns:
    [batch, lhs free, rhs free] in `out_dtype`.

  Raises:
    ValueError: for an invalid recipe, a delayed one without scales, scales for blocks or of another shape,
      operands that are not floating, or a contracted dimension that is not a multiple of its blocks.
  """
  lhs, rhs = jnp.asarray(lhs), jnp.asarray(rhs)
  require_wide("fp8_dot_general", lhs=lhs.dtype, rhs=rhs.dtype)
  parsed = on_device(parse_recipe(recipe) or Recipe())
  if parsed.recipe == "delayed" and scales is None:
    raise ValueError("recipe 'delayed' takes its scales from earlier steps: pass scales=, or use 'current'")
  out = np.dtype(lhs.dtype if out_dtype is None else out_dtype)
  lhs_role, rhs_role = (
    GRADIENT if gradient else WEIGHT if weight else ACTIVATION
    for gradient, weight in zip(gradient_operand, weight_operand, strict=True)
  )
  spec = spec_of(parsed, (lhs_role, rhs_role), (scales is not None,) * 3, out, native)
  one = jnp.ones([], jnp.float32)
  factors = (one, one, one) if scales is None else tuple(jnp.asarray(x, jnp.float32) for x in scales)
  if scales is not None and spec.in_blocks:
    raise ValueError(
      f"recipe {parsed.recipe!r} has a scale for each block: leave out scales=, or use 'current'"
    )
  if tuple(x.shape for x in factors) != ((), (), ()):
    raise ValueError(
      f"fp8_dot_general: scales of shapes {[x.shape for x in factors]}, expected three numbers: for lhs, rhs "
      "and the gradient"
    )
  if scales is not None and parsed.recipe != "delayed":  # they may be any numbers
    spec = dataclasses.replace(spec, pow2=False)
  return bind(lhs, rhs, factors, dimension_numbers, spec)


def bind(
  lhs: Array, rhs: Array, scales: Sequence[Array], dimension_numbers: jax.lax.DotDimensionNumbers, spec: Spec
) -> Array:
  """Applies the primitive to operands that may vary over different axes of a mesh."""
  contracted, batch = dimension_numbers
  dims = tuple(tuple(tuple(int(i) for i in part) for part in pair) for pair in (contracted, batch))
  lhs, rhs = _compat.vary_like(lhs, rhs), _compat.vary_like(rhs, lhs)
  return fp8_dot_general_p.bind(lhs, rhs, *scales, dimension_numbers=dims, spec=spec)


fp8_dot_general_p = Primitive("fp8_dot_general")
register(
  fp8_dot_general_p,
  PrimitiveFacts(
    "opaque",
    "an FP8 product, whose operands are quantised already",
    recompute=False,
    traits=Trait.PRODUCT | Trait.READS_STORED,
  ),
)


def _abstract(
  lhs: ShapedArray, rhs: ShapedArray, *_: ShapedArray, dimension_numbers: Dims, spec: Spec
) -> ShapedArray:
  if spec.in_blocks:
    require_whole_blocks(lhs, rhs, dimension_numbers, spec)
  # The type of a product in the dtype of the result, so that shardings and varying axes are right.
  return _compat.product_type(
    jax.lax.dot_general_p,
    lhs.update(dtype=spec.out_dtype, weak_type=False),
    rhs.update(dtype=spec.out_dtype, weak_type=False),
    dimension_numbers=dimension_numbers,
    precision=None,
    preferred_element_type=spec.out_dtype,
    out_sharding=spec.out_sharding,
  )


def _compute(
  lhs: Array,
  rhs: Array,
  *scales: Array,
  dimension_numbers: Dims,
  spec: Spec,
  units: tuple[DTypeLike | None, DTypeLike | None],
) -> Array:
  """Computes the product; `units` as in `_UNITS`."""
  multiplied_in = units[spec.in_blocks]
  if spec.native is not None:
    multiplied_in = None if spec.native else multiplied_in or jnp.bfloat16
  if spec.in_blocks:
    kind = _abstract(*map(jax.typeof, (lhs, rhs)), dimension_numbers=dimension_numbers, spec=spec)
    spec = dataclasses.replace(spec, out_sharding=None)
    fun = functools.partial(multiply_blocks, dims=dimension_numbers, spec=spec, units=multiplied_in)
    return _compat.with_auto_axes(fun, kind)(lhs, rhs)
  own: Sequence[Array] = scales
  if any(i in spec.members[side] for side in (0, 1) for i in dimension_numbers[0][side]):
    own, spec = _levelled(lhs, rhs, scales, dimension_numbers, spec)
  (lhs, lhs_scale), (rhs, rhs_scale) = (
    quantised(x, own, side, spec, dimension_numbers) for side, x in enumerate((lhs, rhs))
  )
  if multiplied_in is not None:  # bfloat16 holds every FP8 number
    lhs, rhs = lhs.astype(multiplied_in), rhs.astype(multiplied_in)
  # What is not scaled back yet overflows in float16.
  wide = np.dtype(np.float32) if spec.out_dtype == np.float16 else spec.out_dtype
  out = jax.lax.dot_general(
    lhs, rhs, dimension_numbers, preferred_element_type=wide, out_sharding=spec.out_sharding
  )
  if lhs_scale.ndim or rhs_scale.ndim:
    product = Scales((lhs_scale, rhs_scale), dimension_numbers, (lhs.ndim, rhs.ndim)).of_result()
  else:
    product = lhs_scale * rhs_scale
  unit = jnp.minimum(1 / product, _LARGEST)
  # A power of two, in the dtype of the product, is exact, and XLA for GPU fuses it with the product.
  of = wide if spec.pow2 else np.dtype(np.float32)
  return (out.astype(of) * unit.astype(of).reshape(unit.shape or (1,) * out.ndim)).astype(spec.out_dtype)


def quantised(x: Array, scales: Sequence[Array], side: int, spec: Spec, dims: Dims) -> tuple[Array, Array]:
  """Returns an operand in FP8 (it may be in FP8 already) and its scale."""
  scale, dtype = scales[side], (spec.lhs_dtype, spec.rhs_dtype)[side]
  if x.dtype.itemsize == 1:  # a backward product may have another format
    return x.astype(dtype), scale
  if not spec.given[side]:
    alone = spec.members[side]
    if spec.scheme == "channel":  # values that are not summed together have scales of their own
      alone = tuple(i for i in range(x.ndim) if i not in dims[0][side])
    scale = scale_of(amax_within(x, alone), dtype, spec.margin, spec.pow2)
  return quantise(x, scale, dtype), scale


def _levelled(
  lhs: Array, rhs: Array, scales: Sequence[Array], dims: Dims, spec: Spec
) -> tuple[list[Array], Spec]:
  """Returns scales with one factor that can be taken out of a sum over members."""
  operands, formats = (lhs, rhs), (spec.lhs_dtype, spec.rhs_dtype)
  fixed = [spec.given[side] or x.dtype.itemsize == 1 for side, x in enumerate(operands)]
  own = [
    scales[side]
    if fixed[side]
    else scale_of(amax_within(x, spec.members[side]), formats[side], spec.margin, spec.pow2)
    for side, x in enumerate(operands)
  ]
  both = Scales(own, dims, (lhs.ndim, rhs.ndim))
  if not both.are_equal:
    # The gradient's scale first: its format has more binades below.
    sides = sorted((0, 1), key=lambda side: formats[side] != spec.gradient_dtype)
    both.level([side for side in sides if not fixed[side]])
  levelled = [both.of_operand(0), both.of_operand(1), *scales[2:]]
  return levelled, dataclasses.replace(spec, given=(True, True, spec.given[2]))


def jvp(
  primals: Sequence[Array], tangents: Sequence[Array | ad.Zero], *, dimension_numbers: Dims, spec: Spec
) -> tuple[Array, Array | ad.Zero]:
  """Returns a product and its tangent, like the rule of the primitive."""
  lhs, rhs, *scales = primals
  if spec.saved:
    lhs, rhs, scales, spec = _saved(lhs, rhs, scales, spec, dimension_numbers)
  bind = functools.partial(fp8_dot_general_p.bind, dimension_numbers=dimension_numbers)
  out = bind(lhs, rhs, *scales, spec=spec)

  def term(side: int, lhs: Array, rhs: Array) -> Array:
    changes: dict[str, Any] = {
      "given": tuple(is_given and i != side for i, is_given in enumerate(spec.given))
    }
    if spec.roles[side] != UNKNOWN:
      changes["roles"] = tuple(GRADIENT if i == side else role for i, role in enumerate(spec.roles))
    return bind(lhs, rhs, *scales, spec=dataclasses.replace(spec.with_gradient(side), **changes, saved=False))

  def wider_term(side: int, lhs: Array, rhs: Array) -> Array:
    operands = [
      x if i == side else _widened(x, scale, spec.out_dtype)
      for i, (x, scale) in enumerate(zip((lhs, rhs), scales, strict=False))
    ]
    return half_dot_general_p.bind(
      *operands,
      originals=(),
      dimension_numbers=dimension_numbers,
      precision=None,
      preferred_element_type=spec.out_dtype,
      out_sharding=spec.out_sharding,
    )

  of = term if spec.backward else wider_term
  return out, sum_of_tangents(out, (lhs, rhs), enumerate(tangents[:2]), of)


def _widened(x: Array, scale: Array, dtype: np.dtype) -> Array:
  """Returns an operand in a wider dtype; `scale` is that of one in FP8."""
  if x.dtype.itemsize > 1:
    return x.astype(dtype)
  return (x.astype(jnp.float32) / scale.reshape(scale.shape + (1,) * (x.ndim - scale.ndim))).astype(dtype)


def _saved(
  lhs: Array, rhs: Array, scales: Sequence[Array], spec: Spec, dims: Dims
) -> tuple[Array, Array, list[Array], Spec]:
  """Quantises the operands before they are differentiated, so that the backward pass keeps them in FP8."""
  lhs, lhs_scale = quantised(not_differentiable(lhs), scales, 0, spec, dims)
  rhs, rhs_scale = quantised(not_differentiable(rhs), scales, 1, spec, dims)
  spec = dataclasses.replace(spec, given=(True, True, spec.given[2]), saved=False)
  return lhs, rhs, [lhs_scale, rhs_scale, scales[2]], spec


def _transpose(
  ct: Array | ad.Zero,
  lhs: Array | ad.UndefinedPrimal,
  rhs: Array | ad.UndefinedPrimal,
  *scales: Array,
  dimension_numbers: Dims,
  spec: Spec,
) -> list[Array | None]:
  nothing = [None] * len(scales)
  if isinstance(ct, ad.Zero):
    return [None, None, *nothing]
  of_lhs = isinstance(lhs, ad.UndefinedPrimal)
  like, other = (lhs.aval, rhs) if isinstance(lhs, ad.UndefinedPrimal) else (cast(Any, rhs).aval, lhs)
  ndim = cast(Array, other).ndim
  product = gradient_product(like, ndim, dimension_numbers, 1 - of_lhs, cotangent_first=of_lhs)
  # The gradient is the left operand for lhs and the right one for rhs, so that E4M3 and E5M2 always meet.
  operands = (ct, rhs) if of_lhs else (lhs, ct)
  first, second = (2, 1) if of_lhs else (0, 2)
  ndims = (like.ndim, ndim) if of_lhs else (ndim, like.ndim)
  of_gradient = GRADIENT if spec.roles != (UNKNOWN, UNKNOWN) else UNKNOWN
  of_ct = members_of_result(spec.members, dimension_numbers, ndims)
  backward = dataclasses.replace(
    spec.with_gradient(1 - of_lhs),
    roles=(of_gradient, spec.roles[1]) if of_lhs else (spec.roles[0], of_gradient),
    # A gradient of a gradient differs from the values in the history.
    given=(spec.given[first], spec.given[second], False),
    members=(of_ct, spec.members[1]) if of_lhs else (spec.members[0], of_ct),
    out_dtype=like.dtype if like.dtype.itemsize > 1 else spec.out_dtype,  # float32 for a master weight
    out_sharding=product.out_sharding,
  )
  out = fp8_dot_general_p.bind(
    *operands, scales[first], scales[second], scales[2], dimension_numbers=product.dims, spec=backward
  )
  out = product.in_layout(out)
  return [out, None, *nothing] if of_lhs else [None, out, *nothing]


def _batch(
  axis_data: Any,
  operands: Sequence[Array],
  axes: Sequence[int | None],
  *,
  dimension_numbers: Dims,
  spec: Spec,
) -> tuple[Array, int | None]:
  lhs, rhs, *scales = operands
  lhs_axis, rhs_axis, *scale_axes = axes
  members = spec.members
  mapped = any(axis is not None for axis in axes)
  if mapped and any(scale.ndim or axis is not None for scale, axis in zip(scales, scale_axes, strict=True)):
    size = batch_size(operands, axes)  # each member has its own scales
    lhs, rhs = to_front(lhs, lhs_axis, size), to_front(rhs, rhs_axis, size)
    scales = [to_front(scale, axis, size) for scale, axis in zip(scales, scale_axes, strict=True)]
    lhs_axis = rhs_axis = 0
  if spec.scheme == "nvfp4":  # the rows of a square are those of one member
    lhs, lhs_axis = (lhs, None) if lhs_axis is None else (jnp.moveaxis(lhs, lhs_axis, 0), 0)
    rhs, rhs_axis = (rhs, None) if rhs_axis is None else (jnp.moveaxis(rhs, rhs_axis, 0), 0)
  dims, axis, sharding = batched_product(
    (lhs.ndim, rhs.ndim), (lhs_axis, rhs_axis), dimension_numbers, spec.out_sharding, axis_data
  )
  if spec.scheme in ("tensor", "nvfp4"):  # a channel or a block of `mx` belongs to one member
    members = (with_dimension(members[0], lhs_axis), with_dimension(members[1], rhs_axis))
  spec = dataclasses.replace(spec, members=members, out_sharding=sharding)
  return fp8_dot_general_p.bind(lhs, rhs, *scales, dimension_numbers=dims, spec=spec), axis


# The dtypes in which a platform multiplies FP8 numbers, and what blocks stand for; `None`: in the format.
# XLA for CPU does not have a bfloat16 kernel for some layouts. XLA for TPU widens a format that the TPU
# does not have, and blocks in passes of their own.
_UNITS = {
  None: (jnp.bfloat16, jnp.bfloat16),
  "cpu": (jnp.float32, jnp.float32),
  "cuda": (None, None),
  "rocm": (None, jnp.bfloat16),
  "tpu": (None, jnp.bfloat16),
}
compute_by_platform(
  fp8_dot_general_p, {name: functools.partial(_compute, units=u) for name, u in _UNITS.items()}
)
fp8_dot_general_p.def_abstract_eval(_abstract)
ad.primitive_jvps[fp8_dot_general_p] = jvp
ad.primitive_transposes[fp8_dot_general_p] = _transpose
batching.fancy_primitive_batchers[fp8_dot_general_p] = _batch
