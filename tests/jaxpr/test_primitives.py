"""The table of primitives: whole, of primitives that JAX has, and in agreement with PyTorch's and TensorFlow's lists."""

import pathlib
import re

import jax
import jax.custom_derivatives
import jax.extend.core.primitives
import numpy as np

import mpjax
from mpjax.jaxpr import UNKNOWN, PrimitiveFacts, Trait, _primitives, facts, has, register, rows

TABLE = dict(rows())
# mpjax's own primitives.
OWN = {"fp8_dot_general", "fp8_observe", "fp8_ragged_dot"}

# Those in the table that only some supported releases of JAX have.
OF_SOME_RELEASES = """
  dot_product_attention_bwd_wrapper dot_product_attention_fp8_bwd_wrapper dot_product_attention_fp8_fwd_wrapper
  dot_product_attention_fwd_wrapper log2 mulhi one_minus_square polynomial reduced_vary_cast relayout shard_alike
  stage unreduced_pmax unreduced_pmin vary_unreduced_cast"""

# Where autocast agrees with PyTorch's or TensorFlow's lists, or has a reason of its own not to.
DECISIONS = {  # (list, list in float16): primitives
  ("allow", "allow"): "dot_general conv_general_dilated ragged_dot_general",
  ("deny", "deny"): """
    acos asin cosh sinh tan erf_inv exp expm1 log log1p log2 pow integer_pow rsqrt reduce_sum reduce_prod cumsum
    cumprod atan2 scatter-add erf erfc logistic tanh reduce_window_sum reduce_max reduce_min
    select_and_scatter_add sort top_k""",
  ("infer", "deny"): "div rem sqrt",
  ("infer", "infer"): """
    add add_any sub mul reduce_window_max abs neg sign max min clamp select_n ceil floor round is_finite eq ne ge
    gt le lt argmax argmin broadcast_in_dim concatenate copy dynamic_slice gather pad reshape rev scatter
    slice split squeeze stack stop_gradient tile transpose zeros_like""",
  ("opaque", "opaque"): """
    dot_product_attention_fwd dot_product_attention_fwd_wrapper rnn_fwd rnn_bwd reduce_precision nextafter
    bitcast_convert_type pure_callback random_bits ffi_call pallas_call complex""",
}


def public_primitives():
  found = {}
  for module in (jax.lax, jax.lax.linalg, jax.extend.core.primitives, jax.custom_derivatives):
    found |= {v.name: v for v in vars(module).values() if isinstance(v, jax.extend.core.Primitive)}
  return found


def test_every_public_primitive_has_a_decision():
  public = public_primitives()
  missing = {name for name, primitive in public.items() if facts(primitive) is UNKNOWN}
  assert len(public) > 140
  assert missing <= {"dce_sink", "empty2", "remat_opt"}, (
    f"of JAX {jax.__version__}, not in _primitive_table.py"
  )


def test_every_name_in_the_table_is_one_of_a_primitive_of_jax():
  public = public_primitives()
  private = [name for name in TABLE if name not in public and name not in OWN]
  source = "".join(path.read_text() for path in pathlib.Path(jax.__file__).parent.rglob("*.py"))
  quoted = set(re.findall(r"""["']([\w-]+)["']""", source))
  missing = set(private) - quoted - set(OF_SOME_RELEASES.split())
  assert not missing, f"JAX {jax.__version__} has no primitives of these names: {missing}"


def test_decisions_are_those_of_other_frameworks_or_have_a_reason():
  for (listed, in_float16), names in DECISIONS.items():
    for name in names.split():
      row = TABLE[name]
      found = row.list_in(None), row.list_in(np.dtype("bfloat16")), row.list_in(np.dtype("float16"))
      assert found == (listed, listed, in_float16), name


def test_a_primitive_of_a_library_is_opaque_until_it_is_registered():
  mine = jax.extend.core.Primitive("mine_of_test_primitives")
  assert facts(mine) is UNKNOWN
  assert UNKNOWN.list == "opaque"
  register(mine, PrimitiveFacts("infer", "element-wise", traits=Trait.ELEMENTWISE))
  try:
    assert facts(mine).list == "infer"
    assert has(mine, Trait.ELEMENTWISE)
    assert not has(mine, Trait.MOVES)
    assert mine.name in mpjax.OpLists.default().infer
  finally:
    _primitives._ROWS.pop(mine.name)  # private, since nobody else takes a row away
