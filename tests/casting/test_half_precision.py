"""`half_precision`: regions that run in the compute dtype as they stand, by themselves and beside others."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import mpjax
from tests.casting._jaxprs import dtypes, jit, named
from tests.casting._kernel import ORDERS, W, X, exact, kernel, loss_with, near

half = mpjax.half_precision
refused = lambda: half(kernel([]))
MESH = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))


def sharded(mix, **options):
  specs = {"in_specs": (P("data"), P("data")), "out_specs": P("data")}
  return jax.shard_map(mix, mesh=MESH, **specs, **options)


def in_a_rule(mix):
  rule = jax.custom_vjp(lambda a, b: mix(a, b))
  rule.defvjp(lambda a, b: (mix(a, b), (a, b)), lambda kept, ct: jax.vjp(mix, *kept)[1](ct))
  return rule


def mean_over_devices(mix):
  mean = lambda w, x: jax.lax.pmean(loss_with(mix)(w, x), "data")
  return jax.shard_map(mean, mesh=MESH, in_specs=(P(), P("data")), out_specs=P())


FORMS = {  # a loss in which a function of two arrays is called
  "as it is": loss_with,
  "jit": lambda mix: loss_with(jax.jit(mix)),
  "checkpoint": lambda mix: loss_with(jax.checkpoint(mix)),
  "vmap": lambda mix: loss_with(jax.vmap(mix)),
  "scan": lambda mix: loss_with(lambda a, b: jax.lax.scan(lambda _, ab: (None, mix(*ab)), None, (a, b))[1]),
  "scan, carried": lambda mix: loss_with(
    lambda a, b: jax.lax.scan(lambda c, x: (mix(c, x), None), a, jnp.stack([b, b]))[0]
  ),
  "cond": lambda mix: loss_with(lambda a, b: jax.lax.cond(jnp.sum(a) < 1e6, mix, lambda a, b: a, a, b)),
  "shard_map": lambda mix: loss_with(sharded(mix, check_vma=False)),
  "shard_map, checked": lambda mix: loss_with(sharded(mix)),
  "a mean over devices": mean_over_devices,
  "another rule": lambda mix: loss_with(in_a_rule(mix)),
}


@pytest.mark.parametrize(("policy", "dtype"), [("bf16", "bfloat16"), ("fp16", "float16")])
def test_a_kernel_runs_in_half_precision_forward_and_backward(policy, dtype):
  forms = FORMS if policy == "bf16" else {"as it is": loss_with}
  functions, seen = {}, {name: [] for name in forms}
  for name, make in forms.items():
    casts = [order(make(half(kernel(seen[name]))), policy) for order in ORDERS.values()]
    plain = jax.grad(make(lambda a, b: jnp.tanh(a) * b))
    functions[name] = lambda w, x, casts=casts, plain=plain: ([f(w, x) for f in casts], plain(w, x))
  found = jit(lambda w, x: {name: f(w, x) for name, f in functions.items()})(W, X)
  for name, (casts, plain) in found.items():
    assert set(seen[name]) == {dtype}, name
    for one in casts:
      near(one, plain)


def test_under_an_fp8_policy_it_is_the_compute_dtype():
  f = loss_with(half(kernel(seen := [])))
  jax.eval_shape(jax.grad(mpjax.autocast(f, {"base": "fp8", "fp8": {"emulate": True}})), W, X)
  assert set(seen) == {"bfloat16"}


def test_it_is_the_function_where_nothing_is_half_and_full_precision_wins():
  plain = loss_with(half(lambda a, b: jnp.tanh(a) * b))
  text = str(jax.make_jaxpr(exact)(W, X))
  for under in (lambda f: f, mpjax.autocast(policy="fp32")):
    assert str(jax.make_jaxpr(under(plain))(W, X)) == text
    with pytest.raises(TypeError, match="takes half precision alone"):
      jax.eval_shape(under(loss_with(refused())), W, X)
  for region in (refused(), jax.jit(refused())):
    with pytest.raises(TypeError, match="takes half precision alone"):
      jax.eval_shape(mpjax.autocast(loss_with(mpjax.full_precision(region)), "bf16"), W, X)
  with pytest.raises(TypeError, match="expected a function"):
    half(3)


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["as it is", "jit"])
@pytest.mark.parametrize(
  ("base", "overrides", "refused"),
  [
    ("bf16", {"second": "fp32"}, "'second', which an override computes in float32"),
    ("bf16", {"first": "fp16"}, "'first', which an override computes in float16"),
    ("fp32", {"second": "bf16"}, None),  # the first is in no override: it is the function
    ("bf16", {"second": "bf16"}, None),
  ],
)
def test_an_override_of_another_dtype_for_the_module_of_a_region_is_refused(base, overrides, refused, wrap):
  seen = {}

  def noted(name):
    def mix(a, b):
      seen[name] = str(a.dtype)
      return jnp.tanh(a) * b

    return jax.named_scope(name)(wrap(half(mix)))

  first, second = noted("first"), noted("second")
  loss = loss_with(lambda a, b: second(first(a, b), b))
  for order in ("grad of autocast", "autocast of grad"):
    with (
      pytest.raises(ValueError, match=f"{refused}.*full_precision") if refused else contextlib.nullcontext()
    ):
      jax.eval_shape(ORDERS[order](loss, {"base": base, "overrides": overrides}), W, X)
    if not refused:
      assert seen == {"first": "float32" if base == "fp32" else "bfloat16", "second": "bfloat16"}, order


def test_what_leaves_float16s_range_is_its_largest_value_and_what_was_float16_is_within():
  wide = np.float32([1, 1e5, -1e9, np.inf])
  mask = np.arange(X.shape[0])[:, None] > np.zeros(X.shape)  # but for the first row
  mix = half(lambda x, bias: jax.nn.softmax(x + bias, axis=-1))
  f = lambda wide, x, mask: (half(lambda x: x)(wide), mix(x * 1e5, jnp.where(mask, 0.0, -1e9)))
  out, mixed = jit(mpjax.autocast(f, "fp16"))(wide, X, mask)
  np.testing.assert_array_equal(out, np.float32([1, 65504, -65504, np.inf]))
  assert np.isfinite(mixed).all()
  sine = lambda x: half(jnp.sin)(x.astype(jnp.float32))
  for dtype, clipped in (("float16", 0), ("bfloat16", 1), ("float32", 1)):
    program = jax.make_jaxpr(mpjax.autocast(sine, "fp16"))(jax.ShapeDtypeStruct((3,), dtype))
    assert str(program).count("name=clip") == clipped, dtype


def test_a_gradient_that_overflows_on_its_way_out_of_a_region_is_not_clipped():
  losses = (
    lambda w, x: jnp.sum(half(jnp.tanh)(x @ w) * 1e6),
    lambda w, x: jnp.sum(half(lambda w: w * 2)(w) * 1e6),
  )
  orders = [ORDERS["grad of autocast"], ORDERS["autocast of grad"]]
  run = jax.jit(lambda w, x: [order(loss, "fp16")(w, x) for order in orders for loss in losses])
  for grads in run(jnp.zeros((2, 2)), jnp.ones((2, 2))):
    assert not np.isfinite(grads).any()


def test_what_enters_and_leaves_stays_half_precision_but_for_islands():
  mix = half(lambda a, b: jax.lax.optimization_barrier((a, b))[0])
  f = lambda w, x: mix(x @ w["q"], x @ w["k"]) @ w["o"]
  f = mpjax.autocast(f, "params=float32,compute=bfloat16,output=bfloat16")
  text = jax.export.export(jax.jit(f), platforms=["tpu"])(W, X).mlir_module()
  casts = [line for line in text.splitlines() if "stablehlo.convert" in line]
  assert casts
  assert not [line for line in casts if line.rstrip().endswith("xf32>")]
  island = lambda x: jax.nn.softmax(half(lambda x: x + 1)(x))
  (exp,) = named("exp", mpjax.autocast(island, "bf16"), X)
  assert dtypes(exp.invars) == "f32"


def test_half_precision_of_the_users_own_stays():
  seen = []

  @half
  def step(cache, x):
    seen.append((str(cache.dtype), str(x.dtype)))
    return cache.at[0].set(x.astype(cache.dtype)), x * 2

  loop = lambda cache, xs: jax.lax.scan(step, cache, xs)
  jax.eval_shape(mpjax.autocast(loop, "bf16"), np.zeros((2, 8), jnp.bfloat16), X)
  assert seen[-1] == ("bfloat16", "bfloat16")


def test_a_loop_whose_product_is_in_a_region_carries_half_precision():
  f = lambda x, ws: jax.lax.scan(lambda x, w: (half(jnp.matmul)(x, w), None), x, ws)[0]
  [carry] = mpjax.explain(f, X, np.stack([W["q"]] * 3), policy="bf16").carries
  assert carry.dtype == "bfloat16"
