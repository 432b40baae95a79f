"""The reasons for autocast's decisions: a code for each, and the sentence that it is when it is printed."""

from __future__ import annotations

import enum


@enum.unique
class Code(enum.Enum):
  """Why an operation runs in its dtype. The value is the sentence; `{}` is what a decision tells about it."""

  # Calls and regions.
  ENTERED = "its body is entered"
  NO_PRODUCT = "no matrix product inside"
  CALL_AS_ONE = "{} runs as one"
  CALL_DENIED = "{} has operations that need float32"
  ENTERS_REGION = "it enters a half_precision region"
  LEAVES_REGION = "it leaves a half_precision region"
  REGION = "it is in a half_precision region"
  IN_REGION = "a {} in a half-precision region"
  AUTOCAST_INSIDE = "the autocast inside decides (policy {})"
  AUTOCAST_ENDS = "the end of an inner autocast"

  # The dtypes of the program.
  OWN_CAST = "the user's own cast"
  OWN_WIDENING = "the user's own cast to float32"
  FROM_INTEGERS = "from integers"
  SAME_DTYPE = "it changes no dtype"
  OWN_DTYPE = "it has operands in a dtype of the user's own"
  NO_FLOAT32 = "nothing in it is half precision"
  NOT_FLOATING = "its result is not floating-point"
  EACH_ALONE = "each operand as it comes"

  # The lists, and the policy.
  LISTED = "{}"
  LISTED_BY_USER = "the user's lists decide"
  MODULE = "its module's policy computes in float32"

  # Kernels.
  KERNEL = "a kernel: it stays in the dtypes of the program"
  KERNEL_IN_FLOAT32 = (
    "the kernel {} runs in float32: wrap the function that calls it, also one of another's module, as in "
    "module.function = mpjax.half_precision(module.function)"
  )

  # Products that keep float32.
  SUM_OF_PRODUCTS = "a sum of products, on no matrix unit: it accumulates as one"
  OUTER_PRODUCT = "an outer product, on no matrix unit: it contracts at most one element"
  STATES_PRECISION = "the program states its precision"
  POSITIONS = "its operands are positions, counts or constants: from no float input and no parameter"
  FILTER = "a filter: it multiplies data by a NumPy array that the program closes over, a constant"
  RECURRENCE = "a linear recurrence: each step multiplies the state by the same matrix, and roundings grow"
  SELECTION = "it selects or adds by positions or constants, and nothing reads it in half precision"
  FROM_ALGEBRA = "an operand comes from linear algebra, and only float32 reads it"
  FOR_ALGEBRA = "linear algebra reads it, and no operand is a weight"
  OF_EXACT = "the product that it is the derivative of keeps float32 operands"
  SOLVER = "the loop ends by a float that its products make: a solver"
  STATE_FILTER = "the state of the loop goes through linear algebra at each step: a filter"
  REPEATS_SOLVER = "the loop repeats the steps of a solver"

  # Products with half-precision operands and a float32 result.
  RESULT_FOR_ALGEBRA = "a product whose result linear algebra reads: that is float32"
  SMALL_RESULT = "a product whose result is small, and nothing reads it in half precision: that is float32"

  # Operations that follow their operands.
  HALF = "its operands are half precision"
  FIXED = "it has a dtype of the user's own"
  PINNED = "an operand was cast to float32 by the user, or is a gradient"
  RUNNING = "an operand is the memory of a loop's steps"
  STATISTIC = "an operand is a reduction's result"
  ISLAND = "it reads from an island"
  FLEXIBLE = "its operands come before any product"
  WIDE = "an operand may be outside the half-precision range"
  ORDER_ALONE = "nothing but an order is made of it"
  MEETS_DATA = "float32 data meets half precision, and float32 reads the result"
  GRADIENT_SUM = "it adds gradients of a parameter"
  ONLY_FLOAT32 = "only float32 reads it"

  # FP8.
  FP8 = "an FP8 product ({})"
  FP8_EXPERTS = "an FP8 product of experts ({}, under every recipe)"
  NO_UNITS = "not FP8: {} (emulate: true quantises anyway)"
  UNFIT = "not FP8: {}"  # the product's sizes or form, or a pattern of the recipe
  IN_RULE = "not FP8: it is inside a custom derivative rule, or recomputed in a backward pass"
  IN_BACKWARD = "not FP8: it is in the backward pass (fp8.backward=compute)"
  ATTENTION = "not FP8: it multiplies two activations (fp8.attention)"
  FIRST_LAYER = "not FP8: it is in the first layer (fp8.first_layer)"
  LAST_LAYER = "not FP8: it is in the last layer (fp8.last_layer)"
  LAST_LAYERS = "not FP8: it is among the last layers (fp8.keep_last={})"

  def sentence(self, about: str = "") -> str:
    """Returns the reason in words."""
    return self.value.format(about)


EXACT = frozenset(
  {
    Code.POSITIONS,
    Code.FILTER,
    Code.RECURRENCE,
    Code.SELECTION,
    Code.FROM_ALGEBRA,
    Code.FOR_ALGEBRA,
    Code.OF_EXACT,
  }
)
NOT_FP8 = frozenset(code for code in Code if code.value.startswith("not FP8: "))
