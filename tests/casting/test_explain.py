"""`mpjax.explain`: what would run where, as data and as a table, without computing anything."""

from __future__ import annotations

import io

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rich.console
from flax import nnx
from jax.experimental import pallas as pl

import mpjax
from mpjax.casting import print_explanations
from tests.casting._conformance import normal
from tests.casting._jaxprs import PRODUCTS, equations, named

W = jnp.asarray(normal(4, 4, scale=0.5))
X = jnp.asarray(normal(8, 4, seed=1))


def network(w, x):
  with jax.named_scope("net"):
    with jax.named_scope("attention"):
      x = jax.nn.softmax(x @ w)
    with jax.named_scope("head"):
      return jnp.sum(x @ w)


def explained(fun, *args, policy="bf16", **options):
  return mpjax.explain(fun, policy, **options)(*args)


def only(explanation, primitive):
  (row,) = (row for row in explanation.rows if row.primitive == primitive)
  return row


shape = lambda *dims: jax.ShapeDtypeStruct(dims, np.float32)
conv = lambda x, k, **options: jax.lax.conv_general_dilated(
  x, k, padding="VALID", dimension_numbers=("NHWC", "HWIO", "NHWC"), **options
)
FLOPS = {  # (function, arguments, FLOPs by hand: two for each multiplication and addition)
  "matrix": (jnp.matmul, (shape(3, 5), shape(5, 7)), 2 * 3 * 5 * 7),
  "vector": (jnp.dot, (shape(5), shape(5)), 2 * 5),
  "batched": (jnp.matmul, (shape(2, 3, 5), shape(2, 5, 7)), 2 * 2 * 3 * 5 * 7),
  "einsum": (lambda a, b: jnp.einsum("bthd,bshd->bhts", a, b), (shape(2, 3, 4, 5),) * 2, 2 * 2 * 4 * 3 * 3 * 5),
  "convolution": (
    lambda x, k: conv(x, k, window_strides=(1, 1)),
    (shape(2, 6, 7, 3), shape(3, 2, 3, 5)),
    2 * (2 * 4 * 6 * 5) * (3 * 2 * 3),
  ),
  "strided": (
    lambda x, k: conv(x, k, window_strides=(2, 2)),
    (shape(2, 7, 7, 3), shape(3, 3, 3, 5)),
    2 * (2 * 3 * 3 * 5) * (3 * 3 * 3),
  ),
  "depthwise": (
    lambda x, k: conv(x, k, window_strides=(1, 1), feature_group_count=4),
    (shape(1, 5, 5, 4), shape(3, 3, 1, 4)),
    2 * (3 * 3 * 4) * (3 * 3),
  ),
  "ragged": (
    lambda x, w: jax.lax.ragged_dot(x, w, jnp.array([4, 0, 2], jnp.int32)),
    (shape(6, 5), shape(3, 5, 7)),
    2 * 6 * 5 * 7,
  ),
  "scan": (
    lambda x, w: jax.lax.scan(lambda c, _: (jnp.tanh(c @ w), None), x, None, length=11)[0],
    (shape(3, 5), shape(5, 5)),
    11 * 2 * 3 * 5 * 5,
  ),
  "scan in scan": (
    lambda x, w: jax.lax.scan(
      lambda c, _: (jax.lax.scan(lambda c, _: (c @ w, None), c, None, length=2)[0], None), x, None, length=3
    )[0],
    (shape(3, 5), shape(5, 5)),
    2 * 3 * 2 * 3 * 5 * 5,
  ),
  "vmap": (jax.vmap(jnp.matmul, (0, None)), (shape(2, 3, 5), shape(5, 7)), 2 * 2 * 3 * 5 * 7),
  "jit, checkpoint, custom_jvp": (
    jax.jit(jax.checkpoint(lambda a, b: jax.nn.relu(a @ b))),
    (shape(3, 5), shape(5, 7)),
    2 * 3 * 5 * 7,
  ),
  "backward": (
    jax.grad(lambda w, x: jnp.sum((x @ w) ** 2), (0, 1)),
    (shape(5, 7), shape(3, 5)),
    3 * 2 * 3 * 5 * 7,
  ),
  "none": (jnp.exp, (shape(3, 5),), 0),
}  # fmt: skip


@pytest.mark.parametrize("policy", ["bf16", "fp32"])
@pytest.mark.parametrize("name", FLOPS)
def test_flops_are_those_by_hand(name, policy):
  fun, args, want = FLOPS[name]
  explanation = explained(fun, *args, policy=policy)
  assert sum(row.flops for row in explanation.rows) == want
  dtype = "bfloat16" if policy == "bf16" and name != "vector" else "float32"  # no matrix unit sums a vector
  assert explanation.matrix_flops() == ({dtype: want} if want else {})


def test_a_row_for_each_operation_in_the_order_of_the_program():
  explanation = explained(network, W, X)
  calls = ("jit", "custom_jvp_call")
  want = [e.primitive.name for e in equations(network, W, X) if e.primitive.name not in calls]
  assert [row.primitive for row in explanation.rows] == want


ROWS = {  # primitive: path, list, before, after
  "dot_general": ("net/attention", "allow", "float32", "bfloat16"),
  "exp": ("net/attention", "deny", "float32", "float32"),
  "sub": ("net/attention", "infer", "float32", "float32"),
}


@pytest.mark.parametrize("primitive", ROWS)
def test_lists_and_dtypes_of_rows(primitive):
  row = next(row for row in explained(network, W, X).rows if row.primitive == primitive)
  assert (row.path, row.list, row.before, row.after) == ROWS[primitive]


LISTED = {
  "allow": (lambda x: x @ W, "dot_general"),
  "deny": (lambda x: jax.lax.cumsum(x @ W), "cumsum"),
  "infer": (lambda x: (x @ W) * 2 @ W, "mul"),
  "opaque": (lambda x: jax.lax.reduce_precision(x @ W, 8, 4), "reduce_precision"),
}


@pytest.mark.parametrize("name", LISTED)
def test_the_list_of_a_row(name):
  fun, primitive = LISTED[name]
  row = only(explained(fun, X), primitive)
  assert row.list == name
  assert row.after == ("float32" if name in ("deny", "opaque") else "bfloat16")


def test_what_autocast_does_agrees():
  # In the program that autocast makes, as many products of each dtype.
  fun = jax.grad(lambda w, x: network(w, jax.nn.gelu(x @ w)))
  rows = [row for row in explained(fun, W, X).rows if row.list == "allow"]
  done = [e for e in equations(mpjax.autocast(fun, "bf16"), W, X) if e.primitive.name in PRODUCTS]
  want = sorted(str(e.invars[0].aval.dtype) for e in done)
  assert sorted(row.after for row in rows for _ in range(row.times)) == want


def test_reasons_of_what_is_in_float32():
  rows = explained(network, W, X).rows
  full = [row for row in rows if row.after == "float32" and row.before == "float32"]
  assert full
  assert all(row.why for row in rows)
  why = {row.primitive: row.why for row in full}
  assert "relative error" in why["exp"]
  assert "accumulates" in why["reduce_sum"]
  assert "reduction" in why["sub"]


@pytest.mark.parametrize("policy", ["bf16", "fp8", "fp16"])
def test_a_reason_of_float16_is_given_under_float16_alone(policy):
  fun = lambda x: (jnp.sum(jnp.exp(x @ W)) + jnp.log(x @ W) + (x @ W) ** 2) @ W
  text = str(explained(fun, X, policy=policy))
  assert ("float16's range" in text) == (policy == "fp16")
  assert ("overflow beyond 256" in text) == (policy == "fp16")


REASONS = {  # (function of x, primitive, a word of the reason)
  "precision": (lambda x: jnp.matmul(x, W, precision="highest"), "dot_general", "precision"),
  "full_precision": (mpjax.full_precision(lambda x: x @ W), "dot_general", "policy"),
  "cast": (lambda x: (x @ W).astype(jnp.bfloat16).astype(jnp.float32) * 2 @ W, "mul", "cast"),
  "mask": (lambda x: jax.nn.relu(x @ W) + 1e9, "add", "half precision has not"),
  "reduction": (lambda x: (x @ W) * jnp.sum(x @ W), "mul", "reduction"),
  "island": (lambda x: jnp.log(x @ W) * 2, "mul", "island"),
}


@pytest.mark.parametrize("name", REASONS)
def test_reasons(name):
  fun, primitive, word = REASONS[name]
  row = only(explained(fun, X, policy="fp16"), primitive)
  assert row.after == "float32"
  assert word in row.why


def test_casts_and_their_bytes():
  explanation = explained(lambda w, x: x @ w, W, X)
  (row,) = explanation.rows
  assert (row.casts, row.cast_bytes) == (2, 2 * (16 + 32))
  assert row.bytes == 2 * 32
  # A value that is cast for one reader is there for the next.
  rows = explained(lambda w, x: (x @ w) @ w, W, X).rows
  assert [row.casts for row in rows] == [2, 0]
  rows = explained(lambda w, x: x @ w, W, X, policy="fp32").rows
  assert [(row.casts, row.cast_bytes, row.bytes) for row in rows] == [(0, 0, 4 * 32)]


def test_times_and_bytes_in_a_scan():
  fun = lambda x: jax.lax.scan(lambda c, _: (jnp.tanh(c @ W), None), x, None, length=5)[0]
  row = only(explained(fun, X), "tanh")
  assert (row.times, row.bytes) == (5, 5 * 4 * 32)


def test_islands_are_numbered():
  two = lambda x: jax.nn.softmax(jax.nn.softmax(x @ W) @ W) @ W
  rows = explained(two, X).rows
  numbers = [row.island for row in rows if row.primitive == "exp"]
  assert None not in numbers
  assert len(set(numbers)) == 2
  assert rows[0].island is None
  assert "2 float32 islands" in str(explained(two, X))


def test_the_text_leads_with_what_is_float32_and_ends_with_the_modules():
  explanation = explained(network, W, X)
  text = str(explanation)
  lines = text.splitlines()
  assert lines[0].startswith("policy bf16: ")
  assert f"{len(explanation.rows)} operations" in lines[0]
  assert "bfloat16 1.02 kFLOP (100%)" in str(explained(network, W, shape(16, 4)))
  titles = [section.splitlines()[0] for section in text.split("\n\n")]
  assert titles[1] == "In float32, and why"
  modules = [line.split()[0] for line in text.split("\n\n")[-1].splitlines()]
  assert modules == ["Modules", "module", "-" * len(modules[2]), "net/attention", "net/head"]
  assert all(len(line) == len(line.rstrip()) for line in lines)


def layers(count):
  def fun(x):
    for i in range(count):
      with jax.named_scope(f"net/layers/{i}"):
        x = jax.nn.softmax(x @ W)
    return x @ W

  return fun


def test_a_kernel_is_one_operation_with_the_flops_that_it_states():
  def kernel(x, w, out):
    out[...] = x[...] @ w[...]

  def multiply(x, w):
    cost = pl.CostEstimate(flops=1000, transcendentals=0, bytes_accessed=0)
    return pl.pallas_call(kernel, jax.ShapeDtypeStruct(x.shape, x.dtype), cost_estimate=cost)(x, w)

  for fun in multiply, mpjax.half_precision(multiply):
    explained = mpjax.explain(fun, "bf16")(jnp.ones((8, 8)), jnp.ones((8, 8)))
    assert [row.primitive for row in explained.rows if row.flops] == ["pallas_call"]
    assert sum(explained.matrix_flops().values()) == 1000


def test_layers_that_are_alike_are_one_row():
  text = str(explained(layers(12), X))
  assert len(text.splitlines()) <= len(str(explained(layers(3), X)).splitlines())
  [*_, modules] = text.split("\n\n")
  assert "net/layers/*" in modules
  assert "net/layers/1" not in modules


def test_a_layer_of_its_own_policy_is_a_row_of_its_own():
  text = str(explained(layers(4), X, overrides={"layers/1": "fp32"}))
  [*_, modules] = text.split("\n\n")
  names = [line.split()[0] for line in modules.splitlines() if line.startswith("net/layers")]
  assert names == ["net/layers/0,2,3", "net/layers/1"]


@pytest.mark.parametrize("width", [60, 80, 120])
def test_policies_stand_side_by_side_at_any_width(width):
  policies = ("fp32", "bf16", "fp16")
  stream = io.StringIO()
  console = rich.console.Console(file=stream, width=width, color_system=None)
  print_explanations([explained(layers(4), X, policy=policy) for policy in policies], console)
  text = stream.getvalue()
  headings = [line.split() for line in text.splitlines() if line.split()[:1] == ["fp32"]]
  assert headings == [list(policies)] * 2
  assert max(map(len, text.splitlines())) <= width


def test_paths_of_nnx_modules():
  class Net(nnx.Module):
    def __init__(self, rngs):
      self.layers = nnx.List([nnx.Linear(4, 4, rngs=rngs) for _ in range(2)])

    def __call__(self, x):
      for layer in self.layers:
        x = layer(x)
      return x

  rows = explained(lambda net, x: net(x), Net(nnx.Rngs(0)), X).rows
  assert [row.path for row in rows if row.flops] == ["Net/layers/0", "Net/layers/1"]


def test_overrides_are_visible_and_checked():
  explanation = explained(network, W, X, overrides={"head": "fp32"})
  assert explanation.matrix_flops() == {"bfloat16": 256, "float32": 256}
  (row,) = (row for row in explanation.rows if row.flops and row.after == "float32")
  assert (row.path, row.why) == ("net/head", "its module's policy computes in float32")
  assert explained(network, W, X, policy={"base": "bf16", "overrides": {"head": "fp16"}}).matrix_flops() == {
    "bfloat16": 256,
    "float16": 256,
  }
  with pytest.raises(ValueError, match=r"'hed' matches no module path.*net/attention, net/head"):
    explained(network, W, X, overrides={"hed": "fp32"})


def test_changed_lists_are_visible():
  ops = mpjax.OpLists.default()
  row = only(explained(lambda x: (x @ W) * 2, X, ops=ops.replace(deny=ops.deny | {"mul"})), "mul")
  assert (row.list, row.after) == ("deny", "float32")


def test_policy_fp32_casts_nothing():
  explanation = explained(network, W, X, policy="fp32")
  assert {row.after for row in explanation.rows} == {"float32"}
  assert sum(row.casts for row in explanation.rows) == 0
  assert "0 casts" in str(explanation)


def test_float16_denies_more_than_bfloat16():
  fun = lambda x: jnp.sqrt(x @ W) @ W
  dtypes = {policy: only(explained(fun, X, policy=policy), "sqrt").after for policy in ("bf16", "fp16")}
  assert dtypes == {"bf16": "bfloat16", "fp16": "float32"}


def test_nothing_is_computed():
  ran = []

  def fun(x):
    y = jax.pure_callback(lambda x: ran.append(x), shape(8, 4), x @ W)
    jax.debug.callback(ran.append, y)
    return y

  rows = explained(fun, shape(8, 4)).rows
  jax.effects_barrier()
  assert ran == []
  assert {"pure_callback", "debug_callback"} <= {row.primitive for row in rows}
  huge = explained(lambda x: x @ x, shape(2**20, 2**20))
  assert huge.matrix_flops() == {"bfloat16": 2 * 2**60}


def test_arguments_by_keyword_and_static_ones():
  def fun(x, *, w, n, flag):
    return (x @ w if flag else x) * n

  rows = mpjax.explain(fun, "bf16")(shape(8, 4), w=W, n=2, flag=True).rows
  assert [row.primitive for row in rows] == ["dot_general", "mul"]
  assert mpjax.explain(fun, "bf16").__name__ == "fun"


def test_functions_under_autocast_already():
  rows = explained(mpjax.autocast(network, "fp16"), W, X, policy="bf16").rows
  assert {row.after for row in rows if row.list == "allow"} == {"float16"}


def test_unknown_primitives_are_left_as_they_are_and_listed():
  strange = jax.extend.core.Primitive("strange")
  strange.def_abstract_eval(lambda x: jax.core.ShapedArray(x.shape, x.dtype))
  fun = lambda x: strange.bind(x @ W) @ W
  explained = mpjax.explain(fun, "bf16")(X)
  assert explained.unknown == ("strange",)
  assert "unknown primitives, left in the dtypes of the program: strange" in str(explained)
  (row,) = (row for row in explained.rows if row.primitive == "strange")
  assert (row.list, row.after) == ("opaque", "float32")
  ops = mpjax.OpLists.default()
  listed = mpjax.explain(fun, "bf16", ops=ops.replace(infer=ops.infer | {"strange"}))(X)
  assert listed.unknown == ()
  assert mpjax.explain(lambda x: jax.lax.reduce_precision(x @ W, 8, 4), "bf16")(X).unknown == ()


def test_a_librarys_primitive_with_a_name_of_jax_is_unknown_until_the_user_lists_it():
  mine = jax.extend.core.Primitive("tanh")
  mine.def_abstract_eval(lambda x: jax.core.ShapedArray(x.shape, x.dtype))
  fun = lambda x: jnp.tanh(mine.bind(x @ W)) @ W
  explained = mpjax.explain(fun, "bf16")(X)
  assert explained.unknown == ("tanh",)
  assert [row.list for row in explained.rows if row.primitive == "tanh"] == ["opaque", "deny"]
  ops = mpjax.OpLists.default()
  listed = mpjax.explain(fun, "bf16", ops=ops.replace(infer=ops.infer | {"tanh"}))(X)
  assert [row.list for row in listed.rows if row.primitive == "tanh"] == ["infer", "infer"]
  assert listed.unknown == ()


CARRIES = {  # (step, dtype, what the reason says)
  "residual stream": (lambda c, x: (c + (c @ x.T) @ x, None), "bfloat16", "weights of its own"),
  "sampler": (lambda c, x: (c + jnp.tanh(c @ W) @ W, None), "float32", "same weights"),
  "layers": (lambda c, x: (jnp.tanh(c @ W), None), "bfloat16", "anew"),
  "sum": (lambda c, x: (c + x @ W, None), "float32", "a sum"),
  "decay": (lambda c, x: (0.9 * c + jnp.tanh(c @ W), None), "float32", "decays"),
}


@pytest.mark.parametrize("name", CARRIES)
def test_a_loops_carry_has_its_dtype_and_the_reason(name):
  step, dtype, reason = CARRIES[name]

  def fun(x):
    with jax.named_scope("rnn"):
      return jax.lax.scan(step, x, jnp.stack([x] * 3))[0]

  explanation = explained(fun, X)
  (carry,) = explanation.carries
  assert (carry.path, carry.primitive, carry.shape, carry.dtype) == ("rnn/carry_0", "scan", X.shape, dtype)
  assert reason in carry.why
  assert carry.path in str(explanation)
  assert reason in str(explanation)


def test_what_is_no_float32_is_no_carry():
  fun = lambda x: jax.lax.fori_loop(0, 3, lambda i, c: c @ W, x)
  assert [carry.path for carry in explained(fun, X).carries] == ["carry_1"]


def test_an_island_has_what_it_keeps_and_what_it_computes_again():
  explanation = explained(network, W, X)
  island = explanation.islands[0]
  rows = [row for row in explanation.rows if row.island == island.number and row.list != "allow"]
  assert island.path == "net/attention"
  assert island.operations == tuple(row.primitive for row in rows)
  assert island.kept_bytes == 2 * X.size  # the product's result, in half precision
  assert island.recomputed_bytes >= 4 * X.size * 3  # the difference, the exponential and the quotient
  assert "net/attention" in str(explanation).partition("Float32 islands")[2]


def rnn(x):
  """A loop with a memory that decays, and activations that pass through layers."""

  def step(carry, _):
    memory, y = carry
    return (0.9 * memory + jnp.tanh(memory @ W), jnp.tanh(y @ W)), None

  with jax.named_scope("rnn"):
    return jax.lax.scan(step, (x, x), None, length=3)[0]


@pytest.mark.parametrize(
  ("overrides", "dtypes"),
  [
    ({}, ["float32", "bfloat16"]),
    ({"rnn": {"loop_carry": "float32"}}, ["float32", "float32"]),
    ({"rnn": {"loop_carry": "half"}}, ["bfloat16", "bfloat16"]),
    ({"rnn/carry_0": {"loop_carry": "half"}}, ["bfloat16", "bfloat16"]),
    ({"carry_1": {"loop_carry": "float32"}}, ["float32", "float32"]),
  ],
)
def test_overrides_set_how_a_loops_carry_is_held(overrides, dtypes):
  explanation = explained(rnn, X, overrides=overrides)
  assert [carry.dtype for carry in explanation.carries] == dtypes
  (scan,) = named("scan", mpjax.autocast(rnn, "bf16", overrides=overrides), X)
  assert [v.aval.dtype.name for v in scan.outvars] == dtypes
  set_by_user = sum("an override" in carry.why for carry in explanation.carries)
  assert set_by_user == (0 if not overrides else 2 if "rnn" in overrides else 1)


def test_an_override_sets_what_a_module_computes_again():
  overrides = {"net/attention": {"recompute": "nothing"}}
  assert [island.path for island in explained(network, W, X, overrides=overrides).islands] == []
  islands = explained(network, W, X, overrides={"head": {"recompute": "nothing"}}).islands
  assert [island.path for island in islands] == ["net/attention"]
