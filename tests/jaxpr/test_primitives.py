"""The table of primitives: whole, of primitives that JAX has, and in agreement with PyTorch's and TensorFlow's lists."""

import pathlib
import re

import jax
import jax.custom_derivatives
import jax.extend.core.primitives
import jax.numpy as jnp
import numpy as np
import pytest

import mpjax
from mpjax.jaxpr import LISTS, UNKNOWN, PrimitiveFacts, Trait, _primitives, facts, has, register, rows

TABLE = dict(rows())
# mpjax's own primitives.
OWN = {"fp8_dot_general", "fp8_observe", "fp8_observe_linear", "fp8_spread"}

# Those in the table that only some supported releases of JAX have.
OF_SOME_RELEASES = {
  "dot_product_attention_bwd_wrapper",
  "dot_product_attention_fp8_bwd_wrapper",
  "dot_product_attention_fp8_fwd_wrapper",
  "dot_product_attention_fwd_wrapper",
  "log2",
  "mulhi",
  "one_minus_square",
  "polynomial",
  "reduced_vary_cast",
  "relayout",
  "shard_alike",
  "stage",
  "unreduced_pmax",
  "unreduced_pmin",
  "vary_unreduced_cast",
}

# PyTorch's names of its lists: lower, fp32, fp32_set_opt_dtype and promote.
TORCH = {
  "dot_general": "matmul: lower",
  "conv_general_dilated": "convolution: lower",
  "dot_product_attention_fwd": "scaled_dot_product_attention: lower",
  "dot_product_attention_fwd_wrapper": "scaled_dot_product_attention: lower",
  "rnn_fwd": "lstm: lower",
  "acos": "acos: fp32",
  "asin": "asin: fp32",
  "cosh": "cosh: fp32",
  "sinh": "sinh: fp32",
  "tan": "tan: fp32",
  "erf_inv": "erfinv: fp32",
  "exp": "exp: fp32",
  "expm1": "expm1: fp32",
  "log": "log: fp32",
  "log1p": "log1p: fp32",
  "log2": "log2: fp32",
  "pow": "pow: fp32",
  "integer_pow": "pow: fp32",
  "rsqrt": "rsqrt: fp32",
  "reduce_sum": "sum: fp32_set_opt_dtype",
  "reduce_prod": "prod: fp32_set_opt_dtype",
  "cumsum": "cumsum: fp32_set_opt_dtype",
  "cumprod": "cumprod: fp32_set_opt_dtype",
  "atan2": "atan2: promote",
  "scatter": "index_put: promote",
  "scatter-add": "scatter_add: promote",
}

# TensorFlow's names of its lists: allow, infer, deny and clear.
TENSORFLOW = {
  "dot_general": "MatMul: allow",
  "conv_general_dilated": "Conv2D: allow",
  "rnn_fwd": "CudnnRNNV3: allow",
  "rnn_bwd": "CudnnRNNBackpropV3: allow",
  "exp": "Exp: deny",
  "expm1": "Expm1: deny",
  "pow": "Pow: deny",
  "integer_pow": "Pow: deny",
  "reduce_sum": "Sum: deny",
  "add": "AddV2: infer",
  "add_any": "AddN: infer",
  "sub": "Sub: infer",
  "mul": "Mul: infer",
  "div": "RealDiv: infer",
  "log": "Log: infer",
  "log1p": "Log1p: infer",
  "erf": "Erf: infer",
  "erfc": "Erfc: infer",
  "logistic": "Sigmoid: infer",
  "tanh": "Tanh: infer",
  "sqrt": "Sqrt: infer",
  "reduce_prod": "Prod: infer",
  "reduce_window_sum": "AvgPool: infer",
  "reduce_max": "Max: clear",
  "reduce_min": "Min: clear",
  "reduce_window_max": "MaxPool: clear",
  "select_and_scatter_add": "MaxPoolGrad: clear",
  "abs": "Abs: clear",
  "neg": "Neg: clear",
  "sign": "Sign: clear",
  "max": "Maximum: clear",
  "min": "Minimum: clear",
  "clamp": "ClipByValue: clear",
  "select_n": "SelectV2: clear",
  "ceil": "Ceil: clear",
  "floor": "Floor: clear",
  "round": "Round: clear",
  "is_finite": "IsFinite: clear",
  "eq": "Equal: clear",
  "ne": "NotEqual: clear",
  "ge": "GreaterEqual: clear",
  "gt": "Greater: clear",
  "le": "LessEqual: clear",
  "lt": "Less: clear",
  "argmax": "ArgMax: clear",
  "argmin": "ArgMin: clear",
  "top_k": "TopKV2: clear",
  "broadcast_in_dim": "BroadcastTo: clear",
  "concatenate": "ConcatV2: clear",
  "copy": "Identity: clear",
  "dynamic_slice": "Slice: clear",
  "gather": "GatherV2: clear",
  "pad": "PadV2: clear",
  "reshape": "Reshape: clear",
  "rev": "ReverseV2: clear",
  "slice": "StridedSlice: clear",
  "split": "SplitV: clear",
  "squeeze": "Squeeze: clear",
  "stack": "Pack: clear",
  "stop_gradient": "StopGradient: clear",
  "tile": "Tile: clear",
  "transpose": "Transpose: clear",
  "zeros_like": "ZerosLike: clear",
}

# PyTorch's CUDA autocast and a function of JAX that is one primitive: `lower` must be allow, the others float32.
TORCH_LOWER = {
  "mm": lambda x: jax.lax.dot(x, x),
  "bmm": lambda x: jnp.matmul(x[None], x[None]),
  "addmm": lambda x: x @ x,
  "einsum": lambda x: jnp.einsum("ij,kj->ik", x, x),
  "linalg_vecdot": lambda x: jnp.vecdot(x, x),
  "conv1d": lambda x: jax.lax.conv(x[None], x[None], (1,), "SAME"),
  "conv2d": lambda x: jax.lax.conv(x[None, None], x[None, None], (1, 1), "SAME"),
  "conv3d": lambda x: jax.lax.conv(x[None, None, None], x[None, None, None], (1, 1, 1), "SAME"),
  "conv_transpose2d": lambda x: jax.lax.conv_transpose(x[None, None], x[None, None], (2, 2), "SAME"),
}
TORCH_FLOAT32 = {
  "acos": jax.lax.acos,
  "asin": jax.lax.asin,
  "cosh": jax.lax.cosh,
  "erfinv": jax.lax.erf_inv,
  "exp": jax.lax.exp,
  "expm1": jax.lax.expm1,
  "log": jax.lax.log,
  "log10": jnp.log10,
  "log1p": jax.lax.log1p,
  "log2": jnp.log2,
  "logsumexp": jax.nn.logsumexp,
  "pow": lambda x: jax.lax.pow(x, x),
  "rsqrt": jax.lax.rsqrt,
  "sinh": jax.lax.sinh,
  "softplus": jax.nn.softplus,
  "tan": jax.lax.tan,
  "cumprod": jax.lax.cumprod,
  "cumsum": jax.lax.cumsum,
  "linalg_vector_norm": jnp.linalg.norm,
  "log_softmax": jax.nn.log_softmax,
  "prod": jnp.prod,
  "softmax": jax.nn.softmax,
  "sum": jnp.sum,
}
TENSORFLOW_ALLOW = {
  "MatMul": lambda x: x @ x,
  "BatchMatMulV2": lambda x: jnp.matmul(x[None], x[None]),
  "Einsum": lambda x: jnp.einsum("ij,jk->ik", x, x),
  "Conv2D": lambda x: jax.lax.conv(x[None, None], x[None, None], (1, 1), "SAME"),
  "Conv2DBackpropFilter": jax.grad(
    lambda x: jnp.sum(jax.lax.conv(jnp.ones((1, 1, 4, 4)), x[None, None], (1, 1), "SAME"))
  ),
  "Conv3D": lambda x: jax.lax.conv(x[None, None, None], x[None, None, None], (1, 1, 1), "SAME"),
}
TENSORFLOW_DENY = {
  "Exp": jnp.exp,
  "Expm1": jnp.expm1,
  "L2Loss": lambda x: jnp.sum(x * x),
  "Mean": jnp.mean,
  "Pow": lambda x: jnp.power(x, x),
  "Sum": jnp.sum,
}


def public_primitives() -> dict[str, jax.extend.core.Primitive]:
  found = {}
  for module in (jax.lax, jax.lax.linalg, jax.extend.core.primitives, jax.custom_derivatives):
    found |= {v.name: v for v in vars(module).values() if isinstance(v, jax.extend.core.Primitive)}
  return found


def test_every_public_primitive_of_jax_lax_has_a_decision():
  known = {
    name for name in dir(jax.lax) if name.endswith("_p") and facts(getattr(jax.lax, name)) is not UNKNOWN
  }
  missing = {name for name in dir(jax.lax) if name.endswith("_p")} - known - {"dce_sink_p"}
  assert len(known) > 140
  assert not missing, f"JAX {jax.__version__} has primitives without a row in _primitive_table.py: {missing}"


def test_every_name_in_the_table_is_one_of_a_primitive_of_jax():
  public = public_primitives()
  private = [name for name in TABLE if name not in public and name not in OWN]
  source = "".join(path.read_text() for path in pathlib.Path(jax.__file__).parent.rglob("*.py"))
  quoted = set(re.findall(r"""["']([\w-]+)["']""", source))
  missing = set(private) - quoted - OF_SOME_RELEASES
  assert not missing, f"JAX {jax.__version__} has no primitives of these names: {missing}"


def test_a_primitive_with_a_public_name_stands_in_the_table_by_itself():
  public = public_primitives()
  by_name = {name for name, primitive in public.items() if facts(primitive) is UNKNOWN}
  assert by_name <= {"dce_sink", "empty2", "remat_opt"}
  for name, primitive in public.items():
    namesake = jax.extend.core.Primitive(name)
    if name not in by_name and name != "eval_jaxpr":
      assert facts(namesake) is UNKNOWN, f"{name}: the row is found by name, which a library may give another"
      assert facts(primitive) is not UNKNOWN


@pytest.mark.parametrize("name", TABLE)
def test_a_row_is_complete(name):
  row = TABLE[name]
  assert row.list in LISTS
  assert row.reason.strip()
  assert len(row.reason) < 90
  assert row.float16 in ("", "deny")
  assert row.float16 == "" or row.list == "infer"
  assert not (row.recompute and row.list in ("allow", "opaque", "call"))
  assert row.call is not None or row.list != "call"


def test_what_keeps_the_bytes_keeps_the_elements():
  for name, row in TABLE.items():
    alone = row.traits & (Trait.ALIAS | Trait.EACH) == Trait.ALIAS
    assert not alone or Trait.SAME_WEIGHT in row.traits, name
    assert Trait.SAME_WEIGHT not in row.traits or Trait.PASSES_ON in row.traits, name


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
    with pytest.raises(ValueError, match="another row"):
      register(mine, PrimitiveFacts("deny", "sums"))
  finally:
    _primitives._ROWS.pop(mine.name)


@pytest.mark.parametrize(
  ("row", "message"),
  [
    ({"list": "half"}, "unknown list 'half': expected one of allow"),
    ({"list": "infer", "float16": "nonsense"}, "float16='nonsense' with list='infer': expected 'deny'"),
    ({"list": "opaque", "float16": "deny"}, "float16='deny' with list='opaque'"),
    ({"list": "call"}, "list='call' without call: expected a CallKind"),
  ],
)
def test_a_row_that_nothing_can_act_on_is_refused(row, message):
  with pytest.raises(ValueError, match=message):
    PrimitiveFacts(reason="of a test", **row)


@pytest.mark.parametrize("name", ["tanh", "pin"])
def test_a_library_registers_no_primitive_under_a_name_of_the_table(name):
  for row in (PrimitiveFacts("infer", "element-wise"), TABLE[name]):
    with pytest.raises(ValueError, match=f"{name}: the table has a row for another primitive of this name"):
      register(jax.extend.core.Primitive(name), row)
  assert facts(jax.lax.tanh_p).list == "deny"
  mpjax.OpLists.default()


@pytest.mark.parametrize("name", TABLE)
def test_a_primitive_of_a_library_has_no_row_by_its_name(name):
  assert facts(jax.extend.core.Primitive(name)) is UNKNOWN


def test_a_row_by_name_is_of_the_primitive_that_jax_has():
  of_keys = primitives_in(lambda x: jax.random.key_data(jax.random.key(0)))
  assert "random_unwrap" in {primitive.name for primitive in of_keys}
  assert UNKNOWN not in map(facts, of_keys)


def test_every_counterpart_belongs_to_a_row_and_names_its_list():
  for counterparts, lists in (
    (TORCH, {"lower", "fp32", "fp32_set_opt_dtype", "promote"}),
    (TENSORFLOW, {"allow", "infer", "deny", "clear"}),
  ):
    assert set(counterparts) <= set(TABLE)
    assert {counterpart.split(": ")[1] for counterpart in counterparts.values()} == lists


@pytest.mark.parametrize(
  "fun",
  [pytest.param(f, id=f"torch-{name}") for name, f in TORCH_LOWER.items()]
  + [pytest.param(f, id=f"tensorflow-{name}") for name, f in TENSORFLOW_ALLOW.items()],
)
def test_what_others_run_in_half_precision_is_allowed(fun):
  assert "allow" in {facts(primitive).list for primitive in primitives_in(fun)}


@pytest.mark.parametrize(
  "fun",
  [pytest.param(f, id=f"torch-{name}") for name, f in TORCH_FLOAT32.items()]
  + [pytest.param(f, id=f"tensorflow-{name}") for name, f in TENSORFLOW_DENY.items()],
)
def test_what_others_run_in_float32_has_its_critical_part_denied(fun):
  assert "deny" in {facts(primitive).list for primitive in primitives_in(fun)}


@pytest.mark.parametrize(
  "fun", [lambda x: jax.lax.rem(x, 2.0), jnp.sqrt, lambda x: 1.0 / x], ids=["rem", "sqrt", "inv"]
)
def test_what_others_run_in_float32_for_its_range_is_denied_in_float16_only(fun):
  rows = [facts(primitive) for primitive in primitives_in(fun)]
  assert any(row.list == "infer" and row.float16 == "deny" for row in rows)


@pytest.mark.parametrize(
  "fun",
  [
    jax.nn.relu,
    jnp.transpose,
    lambda x: x + x,
    lambda x: jnp.where(x > 0, x, -x),
    lambda x: jnp.concatenate([x, x])[1:3],
    lambda x: x.at[0].set(1.0),
    lambda x: jnp.pad(x, 1),
    lambda x: x[jnp.array([0, 1])],
    lambda x: jax.lax.top_k(x, 2),
  ],
)
def test_what_loses_nothing_follows_its_operands_in_every_dtype(fun):
  found = primitives_in(fun)
  assert {(facts(primitive).list, facts(primitive).float16) for primitive in found} == {("infer", "")}


@pytest.mark.parametrize(
  "fun",
  [
    lambda x: jax.lax.reduce_precision(x, 5, 10),
    lambda x: jax.lax.bitcast_convert_type(x, jnp.int32),
    lambda x: jnp.nextafter(x, x),
    lambda x: jax.pure_callback(np.sin, x, x),
    lambda x: jax.random.bits(jax.random.key(0), x.shape),
    lambda x: jax.ffi.ffi_call("some_target", x)(x),
    lambda x: jax.lax.complex(x, x),
  ],
)
def test_what_depends_on_its_dtype_is_left_alone(fun):
  assert "opaque" in {facts(primitive).list for primitive in primitives_in(fun)}
  assert not {"allow", "deny"} & {facts(primitive).list for primitive in primitives_in(fun)}


def primitives_in(fun) -> set[jax.extend.core.Primitive]:
  """The primitives that `fun` of a f32[4, 4] traces to, with the bodies of higher-order ones, without these."""
  found = set()

  def collect(jaxpr):
    for eqn in jaxpr.eqns:
      bodies = [
        getattr(body, "jaxpr", body)
        for value in eqn.params.values()
        for body in (value if isinstance(value, tuple | list) else [value])
        if hasattr(getattr(body, "jaxpr", body), "eqns")
      ]
      if facts(eqn).list == "call":
        for body in bodies:
          collect(body)
      else:
        found.add(eqn.primitive)

  collect(jax.make_jaxpr(fun)(jnp.ones((4, 4), jnp.float32)).jaxpr)
  return found
