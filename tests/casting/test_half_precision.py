"""`half_precision`: regions that run in the compute dtype as they stand."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import mpjax
from tests.casting._jaxprs import dtypes, jit, named
from tests.casting._kernel import ORDERS, W, X, exact, kernel, loss_with, near

FORMS = {
  "as it is": lambda mix: mix,
  "float16": lambda mix: mix,
  "jit": jax.jit,
  "checkpoint": jax.checkpoint,
  "vmap": jax.vmap,
  "scan": lambda mix: lambda a, b: jax.lax.scan(lambda _, ab: (None, mix(*ab)), None, (a, b))[1],
  "scan, kept": lambda mix: (
    lambda a, b: jax.lax.scan(lambda c, x: (mix(c, x), None), a, jnp.stack([b, b]))[0]
  ),
  "cond": lambda mix: lambda a, b: jax.lax.cond(jnp.sum(a) < 1e6, mix, lambda a, b: a, a, b),
}


def assert_runs_in_half(make, reference=exact, policy="bf16"):
  """Has the kernel in the loss of `make` see half precision alone, in each order of `grad` and `autocast`."""
  functions = [order(make(mpjax.half_precision(kernel(seen := []))), policy) for order in ORDERS.values()]
  found, want = jit(lambda w, x: ([f(w, x) for f in functions], jax.grad(reference)(w, x)))(W, X)
  assert set(seen) == {{"bf16": "bfloat16", "fp16": "float16"}[policy]}
  for one in found:
    near(one, want)


@pytest.mark.parametrize("form", FORMS)
def test_a_kernel_runs_in_half_precision_forward_and_backward(form):
  reference = exact if form != "scan, kept" else loss_with(lambda a, b: jnp.tanh(jnp.tanh(a) * b) * b)
  policy = "fp16" if form == "float16" else "bf16"
  assert_runs_in_half(lambda mix: loss_with(FORMS[form](mix)), reference, policy)


@pytest.mark.parametrize("check_vma", [False, True])
def test_over_devices(check_vma):
  mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
  specs = {"in_specs": (P("data"), P("data")), "out_specs": P("data")}
  assert_runs_in_half(lambda mix: loss_with(jax.shard_map(mix, mesh=mesh, check_vma=check_vma, **specs)))
  if check_vma:
    mean = lambda mix: lambda w, x: jax.lax.pmean(loss_with(mix)(w, x), "data")
    over = functools.partial(jax.shard_map, mesh=mesh, in_specs=(P(), P("data")), out_specs=P())
    assert_runs_in_half(lambda mix: over(mean(mix)))


def test_inside_another_derivative_rule():
  def outer(mix):
    rule = jax.custom_vjp(lambda a, b: mix(a, b))
    rule.defvjp(lambda a, b: (mix(a, b), (a, b)), lambda kept, ct: jax.vjp(mix, *kept)[1](ct))
    return loss_with(rule)

  assert_runs_in_half(outer)


def test_it_is_the_function_where_nothing_is_half():
  plain = loss_with(mpjax.half_precision(lambda a, b: jnp.tanh(a) * b))
  refused = loss_with(mpjax.half_precision(kernel([])))
  text = str(jax.make_jaxpr(exact)(W, X))
  for policy in (None, "fp32", "params=float32,compute=float32,output=float32"):
    under = lambda f, policy=policy: f if policy is None else mpjax.autocast(f, policy)
    assert str(jax.make_jaxpr(under(plain))(W, X)) == text, policy
    with pytest.raises(TypeError, match="takes half precision alone"):
      jax.eval_shape(under(refused), W, X)


def test_full_precision_wins_on_both_sides():
  mix = mpjax.half_precision(kernel([]))
  for region in (mix, jax.jit(mix)):
    with pytest.raises(TypeError, match="takes half precision alone"):
      jax.eval_shape(mpjax.autocast(loss_with(mpjax.full_precision(region)), "bf16"), W, X)


OVERRIDES = [  # the policy, overrides, what its module computes in
  ("bf16", {"named": "fp32"}, "float32"),
  ("bf16", {"named": "fp16"}, "float16"),
  ("fp32", {"another": "bf16"}, "float32"),
]


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["as it is", "jit"])
def test_an_override_of_another_dtype_is_an_error_that_names_full_precision(wrap):
  region = jax.named_scope("named")(wrap(mpjax.half_precision(lambda a, b: jnp.tanh(a) * b)))
  loss = loss_with(lambda a, b: jax.named_scope("another")(jnp.multiply)(region(a, b), b))
  for base, overrides, dtype in OVERRIDES:
    policy = {"base": base, "overrides": overrides}
    for order in ORDERS.values():
      with pytest.raises(
        ValueError, match=f"'named' runs in .*float16, and its module in {dtype}.*full_precision"
      ):
        jax.eval_shape(order(loss, policy), W, X)
  same = {"base": "bf16", "overrides": {"named": "bf16", "another": "fp32"}}
  jax.eval_shape(mpjax.autocast(loss, same), W, X)


def test_what_leaves_float16s_range_is_its_largest_value():
  region = mpjax.half_precision(lambda x: seen.append(x.dtype) or x)
  seen = []
  out = jit(mpjax.autocast(lambda x: region(jnp.exp(x)) * 0 + region(jnp.exp(x)), "fp16"))(
    np.float32([1, 20])
  )
  assert set(seen) == {np.dtype("float16")}
  np.testing.assert_array_equal(out, np.float32([np.float16(np.exp(1.0)), 65504]))


def test_what_was_float16_outside_is_within_its_range():
  f = lambda x: mpjax.half_precision(jnp.sin)(x.astype(jnp.float32))
  for dtype, clipped in (("float16", 0), ("bfloat16", 1), ("float32", 1)):
    program = jax.make_jaxpr(mpjax.autocast(f, "fp16"))(jax.ShapeDtypeStruct((3,), dtype))
    assert str(program).count("name=clip") == clipped, dtype


def test_gradients_out_of_range_are_not_hidden():
  f = lambda x: jnp.sum(mpjax.half_precision(lambda x: x * 2)(x) * 1e6)
  found = jit(lambda x: [order(f, "fp16")(x) for order in ORDERS.values()])(np.ones(3, np.float32))
  assert not np.isfinite(found).any()


def test_a_gradient_that_overflows_on_its_way_out_of_a_region_is_not_clipped():
  loss = lambda w, x: jnp.sum(mpjax.half_precision(jnp.tanh)(x @ w) * 1e6)
  orders = (lambda f: jax.grad(mpjax.autocast(f, "fp16")), lambda f: mpjax.autocast(jax.grad(f), "fp16"))
  for grads in jax.jit(lambda w, x: [order(loss)(w, x) for order in orders])(
    0 * X[:2, :2], 1 + 0 * X[:2, :2]
  ):
    assert not np.isfinite(grads).any()


def test_a_cache_stays_half_precision_beside_a_dtype_that_is_an_argument():
  def decode(cache, x, dtype, scale):
    return cache.at[0].set((x * scale).sum().astype(cache.dtype)), x.astype(dtype)

  turn = lambda cache, x: mpjax.half_precision(decode)(cache, x, jnp.float32, np.float32(2))
  run = mpjax.autocast(lambda cache, xs: jax.lax.scan(turn, cache, xs)[1], "bf16")
  assert jax.eval_shape(run, np.zeros(4, jnp.bfloat16), np.ones((3, 4), np.float32)).shape == (3, 4)


def test_what_enters_and_leaves_stays_half_precision():
  mix = mpjax.half_precision(lambda a, b: jax.lax.optimization_barrier((a, b))[0])
  f = lambda w, x: mix(x @ w["q"], x @ w["k"]) @ w["o"]

  f = mpjax.autocast(f, "params=float32,compute=bfloat16,output=bfloat16")
  text = jax.export.export(jax.jit(f), platforms=["tpu"])(W, X).mlir_module()
  casts = [line for line in text.splitlines() if "stablehlo.convert" in line]
  assert casts
  assert not [line for line in casts if line.rstrip().endswith("xf32>")]


def test_an_island_reads_the_result_in_float32():
  f = lambda x: jax.nn.softmax(mpjax.half_precision(lambda x: x + 1)(x))
  (exp,) = named("exp", mpjax.autocast(f, "bf16"), X)
  assert dtypes(exp.invars) == "f32"


def test_arrays_of_its_own_and_other_dtypes_are_left_alone():
  table = np.arange(8, dtype=np.float32)
  seen = []

  @mpjax.half_precision
  def region(x, n, half, *, scale, name):
    seen.extend([x.dtype, table.dtype, n.dtype, half.dtype, type(scale), name])
    return {"x": x * scale, "n": n}

  def f(x):
    out = region(x, jnp.int32(3), x.astype(jnp.float16), scale=2.0, name="n")
    return out["x"], out["n"]

  x, n = jax.eval_shape(mpjax.autocast(f, "bf16"), X)
  assert [str(s) for s in seen[:4]] == ["bfloat16", "float32", "int32", "float16"]
  assert seen[4:] == [float, "n"]
  assert (x.dtype, n.dtype) == (jnp.float32, jnp.int32)


def test_a_call_without_float32_is_left_alone():
  calls = []

  @mpjax.half_precision
  def region(x):
    calls.append(x.dtype)
    return region(x) if len(calls) < 3 else x * 2

  jax.eval_shape(mpjax.autocast(region, "bf16"), X)
  assert [str(dtype) for dtype in calls] == ["bfloat16"] * 3


def test_an_nnx_module():
  seen = []

  class Block(nnx.Module):
    def __init__(self, rngs):
      self.w = nnx.Param(W["q"])
      self.count = nnx.Variable(np.zeros((), np.float32))

    def __call__(self, x):
      seen.append((str(x.dtype), str(self.w[...].dtype)))
      self.count[...] += 1
      return x @ self.w[...]

  block = Block(nnx.Rngs(0))

  def f(block, x):
    return jnp.sum(mpjax.half_precision(block)(x) ** 2)

  mpjax.autocast(f, "bf16")(block, X)
  assert seen == [("bfloat16", "bfloat16")]
  assert (block.count[...], block.count[...].dtype) == (1, jnp.float32)


def test_under_an_fp8_policy_it_is_the_compute_dtype():
  f = loss_with(mpjax.half_precision(kernel(seen := [])))
  jax.eval_shape(jax.grad(mpjax.autocast(f, {"base": "fp8", "fp8": {"emulate": True}})), W, X)
  assert set(seen) == {"bfloat16"}


@pytest.mark.slow
def test_numerics_says_where_there_is_no_float32_to_compare_with():
  with_one = mpjax.inspect_numerics(
    loss_with(mpjax.half_precision(lambda a, b: jnp.tanh(a) * b)), W, X, policy="bf16"
  )
  assert "errors there are unknown" not in with_one.table("findings")
  assert with_one.reference_loss == pytest.approx(float(exact(W, X)), rel=1e-6)
  without = mpjax.inspect_numerics(loss_with(mpjax.half_precision(kernel([]))), W, X, policy="bf16")
  assert "errors there are unknown" in without.table("findings")


def test_a_function_traced_before_and_after_is_traced_again():
  seen = []

  @jax.jit
  @mpjax.half_precision
  def region(x):
    seen.append(str(x.dtype))
    return x * 2

  for f in (region, mpjax.autocast(region, "bf16"), mpjax.autocast(region, "fp16"), region):
    jax.eval_shape(f, X)
  assert seen == ["float32", "bfloat16", "float16"]


def test_it_trains_in_float16_without_tracing_again():
  calls = []
  loss = loss_with(mpjax.half_precision(kernel([])))
  step = mpjax.make_train_step(lambda w, x: calls.append(1) or loss(w, x), optax.adam(1e-2), policy="fp16")
  state, losses, traced = step.init(W), [], []
  for _ in range(20):
    state, metrics = step(state, X)
    losses.append(float(metrics["loss"]))
    traced.append(len(calls))
  assert losses[-1] < losses[0]
  assert traced[1] == traced[-1]
