"""Matrix products of few bits: primitives, dimensions, batching, transposes, and lowering by platform.

`_half_products.py` multiplies half-precision operands, `_fp8_dot_general.py` FP8 operands, `_blocks.py`
blocks with a scale each, `_fp8_ragged_dot.py` the rows of experts. `_dimensions.py` holds what they share,
and only `_primitives.py` deals with compilers. The scaling of FP8 products is in `mpjax/fp8/`;
`mpjax/casting/` chooses the products.
"""

from mpjax.products._amax_probe import GRADIENT, LHS, NOTHING, RHS, observe, spread
from mpjax.products._dimensions import free_dims
from mpjax.products._fp8_dot_general import InFp8, multiply_codes, multiply_dot, takes_codes
from mpjax.products._fp8_ragged_dot import multiply_ragged, recipe_of_experts, why_not_fp8
from mpjax.products._functions import fp8_dot_general, scaled_dot
from mpjax.products._half_products import bind_product, half_product, has_own_gradients
from mpjax.products._primitives import as_product, is_fp8, lower_as, plain_primitive, return_first
from mpjax.products._spec import Spec
