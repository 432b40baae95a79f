"""Matrix products of few bits: primitives, dimensions, batching, transposes, and lowering by platform.

`_half_products.py` multiplies half-precision operands, `_fp8_dot_general.py` FP8 operands,
`_block_products.py` blocks with a scale each, `_fp8_ragged_dot.py` the rows of experts.
`_dimensions.py` holds what they share, and only `_lowering.py` deals with compilers. The scaling of FP8
products is in `mpjax/fp8/`; `mpjax/casting/` chooses the products.
"""

from mpjax.products._amax_probe import GRADIENT, LHS, NOTHING, RHS, observe, spread
from mpjax.products._codes import InFp8, multiply_codes, takes_codes
from mpjax.products._dimensions import Sizes, sizes_of, unfit
from mpjax.products._fp8_dot_general import fp8_dot_general, multiply_dot
from mpjax.products._fp8_ragged_dot import (
  multiply_ragged,
  ragged_sizes,
  recipe_of_experts,
  why_not_fp8,
)
from mpjax.products._half_products import (
  bind_product,
  half_dot_general_p,
  half_product,
  half_ragged_dot_p,
  has_own_gradients,
)
from mpjax.products._lowering import lower_as
from mpjax.products._scaled_dot import scaled_dot
from mpjax.products._spec import Spec, spec_of
from mpjax.products._stand_ins import as_product, is_fp8, plain_primitive
