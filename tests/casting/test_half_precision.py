"""`half_precision`: regions that run in the compute dtype as they stand."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import mpjax
from tests.casting._kernel import ORDERS, W, X, exact, kernel, loss_with, near

HALVES = {"bf16": jnp.bfloat16, "fp16": jnp.float16}
FORMS = {
  "as it is": lambda mix: mix,
  "jit": jax.jit,
  "checkpoint": jax.checkpoint,
  "vmap": jax.vmap,
  "scan": lambda mix: lambda a, b: jax.lax.scan(lambda _, ab: (None, mix(*ab)), None, (a, b))[1],
  "scan, kept": lambda mix: (
    lambda a, b: jax.lax.scan(lambda c, x: (mix(c, x), None), a, jnp.stack([b, b]))[0]
  ),
  "cond": lambda mix: lambda a, b: jax.lax.cond(jnp.sum(a) < 1e6, mix, lambda a, b: a, a, b),
}


@pytest.mark.parametrize("policy", HALVES)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("form", FORMS)
def test_a_kernel_runs_in_half_precision_forward_and_backward(policy, order, form):
  seen = []
  f = loss_with(FORMS[form](mpjax.half_precision(kernel(seen))))
  found = ORDERS[order](f, policy)(W, X)
  assert set(seen) == {jnp.dtype(HALVES[policy]).name}
  reference = exact if form != "scan, kept" else loss_with(lambda a, b: jnp.tanh(jnp.tanh(a) * b) * b)
  near(found, jax.grad(reference)(W, X))


@pytest.mark.parametrize("check_vma", [False, True])
@pytest.mark.parametrize("order", ORDERS)
def test_over_devices(order, check_vma):
  mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
  mix = mpjax.half_precision(kernel(seen := []))
  specs = {"in_specs": (P("data"), P("data")), "out_specs": P("data")}
  over = jax.shard_map(mix, mesh=mesh, check_vma=check_vma, **specs)
  near(ORDERS[order](loss_with(over), "bf16")(W, X), jax.grad(exact)(W, X))
  assert set(seen) == {"bfloat16"}


@pytest.mark.parametrize("order", ORDERS)
def test_in_a_loss_over_devices(order):
  mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
  mix = mpjax.half_precision(kernel(seen := []))
  loss = lambda w, x: jax.lax.pmean(loss_with(mix)(w, x), "data")
  over = jax.shard_map(loss, mesh=mesh, in_specs=(P(), P("data")), out_specs=P())
  near(ORDERS[order](over, "bf16")(W, X), jax.grad(exact)(W, X))
  assert set(seen) == {"bfloat16"}


def test_inside_another_derivative_rule():
  seen = []
  mix = mpjax.half_precision(kernel(seen))

  @jax.custom_vjp
  def outer(a, b):
    return mix(a, b)

  outer.defvjp(lambda a, b: (mix(a, b), (a, b)), lambda kept, ct: jax.vjp(mix, *kept)[1](ct))
  for order in ORDERS.values():
    near(order(loss_with(outer), "bf16")(W, X), jax.grad(exact)(W, X))
  assert set(seen) == {"bfloat16"}


@pytest.mark.parametrize("policy", [None, "fp32", "params=float32,compute=float32,output=float32"])
def test_it_is_the_function_where_nothing_is_half(policy):
  plain = mpjax.half_precision(lambda a, b: jnp.tanh(a) * b)
  f = loss_with(plain) if policy is None else mpjax.autocast(loss_with(plain), policy)
  assert jnp.array_equal(f(W, X), exact(W, X))
  refused = loss_with(mpjax.half_precision(kernel([])))
  with pytest.raises(TypeError, match="takes half precision alone"):
    (refused if policy is None else mpjax.autocast(refused, policy))(W, X)


def test_full_precision_wins_on_both_sides():
  mix = kernel([])
  for region in (
    mpjax.full_precision(mpjax.half_precision(mix)),
    mpjax.full_precision(jax.jit(mpjax.half_precision(mix))),
  ):
    with pytest.raises(TypeError, match="takes half precision alone"):
      mpjax.autocast(loss_with(region), "bf16")(W, X)


class Named:
  """A loss whose two kernels are in modules of their own."""

  def __init__(self, wrap=lambda f: f):
    self.seen = {"first": [], "second": []}

    def noted(name):
      def mix(a, b):
        self.seen[name].append(str(a.dtype))
        return jnp.tanh(a) * b

      return wrap(mpjax.half_precision(mix))

    first, second = noted("first"), noted("second")

    def loss(w, x):
      with jax.named_scope("first"):
        y = first(x @ w["q"], x @ w["k"])
      with jax.named_scope("second"):
        y = second(y @ w["q"], y @ w["k"])
      return jnp.mean((y @ w["o"]) ** 2)

    self.loss = loss


@pytest.mark.parametrize(
  "wrap", [lambda f: f, jax.jit, jax.checkpoint], ids=["as it is", "jit", "checkpoint"]
)
@pytest.mark.parametrize(
  ("policy", "overrides", "dtypes"),
  [
    ("bf16", {"second": "fp32"}, ("bfloat16", "float32")),
    ("bf16", {"first": "fp32"}, ("float32", "bfloat16")),
    ("bf16", {"second": "fp16"}, ("bfloat16", "float16")),
    ("fp32", {"second": "bf16"}, ("float32", "bfloat16")),
    ("bf16", {"(first|second)": "fp32"}, ("float32", "float32")),
  ],
)
@pytest.mark.parametrize("order", ["grad of autocast", "autocast of grad"])
def test_the_policy_of_its_module_decides(wrap, policy, overrides, dtypes, order):
  model = Named(wrap)
  under = {"base": policy, "overrides": overrides}
  found = ORDERS[order](model.loss, under)(W, X)
  assert tuple(model.seen[name][-1] for name in ("first", "second")) == dtypes
  near(found, jax.grad(Named().loss)(W, X))


def test_what_leaves_float16s_range_is_its_largest_value():
  seen = {}

  @mpjax.half_precision
  def region(x):
    seen["dtype"] = x.dtype
    return x

  def f(x):
    return region(jnp.exp(x)) * 0 + region(jnp.exp(x))

  out = mpjax.autocast(f, "fp16")(jnp.float32([1.0, 20.0]))
  assert seen["dtype"] == jnp.float16
  np.testing.assert_array_equal(out, np.float32([np.float16(np.exp(1.0)), 65504]))


@pytest.mark.parametrize(("dtype", "clipped"), [("float16", 0), ("bfloat16", 1), ("float32", 1)])
def test_what_was_float16_outside_is_within_its_range(dtype, clipped):
  def f(x):
    return mpjax.half_precision(jnp.sin)(x.astype(jnp.float32))

  program = jax.make_jaxpr(mpjax.autocast(f, "fp16"))(jnp.ones(3, dtype))
  assert str(program).count("name=clip") == clipped


def test_gradients_out_of_range_are_not_hidden():
  def f(x):
    return jnp.sum(mpjax.half_precision(lambda x: x * 2)(x) * 1e6)

  for order in ORDERS.values():
    assert not np.isfinite(order(f, "fp16")(jnp.ones(3))).any()


def test_what_enters_and_leaves_stays_half_precision():
  def mix(a, b):
    return jax.lax.optimization_barrier((a, b))[0]

  def f(w, x):
    return mpjax.half_precision(mix)(x @ w["q"], x @ w["k"]) @ w["o"]

  f = mpjax.autocast(f, "params=float32,compute=bfloat16,output=bfloat16")
  text = jax.export.export(jax.jit(f), platforms=["tpu"])(W, X).mlir_module()
  casts = [line for line in text.splitlines() if "stablehlo.convert" in line]
  assert casts
  assert not [line for line in casts if line.rstrip().endswith("xf32>")]


def test_an_island_reads_the_result_in_float32():
  def f(x):
    y = mpjax.half_precision(lambda x: x + 1)(x)
    return jax.nn.softmax(y)

  text = str(jax.make_jaxpr(mpjax.autocast(f, "bf16"))(X))
  assert "exp" in text
  assert "bf16[4,8] = exp" not in text


def test_arrays_of_its_own_and_other_dtypes_are_left_alone():
  table = jnp.arange(8.0)
  seen = []

  @mpjax.half_precision
  def region(x, n, half, *, scale, name):
    seen.extend([x.dtype, table.dtype, n.dtype, half.dtype, type(scale), name])
    return {"x": x * scale, "n": n}

  def f(x):
    out = region(x, jnp.int32(3), x.astype(jnp.float16), scale=2.0, name="n")
    return out["x"], out["n"]

  x, n = mpjax.autocast(f, "bf16")(X)
  assert [str(s) for s in seen[:4]] == ["bfloat16", "float32", "int32", "float16"]
  assert seen[4:] == [float, "n"]
  assert (x.dtype, n.dtype) == (jnp.float32, jnp.int32)


def test_a_call_without_float32_is_left_alone():
  calls = []

  @mpjax.half_precision
  def region(x):
    calls.append(x.dtype)
    return region(x) if len(calls) < 3 else x * 2

  mpjax.autocast(region, "bf16")(X)
  assert [str(dtype) for dtype in calls] == ["bfloat16"] * 3


def test_an_nnx_module():
  seen = []

  class Block(nnx.Module):
    def __init__(self, rngs):
      self.w = nnx.Param(jax.random.normal(rngs.params(), (8, 8)))
      self.count = nnx.Variable(jnp.zeros(()))

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
  jax.grad(mpjax.autocast(f, {"base": "fp8", "fp8": {"emulate": True}}))(W, X)
  assert set(seen) == {"bfloat16"}


@pytest.mark.slow
def test_numerics_says_where_there_is_no_float32_to_compare_with():
  with_one = mpjax.inspect_numerics(
    loss_with(mpjax.half_precision(lambda a, b: jnp.tanh(a) * b)), W, X, "bf16"
  )
  assert "takes no float32" not in str(with_one)
  assert with_one.reference_loss == pytest.approx(float(exact(W, X)), rel=1e-6)
  without = mpjax.inspect_numerics(loss_with(mpjax.half_precision(kernel([]))), W, X, "bf16")
  assert "takes no float32" in str(without)


def test_a_function_traced_before_and_after_is_traced_again():
  seen = []

  @jax.jit
  @mpjax.half_precision
  def region(x):
    seen.append(str(x.dtype))
    return x * 2

  for f in (region, mpjax.autocast(region, "bf16"), mpjax.autocast(region, "fp16"), region):
    f(X)
  assert seen == ["float32", "bfloat16", "float16"]


def test_it_trains_in_float16_without_tracing_again():
  calls = []
  mix = mpjax.half_precision(kernel([]))

  def loss(w, batch):
    calls.append(1)
    return loss_with(mix)(w, batch)

  step = mpjax.make_train_step(loss, optax.adam(1e-2), policy="fp16")
  state = step.init(W)
  first = None
  for _ in range(20):
    state, metrics = step(state, X)
    first = first if first is not None else float(metrics["loss"])
  assert float(metrics["loss"]) < first
  traced = len(calls)
  step(state, X)
  assert len(calls) == traced
