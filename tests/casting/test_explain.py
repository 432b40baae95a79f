"""`mpjax.explain`: what would run where, as data and as a table, without computing anything."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

import mpjax
from tests.casting._conformance import normal
from tests.casting._jaxprs import PRODUCTS, equations, named

W = normal(4, 4, scale=0.5)
X = normal(8, 4, seed=1)
OPS = mpjax.OpLists.default()
explained = lambda fun, *args, policy="bf16", **options: mpjax.explain(fun, *args, policy=policy, **options)
shape = lambda *dims: jax.ShapeDtypeStruct(dims, np.float32)
looped = lambda length, f: lambda x, w: jax.lax.scan(lambda c, _: (f(c, w), None), x, None, length=length)[0]


def network(w, x):
  with jax.named_scope("net/attention"):
    x = jax.nn.softmax(x @ w)
  with jax.named_scope("net/head"):
    return jnp.sum(x @ w)


def only(explanation, primitive):
  (row,) = (row for row in explanation.rows if row.primitive == primitive)
  return row


def conv(strides, **options):
  options |= {"padding": "VALID", "dimension_numbers": ("NHWC", "HWIO", "NHWC")}
  return lambda x, k: jax.lax.conv_general_dilated(x, k, (strides, strides), **options)


loss = lambda w, x: jnp.sum((x @ w) ** 2)
ragged = lambda x, w: jax.lax.ragged_dot(x, w, np.array([4, 0, 2], np.int32))
FLOPS = [  # (function, shapes of arguments, FLOPs by hand: two for each multiplication and addition)
  (jnp.matmul, [(3, 5), (5, 7)], 2 * 3 * 5 * 7),
  (jnp.dot, [(5,), (5,)], 2 * 5),
  (jnp.matmul, [(2, 3, 5), (2, 5, 7)], 2 * 2 * 3 * 5 * 7),
  (lambda a, b: jnp.einsum("bthd,bshd->bhts", a, b), [(2, 3, 4, 5)] * 2, 2 * 2 * 4 * 3 * 3 * 5),
  (conv(1), [(2, 6, 7, 3), (3, 2, 3, 5)], 2 * (2 * 4 * 6 * 5) * (3 * 2 * 3)),
  (conv(2), [(2, 7, 7, 3), (3, 3, 3, 5)], 2 * (2 * 3 * 3 * 5) * (3 * 3 * 3)),
  (conv(1, feature_group_count=4), [(1, 5, 5, 4), (3, 3, 1, 4)], 2 * (3 * 3 * 4) * (3 * 3)),  # depthwise
  (ragged, [(6, 5), (3, 5, 7)], 2 * 6 * 5 * 7),
  (looped(11, lambda c, w: jnp.tanh(c @ w)), [(3, 5), (5, 5)], 11 * 2 * 3 * 5 * 5),
  (looped(3, looped(2, jnp.matmul)), [(3, 5), (5, 5)], 2 * 3 * 2 * 3 * 5 * 5),
  (jax.vmap(jnp.matmul, (0, None)), [(2, 3, 5), (5, 7)], 2 * 2 * 3 * 5 * 7),
  (jax.jit(jax.checkpoint(lambda a, b: jax.nn.relu(a @ b))), [(3, 5), (5, 7)], 2 * 3 * 5 * 7),
  (jax.grad(loss, (0, 1)), [(5, 7), (3, 5)], 3 * 2 * 3 * 5 * 7),
  (jnp.exp, [(3, 5)], 0),
]


def test_flops_are_those_by_hand():
  for fun, shapes, want in FLOPS:
    explanation = explained(fun, *(shape(*dims) for dims in shapes))
    assert sum(row.flops for row in explanation.rows) == want, (fun, shapes)
    dtype = "float32" if fun is jnp.dot else "bfloat16"  # no matrix unit sums a vector
    assert explanation.matrix_flops() == ({dtype: want} if want else {}), (fun, shapes)


def test_a_row_for_each_operation_in_the_order_of_the_program_that_runs():
  calls = ("jit", "custom_jvp_call")
  want = [e.primitive.name for e in equations(network, W, X) if e.primitive.name not in calls]
  rows = explained(network, W, X).rows
  assert [row.primitive for row in rows] == want
  assert all(row.why for row in rows)
  # In the program that autocast makes, as many products of each dtype.
  fun = jax.grad(lambda w, x: network(w, jax.nn.gelu(x @ w)))
  rows = [row for row in explained(fun, W, X).rows if row.list == "allow"]
  done = [e for e in equations(mpjax.autocast(fun, "bf16"), W, X) if e.primitive.name in PRODUCTS]
  want = sorted(str(e.invars[0].aval.dtype) for e in done)
  assert sorted(row.after for row in rows for _ in range(row.times)) == want


full, half = "float32", "bfloat16"
again = lambda x: (x @ W).astype(jnp.bfloat16).astype(jnp.float32)
ROWS = [  # (function of x, policy, primitive, list, dtype that it runs in, a word of the reason)
  (lambda x: x @ W, "bf16", "dot_general", "allow", half, "dense product"),
  (lambda x: jnp.exp(x @ W), "bf16", "exp", "deny", full, "relative error"),
  (lambda x: jnp.sum(x @ W), "bf16", "reduce_sum", "deny", full, "accumulates"),
  (lambda x: jax.lax.cumsum(x @ W), "bf16", "cumsum", "deny", full, "accumulates"),
  (lambda x: (x @ W) * 2 @ W, "bf16", "mul", "infer", half, "half precision"),
  (lambda x: (x @ W) * jnp.sum(x @ W), "bf16", "mul", "infer", full, "reduction"),
  (lambda x: jnp.log(x @ W) * 2, "bf16", "mul", "infer", full, "island"),
  (lambda x: jax.lax.reduce_precision(x @ W, 8, 4), "bf16", "reduce_precision", "opaque", full, "dtype"),
  (lambda x: jnp.sqrt(x @ W) @ W, "bf16", "sqrt", "infer", half, "half precision"),
  (lambda x: jnp.sqrt(x @ W) @ W, "fp16", "sqrt", "deny", full, "float16"),
  (lambda x: jnp.matmul(x, W, precision="highest"), "fp16", "dot_general", "allow", full, "precision"),
  (mpjax.full_precision(lambda x: x @ W), "fp16", "dot_general", "allow", full, "policy"),
  (lambda x: again(x) * 2 @ W, "fp16", "mul", "infer", full, "cast"),
  (lambda x: jax.nn.relu(x @ W) + 1e9, "fp16", "add", "infer", full, "half-precision range"),
]


def test_list_dtype_and_reason_of_rows():
  for fun, policy, primitive, listed, dtype, word in ROWS:
    row = only(explained(fun, X, policy=policy), primitive)
    assert (row.list, row.before, row.after) == (listed, "float32", dtype), (primitive, policy, word)
    assert word in row.why, (primitive, row.why)
  row = only(explained(lambda x: (x @ W) * 2, X, ops=OPS.replace(deny=OPS.deny | {"mul"})), "mul")
  assert (row.list, row.after) == ("deny", "float32")


def test_islands_are_numbered_and_say_what_they_keep_and_compute_again():
  two = lambda x: jax.nn.softmax(jax.nn.softmax(x @ W) @ W) @ W
  rows = explained(two, X).rows
  assert len({row.island for row in rows if row.primitive == "exp"} - {None}) == 2
  assert rows[0].island is None
  assert "float32 islands: 2," in str(explained(two, X))
  explanation = explained(network, W, X)
  island = explanation.islands[0]
  rows = [row for row in explanation.rows if row.island == island.number and row.list != "allow"]
  assert island.path == "net/attention"
  assert island.operations == tuple(row.primitive for row in rows)
  assert island.kept_bytes == 2 * X.size  # the product's result, in half precision
  assert island.recomputed_bytes >= 4 * X.size * 3  # the difference, the exponential and the quotient


def test_the_answer_says_what_is_half_precision_what_is_not_and_how_to_change_it():
  explanation = explained(network, W, shape(16, 4), overrides={"head": "fp32"})
  lines = str(explanation).splitlines()
  assert lines[0].startswith("policy bf16: 1.02 kFLOP of matrix products, 50% in bfloat16, 50% in float32; ")
  assert f"of {len(explanation.rows)} operations in float32" in lines[0]
  product = next(line for line in lines if "50% of the FLOPs" in line)
  assert product.endswith("in net/head: its module's policy computes in float32")
  softmax = "exp in net/attention: an absolute error of its input becomes a relative error"
  assert any(line.endswith(softmax) for line in lines)
  assert lines[-2].startswith('Change it: overrides={"net/attention": "float32"}')
  assert lines[-1] == 'more: .table("reasons"), or "modules", "all"'
  modules = [line.split()[0] for line in explanation.table("modules").splitlines()]
  assert modules == ["Modules", "path", "-" * len(modules[2]), "net/attention", "net/head"]
  with pytest.raises(AttributeError, match=r"'fragile': mpjax\.inspect_numerics measures differences"):
    _ = explanation.fragile
  assert not hasattr(explanation, "fragil")


def test_the_recipe_and_the_formats_in_force_are_said():
  for recipe, said in (
    ({"emulate": True}, "current scaling, E4M3FN forward, E5M2 backward, emulated"),
    ({"recipe": "mx", "emulate": True}, "mx scaling, E4M3FN forward, E4M3FN backward, emulated"),
    ({}, "none, cpu has no FP8 units"),
  ):
    found = explained(network, W, X, policy={"base": "fp8", "fp8": recipe})
    assert found.fp8 == said
    assert f"\nfp8: {said}\n" in str(found)
  assert "fp8" not in str(explained(network, W, X))


def test_an_autocast_of_the_functions_own_is_what_is_explained():
  plain = explained(network, W, X)
  own = mpjax.autocast(network, "bf16")
  for fun in own, jax.jit(own), mpjax.autocast(own, "fp16"):
    found = explained(fun, W, X, policy="fp16")
    assert (found.policy, found.rows, found.islands) == (plain.policy, plain.rows, plain.islands)
    assert "an autocast of its own, policy bf16: that is explained here; policy fp16 changes" in str(found)
  assert "changes nothing" not in str(mpjax.explain(own, W, X))
  assert plain.note == ""


def test_a_kernel_is_one_operation_with_the_flops_that_it_states():
  def kernel(x, w, out):
    out[...] = x[...] @ w[...]

  def multiply(x, w):
    cost = pl.CostEstimate(flops=1000, transcendentals=0, bytes_accessed=0)
    return pl.pallas_call(kernel, jax.ShapeDtypeStruct(x.shape, x.dtype), cost_estimate=cost)(x, w)

  for fun in multiply, mpjax.half_precision(multiply):
    found = explained(fun, shape(8, 8), shape(8, 8))
    assert [row.primitive for row in found.rows if row.flops] == ["pallas_call"]
    assert sum(found.matrix_flops().values()) == 1000


def layers(count):
  def fun(x):
    for i in range(count):
      with jax.named_scope(f"net/layers/{i}"):
        x = jax.nn.softmax(x @ W)
    return x @ W

  return fun


def test_layers_that_are_alike_are_one_row_and_one_of_another_policy_has_its_own():
  text = explained(layers(12), X).table("all")
  assert len(text.splitlines()) <= len(explained(layers(3), X).table("all").splitlines())
  names = [line.split()[0] for line in text.split("\n\n")[-1].splitlines()]
  assert "net/layers/*" in names
  assert "net/layers/1" not in names
  text = explained(layers(4), X, overrides={"layers/1": "fp32"}).table("modules")
  names = [line.split()[0] for line in text.splitlines()]
  assert [name for name in names if "layers" in name] == ["net/layers/0,2,3", "net/layers/1"]


def test_unknown_primitives_are_left_as_they_are_and_listed():
  for name in ("strange", "tanh"):  # also one with a name of JAX's, until the user lists it
    mine = jax.extend.core.Primitive(name)
    mine.def_abstract_eval(lambda x: jax.core.ShapedArray(x.shape, x.dtype))
    fun = lambda x, mine=mine: jnp.tanh(mine.bind(x @ W)) @ W
    found, listed = (explained(fun, X, ops=ops) for ops in (OPS, OPS.replace(infer=OPS.infer | {name})))
    lists = lambda one: [(row.primitive, row.list) for row in one.rows if row.primitive in (name, "tanh")]
    assert lists(found) == [(name, "opaque"), ("tanh", "deny")]
    assert lists(listed) == [(name, "infer"), ("tanh", "infer" if name == "tanh" else "deny")]
    assert (found.unknown, listed.unknown) == ((name,), ())
    assert f"primitives that mpjax does not know: {name}" in str(found)
    assert next(row for row in found.rows if row.primitive == name).after == "float32"
  assert explained(lambda x: jax.lax.reduce_precision(x @ W, 8, 4), X).unknown == ()


CARRIES = [  # (step, dtype, what the reason says)
  (lambda c, x: (c + (c @ x.T) @ x, None), "bfloat16", "weights of its own"),
  (lambda c, x: (c + jnp.tanh(c @ W) @ W, None), "float32", "same weights"),
  (lambda c, x: (jnp.tanh(c @ W), None), "bfloat16", "anew"),
  (lambda c, x: (c + x @ W, None), "float32", "a sum"),
  (lambda c, x: (0.9 * c + jnp.tanh(c @ W), None), "float32", "decays"),
]


def test_a_loops_carry_has_its_dtype_and_the_reason():
  for step, dtype, reason in CARRIES:
    fun = jax.named_scope("rnn")(lambda x, step=step: jax.lax.scan(step, x, jnp.stack([x] * 3))[0])
    explanation = explained(fun, X)
    (carry,) = explanation.carries
    assert (carry.path, carry.primitive, carry.shape) == ("rnn/carry_0", "scan", X.shape), reason
    assert carry.dtype == dtype, reason
    assert reason in carry.why
  # What is no float32 is no carry.
  fun = lambda x: jax.lax.fori_loop(0, 3, lambda i, c: c @ W, x)
  assert [carry.path for carry in explained(fun, X).carries] == ["carry_1"]


@jax.named_scope("rnn")
def rnn(x):
  """A loop with a memory that decays, and activations that pass through layers."""
  step = lambda c, _: ((0.9 * c[0] + jnp.tanh(c[0] @ W), jnp.tanh(c[1] @ W)), None)
  return jax.lax.scan(step, (x, x), None, length=3)[0]


def test_overrides_set_how_a_loops_carry_is_held():
  for overrides, dtypes, set_by_user in (
    ({}, ["float32", "bfloat16"], 0),
    ({"rnn": {"loop_carry": "float32"}}, ["float32", "float32"], 2),
    ({"rnn": {"loop_carry": "half"}}, ["bfloat16", "bfloat16"], 2),
    ({"rnn/carry_0": {"loop_carry": "half"}}, ["bfloat16", "bfloat16"], 1),
    ({"carry_1": {"loop_carry": "float32"}}, ["float32", "float32"], 1),
  ):
    carries = explained(rnn, X, overrides=overrides).carries
    assert [carry.dtype for carry in carries] == dtypes, overrides
    assert sum("an override" in carry.why for carry in carries) == set_by_user, overrides
    (scan,) = named("scan", mpjax.autocast(rnn, "bf16", overrides=overrides), X)
    assert [v.aval.dtype.name for v in scan.outvars] == dtypes, overrides
