"""Matrix products of a plan: FLOPs by hand, dtypes, and which of them run at full rate."""

import jax
import jax.numpy as jnp
import pytest

import mpjax
from tests.planner._steps import BATCH, BF16, F32, OUT, PARAMS, B, D, H, S, layers, mlp, on

F16 = jnp.float16


def plan_of(step, *args, target="h200"):
  return mpjax.plan(step, *args, target=target, compile=False)


def flops_of(step, *args):
  return sum(product.flops for product in plan_of(step, *args).products)


def training_flops(loss):
  return lambda params, batch: jax.value_and_grad(loss)(params, batch)


def met_by_hand(size, taps, stride, pad):
  """Pairs of output and tap that meet an input, along one dimension."""
  outputs = (size + 2 * pad - taps) // stride + 1
  return sum(0 <= o * stride + t - pad < size for o in range(outputs) for t in range(taps))


def convolution(stride, padding, groups=1):
  options = {"dimension_numbers": ("NHWC", "HWIO", "NHWC"), "feature_group_count": groups}
  return lambda params, batch: jax.lax.conv_general_dilated(batch, params, (stride,) * 2, padding, **options)


FIRST, SECOND = 2 * B * D * H, 2 * B * H * OUT
SQUARE, STACK = S((D, D), F32), S((7, D, D), F32)
HALVED, KERNEL, IMAGES = convolution(2, ((1, 1), (1, 1))), S((3, 3, 4, 8), F32), S((2, 9, 9, 4), F32)
FLOPS = {
  # The first product needs no gradient of its input.
  "training": (training_flops(mlp), PARAMS, BATCH, 2 * FIRST + 3 * SECOND),
  "forward": (mlp, PARAMS, BATCH, FIRST + SECOND),
  "batch dims": (jax.vmap(jnp.matmul), S((5, 8, 16), F32), S((5, 16, 4), F32), 5 * 2 * 8 * 16 * 4),
  "vector": (jnp.dot, S((D,), F32), S((D,), F32), 2 * D),
  "scan": (layers, STACK, BATCH, 7 * 2 * B * D * D),
  "training of a scan": (training_flops(layers), STACK, BATCH, 7 * 3 * 2 * B * D * D),
  "nothing": (lambda a, b: a * b, S((D,), F32), S((D,), F32), 0),
  "unread": (lambda a, b: (a @ b, a + 1)[1], SQUARE, SQUARE, 0),
  "convolution": (
    convolution(1, "SAME"),
    KERNEL,
    S((2, 6, 6, 4), F32),
    64 * 2 * met_by_hand(6, 3, 1, 1) ** 2,
  ),
  "convolution with stride": (HALVED, KERNEL, IMAGES, 64 * 2 * met_by_hand(9, 3, 2, 1) ** 2),
  "gradient of a batch with stride": (
    jax.grad(lambda params, batch: HALVED(params, batch).sum(), 1),
    KERNEL,
    IMAGES,
    64 * 2 * met_by_hand(9, 3, 2, 1) ** 2,
  ),
  "convolution in groups": (
    convolution(1, "VALID", groups=2),
    S((3, 3, 2, 8), F32),
    S((2, 6, 6, 4), F32),
    2 * (2 * 4 * 4) * 8 * (3 * 3 * 2),
  ),
  "a branch counts once": (
    lambda w, x: jax.lax.cond(x.sum() > 0, lambda x: (x @ w).sum(), lambda x: (x @ (w + 1)).sum(), x),
    S((D, H), F32),
    S((B, D), F32),
    FIRST,
  ),
  "recomputation": (training_flops(jax.checkpoint(mlp)), PARAMS, BATCH, 3 * FIRST + 3 * SECOND),
}


def test_flops_are_those_by_hand():
  for name, (step, params, batch, want) in FLOPS.items():
    assert flops_of(step, params, batch) == want, name


def test_products_are_in_the_dtype_of_the_device():
  for target, dtype, precision, want in (
    ("h200", F32, None, "tensorfloat32"),
    ("h200", F32, "highest", "float32"),
    ("h200", F32, "float32", "float32"),
    ("h200", F32, "tensorfloat32", "tensorfloat32"),
    ("h200", BF16, None, "bfloat16"),
    ("h200", F16, None, "float16"),
    ("h200", F32, "BF16_BF16_F32_X3", "bfloat16 x3"),
    ("h200", F32, "TF32_TF32_F32_X3", "tensorfloat32 x3"),
    ("h200", F32, "F32_F32_F32", "float32"),
    ("t4", F32, None, "float32"),
    ("t4", BF16, None, "bfloat16"),
    ("t4", F16, None, "float16"),
    ("v5e", F32, None, "bfloat16"),
    ("v5e", F32, "tensorfloat32", "bfloat16 x3"),
    ("v5e", F32, "highest", "bfloat16 x6"),
    ("v5e", F32, "BF16_BF16_F32_X3", "bfloat16 x3"),
    ("v5e", F32, "TF32_TF32_F32_X3", "tensorfloat32 x3"),
    ("v5e", BF16, None, "bfloat16"),
    (None, F32, None, "float32"),
  ):
    step = lambda params, batch, precision=precision: jnp.matmul(batch, params, precision=precision)
    plan = plan_of(step, S((D, H), dtype), S((B, D), dtype), target=target)
    assert plan.matrix_flops() == {want: FIRST}, (target, dtype, precision)
  with jax.default_matmul_precision("BF16_BF16_F32_X3"):  # JAX drops it: the program asks for no precision
    plan = plan_of(convolution(1, "SAME"), S((3, 3, 4, 4), F32), S((2, 6, 6, 4), F32), target="v5e")
  assert plan.matrix_flops().keys() == {"bfloat16"}


product_of = lambda params, batch: batch @ params


def test_products_that_miss_full_rate_say_why():
  for target, shape, padded, why in (
    ("h200", (B, H, D), (B, H, D), ""),
    ("h200", (B, 250, D), (B, 256, D), "N=250 is not a multiple of 8"),
    ("h200", (B, H, 60), (B, H, 64), "K=60 is not a multiple of 8"),
    ("h200", (1, H, D), (8, H, D), "a matrix times a vector: bound by memory"),
    ("t4", (B, H, D), (B, H, D), "t4 has no matrix units for bfloat16"),
    ("t4", (1, H, 60), (1, H, 60), "t4 has no matrix units for bfloat16"),
    ("v5e", (B, H, D), (B, H, 128), "K=64 is not a multiple of 128"),
    ("v6e", (B, H, H), (B, H, H), ""),
    ("v6e", (B, 128, H), (B, 256, H), "N=128 is not a multiple of 256"),
  ):
    m, n, k = shape
    plan = plan_of(product_of, S((k, n), BF16), S((m, k), BF16), target=target)
    [product] = plan.products
    assert (product.shape, product.padded, product.why) == (shape, padded, why)
    assert (product.eligible, plan.eligible) == (not why, 0 if why else 1), (target, shape)


def test_what_a_gpu_has_no_units_for_takes_the_time_of_float32():
  size = 8192
  for target, rates in (
    ("t4", {F32: 8.1e12, BF16: 8.1e12, F16: 65e12}),
    ("v100", {F32: 15.7e12, BF16: 15.7e12, F16: 125e12}),
  ):
    for dtype, rate in rates.items():
      plan = plan_of(product_of, *[S((size, size), dtype)] * 2, target=target)
      assert plan.floor.parts["matrix units"] == pytest.approx(2 * size**3 / rate), (target, dtype)
      assert plan.eligible == (dtype == F16), (target, dtype)


def test_what_is_below_16_bits_has_the_rate_of_its_units_or_that_of_bfloat16():
  size = 4096
  of = lambda recipe, **options: (
    {"recipe": recipe, "emulate": True, "last_layer": True, "keep_last": 0} | options
  )
  for target, recipe, dtype, rate in (
    ("h200", of("auto"), "float8_e5m2", 1978.9e12),
    ("h200", of("mx"), "mxfp8", 989.4e12),
    ("b200", of("auto"), "mxfp8", 4500e12),
    ("b200", of("nvfp4"), "nvfp4", 9000e12),
    ("v5e", of("auto"), "float8_e4m3b11fnuz", 394e12),
    ("v5e", of("auto", gradient_dtype="e5m2"), "float8_e5m2", 394e12),
    ("v5e", of("current"), "float8_e4m3fn", 197e12),
    ("v6e", of("auto"), "float8_e4m3b11fnuz", 1836e12),
    ("tpu7x", of("per_channel"), "float8_e4m3fn", 2307e12),
    ("tpu7x", of("mx"), "mxfp8", 1153.5e12),
  ):
    loss = lambda w, x: jnp.mean((jnp.tanh(x) @ w) ** 2)
    policy = {"base": "fp8", "fp8": recipe | {"first_layer": True}}
    step = jax.grad(lambda w, x: loss(w, x))
    plan = mpjax.plan(step, *[S((size, size), F32)] * 2, policy=policy, target=target, compile=False)
    assert dtype in plan.matrix_flops(), (target, recipe, plan.matrix_flops())
    assert plan.floor.parts["matrix units"] == pytest.approx(2 * 2 * size**3 / rate), (target, recipe)
    assert ("emulated" in plan.fp8) == (rate in (989.4e12, 197e12, 1153.5e12)), plan.fp8
    assert f"\nfp8: {plan.fp8}\n" in str(plan)


def test_what_an_axis_of_the_compiler_divides_counts_its_share():
  mesh = jax.sharding.AbstractMesh((2, 4), ("data", "tensor"))
  whole, rows = jax.sharding.PartitionSpec(), jax.sharding.PartitionSpec("data")
  step = jax.shard_map(product_of, mesh=mesh, in_specs=(whole, rows), out_specs=rows, axis_names={"data"})
  plan = plan_of(step, on(mesh, S((D, H), BF16)), on(mesh, S((B, D), BF16), "data"), target="h100:8")
  assert sum(plan.matrix_flops().values()) == plan.model_flops == FIRST / 8
  assert plan.floor.parts["matrix units"] == pytest.approx(FIRST / 8 / 989.4e12)


def test_the_floor_takes_the_cheapest_branch():
  step = lambda w, b: jax.lax.cond(b.sum() > 0, lambda b: (b @ w).sum(), lambda b: b.sum(), b)
  x = S((256, 256), F32)
  plan = mpjax.plan(step, x, x, target="h200", compile=False)
  assert plan.floor.parts["matrix units"] == 0


def test_the_floor_moves_state_batch_and_results_whatever_a_cache_holds():
  loss = lambda w, b: jnp.mean(jnp.tanh(b @ w) ** 2)
  step = lambda w, b: w - jax.grad(loss)(w, b)
  w, b = S((512, 1024), F32), S((32, 512), F32)  # 4.3 MB, and an activation of 131 kB
  state = 2 * 512 * 1024 * 4 + 32 * 512 * 4
  for target, bandwidth in (("h200", 4.8e12), ("v5e", 8.19e11)):
    floor = mpjax.plan(step, w, b, target=target, compile=False, donate_argnums=0).floor
    assert (floor.bound, floor.moved_bytes) == ("memory", state), target
    assert floor.seconds == pytest.approx(state / bandwidth), target


def test_the_floor_leaves_out_what_a_step_need_not_read_or_write():
  table, few = S((4096, 256), F32), S((8,), jnp.int32)
  rows, whole = 8 * 256 * 4, 4096 * 256 * 4
  for step, args, moved in (
    (lambda table, at: table[at], (table, few), rows + 8 * 4),
    (lambda table, at: table[:8] * 2.0, (table, few), rows),
    (lambda table, x: table.at[3:11].set(x), (table, S((8, 256), F32)), rows),
    (lambda table, x: jax.lax.scan(lambda c, row: (c, 2 * row), 0.0, table)[1], (table, few), 2 * whole),
    (lambda table, x: table, (table, few), 0),
  ):
    floor = mpjax.plan(step, *args, target="h200", compile=False, donate_argnums=0).floor
    assert floor.moved_bytes == moved
