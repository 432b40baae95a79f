"""What primitives do with their operands, as far as casts and islands depend on it: sets of names."""


def _names(text: str) -> frozenset[str]:
  return frozenset(text.split())


# Results that lie elsewhere in memory than their operands, so that a cast before them is not free.
MOVES = _names(
  """all_gather all_to_all concatenate cummax cummin dynamic_slice dynamic_update_slice gather pad ppermute
  reduce_window_max reduce_window_min scatter sort split stack top_k"""
)
# Through these a value reaches a matrix product as it is.
VIEWS = _names(
  """broadcast_in_dim concatenate convert_element_type copy dynamic_slice gather name pad reshape rev
  sharding_constraint slice split squeeze stop_gradient transpose"""
)
# A weight is the same weight behind these.
SAME = _names(
  """broadcast_in_dim convert_element_type copy reshape sharding_constraint squeeze stop_gradient transpose"""
)
# The gradient of a sum or a choice needs none of its operands: the result is the smaller thing to save.
SUMS = _names("add add_any clamp concatenate max min select_n sub")
# Nothing of these needs saving for the backward pass, so that there is nothing to compute again.
LINEAR = _names(
  """add add_any broadcast_in_dim concatenate convert_element_type copy name neg reduce_sum reshape rev
  select_n sharding_constraint slice squeeze stop_gradient sub transpose"""
)
# Each operand has a result of its own.
EACH = _names("all_gather device_put optimization_barrier pcast ppermute pvary sort tie")
# Operands of a lesser shape are broadcast by the primitive itself.
BROADCASTING = _names("add add_any atan2 div max min mul pow rem sub")
# These turn an absolute error into a relative one.
EXPONENTIALS = _names("exp exp2 expm1 log log1p log2 pow sinh cosh")
# Their results may be far larger than their operands.
EXPANDS = _names(
  """cosh cumprod cumsum div exp exp2 expm1 integer_pow pow reciprocal reduce_window_sum rsqrt scatter-add
  scatter-mul sinh square tan"""
)
# On its way through these a value decays or grows.
SCALES = _names("div mul")
