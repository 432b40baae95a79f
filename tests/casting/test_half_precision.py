"""`half_precision`: regions that run in the compute dtype as they stand, by themselves and beside others."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import mpjax
from tests.casting._conformance import leaf_failures
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


def test_what_is_no_float32_array_is_left_alone():
  table, config, seen = np.arange(8, dtype=np.float32), type("Config", (), {"dtype": "float32"})(), {}

  @half
  def region(x, n, own, *, dtype, scale, config):
    seen.update(x=x.dtype, table=table.dtype, own=own.dtype, scale=type(scale), config=config)
    return {"x": (x * scale).astype(dtype), "n": n}

  def f(x):
    own = x.astype(jnp.float16)
    return region(x, jnp.int32(3), own, dtype=jnp.float32, scale=np.float32(2), config=config)

  out = jax.eval_shape(mpjax.autocast(f, "bf16"), X)
  assert (out["x"].dtype, out["n"].dtype) == (jnp.float32, jnp.int32)
  wanted = {"x": jnp.bfloat16, "table": np.float32, "own": np.float16, "scale": np.float32, "config": config}
  assert seen == wanted


def test_half_precision_of_the_users_own_stays():
  seen = []

  @half
  def step(cache, x):
    seen.append((str(cache.dtype), str(x.dtype)))
    return cache.at[0].set(x.astype(cache.dtype)), x * 2

  loop = lambda cache, xs: jax.lax.scan(step, cache, xs)
  jax.eval_shape(mpjax.autocast(loop, "bf16"), np.zeros((2, 8), jnp.bfloat16), X)
  assert seen[-1] == ("bfloat16", "bfloat16")


def test_an_nnx_module_its_statistics_and_paths():
  seen = []

  class Counted(nnx.Module):
    def __init__(self):
      self.count, self.w = nnx.BatchStat(jnp.float32(1000.5)), nnx.Param(W["q"])

    def __call__(self, x):
      seen.append((str(x.dtype), str(self.w[...].dtype)))
      self.count[...] += 1
      return x @ self.w[...]

  class Top(nnx.Module):
    def __init__(self):
      self.inner = Counted()

    def __call__(self, x):
      return half(self.inner)(x)

  top, call = Top(), lambda top, x: top(x)
  mpjax.autocast(call, "bf16")(top, X)
  assert seen == [("bfloat16", "bfloat16")]
  assert (top.inner.count[...], top.inner.count[...].dtype) == (1001.5, jnp.float32)
  with pytest.raises(ValueError, match="'Top/inner'"):
    mpjax.autocast(call, {"base": "bf16", "overrides": {"Top/inner": "fp32"}})(top, X)


@pytest.mark.slow
def test_numerics_says_where_there_is_no_float32_to_compare_with():
  region = half(lambda x, k: jnp.tanh(x @ k) @ k)
  inspected = lambda loss: mpjax.inspect_numerics(loss, W, X, policy="bf16")
  report = inspected(lambda w, x: jnp.mean((region(x, w["q"]) @ w["o"]) ** 2))
  assert all(tensor.error is None or tensor.error < 0.05 for tensor in report.tensors)
  with_one = inspected(loss_with(half(lambda a, b: jnp.tanh(a) * b)))
  assert "errors there are unknown" not in with_one.table("findings")
  assert with_one.reference_loss == pytest.approx(float(exact(W, X)), rel=1e-6)
  assert "errors there are unknown" in inspected(loss_with(refused())).table("findings")


def test_a_function_is_traced_once_for_each_dtype():
  seen = []

  @jax.jit
  @half
  def region(x):
    seen.append(str(x.dtype))
    return x * 2

  for f in (region, mpjax.autocast(region, "bf16"), mpjax.autocast(region, "fp16"), region):
    jax.eval_shape(f, X)
  assert seen == ["float32", "bfloat16", "float16"]


def test_a_call_of_itself_without_float32_is_left_alone():
  calls = []

  @half
  def region(x):
    calls.append(str(x.dtype))
    return region(x) if len(calls) < 3 else x * 2

  jax.eval_shape(mpjax.autocast(region, "bf16"), X)
  assert calls == ["bfloat16"] * 3


def test_it_trains_in_float16_without_tracing_again():
  traces = []
  loss = lambda w, x: traces.append(1) or loss_with(refused())(w, x)
  step = mpjax.make_train_step(loss, optax.adam(1e-2), policy="fp16")
  state, losses, traced = step.init(W), [], []
  for _ in range(20):
    state, metrics = step(state, X)
    losses.append(float(metrics["loss"]))
    traced.append(len(traces))
  assert losses[-1] < losses[0]
  assert traced[1] == traced[-1]


def test_gradients_of_values_in_several_regions():
  region = half(lambda x: jnp.sin(x))
  functions = {
    "square": lambda x: jnp.sum(region(x) * region(x)),
    "loop": lambda x: jax.lax.fori_loop(0, 3, lambda i, y: y + region(x) * region(y), x).sum(),
    "product": lambda x: jnp.sum(region(x) @ x),
  }
  casts = lambda f: [order(f, "bf16") for order in ORDERS.values()]
  run = lambda x: {name: ([cast(x) for cast in casts(f)], jax.grad(f)(x)) for name, f in functions.items()}
  for name, (found, plain) in jit(run)(W["q"]).items():
    for one in found:
      assert [*leaf_failures("gradient", one, plain, 0.04)] == [], name


def test_an_autocast_inside_has_regions_of_its_own():
  seen = {}
  noted = lambda name: half(lambda x: seen.update({name: str(x.dtype)}) or jnp.sin(x))
  inner = mpjax.autocast(noted("inner"), "bf16")
  jax.eval_shape(mpjax.autocast(lambda x: noted("outer")(inner(x)), "fp16"), X)
  assert seen == {"inner": "bfloat16", "outer": "float16"}


def test_a_loop_whose_product_is_in_a_region_carries_half_precision():
  f = lambda x, ws: jax.lax.scan(lambda x, w: (half(jnp.matmul)(x, w), None), x, ws)[0]
  [carry] = mpjax.explain(f, X, np.stack([W["q"]] * 3), policy="bf16").carries
  assert carry.dtype == "bfloat16"
