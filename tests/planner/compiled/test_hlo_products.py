"""The collectives and matrix products of compiled programs, against bytes and multiplications counted by hand."""

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from mpjax.planner import get_target
from mpjax.planner.compiled import _compile as compilers
from mpjax.planner.compiled import _hlo, _hlo_products
from tests.planner.compiled.programs import CROSSINGS, STEPS, VERSIONS, kept

pytestmark = pytest.mark.optimised
f32, bf16 = jnp.float32, jnp.bfloat16
HEAD = "HloModule jit_step, is_scheduled=true, entry_computation_layout={()->f32[]}\n"


def a_shape(*shape, dtype=f32):
  return jax.ShapeDtypeStruct(shape, dtype)


def collectives_of(*lines, loop=None):
  """Collectives of a program of these lines; those of `loop` run seven times."""
  body = "".join(f"  {line}\n" for line in loop or ())
  inner = f"%b (t: (f32[8])) -> (f32[8]) {{\n{body}}}\n" if loop else ""
  call = (
    '  %w = (f32[8]{0}) while(%t), body=%b, backend_config={"known_trip_count":{"n":"7"}}\n' if loop else ""
  )
  text = "".join(f"  {line}\n" for line in lines)
  return _hlo_products.collectives(
    _hlo.parse(f"{HEAD}{inner}ENTRY %e (p: f32[8]) -> f32[8] {{\n{call}{text}}}\n")
  )


NAME = 'metadata={op_name="jit(step)/transpose(jvp(GPT))/head/dot_general"}'
COLLECTIVES = [
  ([f"%a = f32[8]{{0}} all-reduce(%p), to_apply=%add, {NAME}"], [("all-reduce", "float32", 32, 1)]),
  (["%a = f32[] all-reduce(%p), to_apply=%add"], [("all-reduce", "float32", 4, 1)]),
  (
    ["%a = (f32[8]{0}, bf16[6]{0}) all-reduce(%p, %q), to_apply=%add"],
    [("all-reduce", "float32", 32, 1), ("all-reduce", "bfloat16", 12, 1)],
  ),
  (
    ["%s = f32[8]{0} all-reduce-start(%p), to_apply=%add", "%d = f32[8]{0} all-reduce-done(%s)"],
    [("all-reduce", "float32", 32, 1)],
  ),
  (
    [
      "%s = ((f32[8]{0}), f32[8]{0}) all-reduce-start(%p), replica_groups=mesh['data'=4] {'data'}",
      "%d = f32[8]{0} all-reduce-done(%s)",
    ],
    [("all-reduce", "float32", 32, 1)],
  ),
  (["%s = (f32[8]{0}, f32[32]{0}) all-gather-start(%p)", "%d = f32[32]{0} negate(%s)"], []),
  (
    ["%s = (f32[8]{0}, f32[32]{0}) all-gather-start(%p)", "%d = f32[32]{0} all-gather-done(%s)"],
    [("all-gather", "float32", 128, 1)],
  ),
  (
    [
      "%s = ((f32[8]{0}, f32[2]{0}), (f32[32]{0}, f32[8]{0})) all-gather-start(%p, %q)",
      "%d = (f32[32]{0}, f32[8]{0}) all-gather-done(%s)",
    ],
    [("all-gather", "float32", 160, 2)],
  ),
  (
    [
      "%s = (bf16[8]{0}, bf16[8]{0}, u32[], u32[]) collective-permute-start(%p)",
      "%d = bf16[8]{0} collective-permute-done(%s)",
    ],
    [("collective-permute", "bfloat16", 16, 1)],
  ),
  (["%r = bf16[2]{0} reduce-scatter(%p), to_apply=%add"], [("reduce-scatter", "bfloat16", 4, 1)]),
  (
    [
      "%s = ((bf16[8]{0}), bf16[2]{0}) reduce-scatter-start(%p), to_apply=%add",
      "%d = bf16[2]{0} reduce-scatter-done(%s)",
    ],
    [("reduce-scatter", "bfloat16", 4, 1)],
  ),
  (["%r = f32[4,2]{1,0} all-to-all(%p), dimensions={0}"], [("all-to-all", "float32", 32, 1)]),
  (["%c = f32[8]{0} custom-call(%p)", '%k = f32[8]{0} add(%c, %c), metadata={op_name="all-reduce"}'], []),
]


@pytest.mark.parametrize(("lines", "want"), COLLECTIVES)
def test_bytes_that_cross_devices(lines, want):
  found = collectives_of(*lines)
  assert [(c.operation, c.dtype, c.nbytes, c.count) for c in found] == want


@pytest.mark.parametrize(
  ("groups", "devices"),
  [
    ("replica_groups={{0,1,2,3},{4,5,6,7}}", 4),
    ("replica_groups={{0},{1}}", 1),
    ("replica_groups=[2,4]<=[8]", 4),
    ("replica_groups=[4,2]<=[2,4]T(1,0)", 2),
    ("replica_groups=mesh['data'=2,'fsdp'=4,'tensor'=1] {'fsdp'}", 4),
    ("replica_groups=mesh['data'=2,'fsdp'=4] {'data','fsdp'}", 8),
    ("replica_groups={}", 0),
    ("replica_groups=mesh['data'=8] {'data':(1)4}", 0),
    ("channel_id=1", 0),
  ],
)
def test_how_many_devices_exchange(groups, devices):
  (found,) = collectives_of(f"%a = f32[8]{{0}} all-reduce(%p), channel_id=7, {groups}, to_apply=%add")
  assert found.group == devices


@pytest.mark.parametrize("repeated", ["", ", calls=%async"])
def test_what_any_asynchronous_operation_runs_counts_once(repeated):
  inner = "%q = f32[8]{0} parameter(0)\n  ROOT %g = f32[32]{0} all-gather(%q), dimensions={0}"
  main = (
    "  %p = f32[8]{0} parameter(0)\n"
    "  %s = ((f32[8]{0}), f32[32]{0}, u32[]) async-start(%p), calls=%async\n"
    f"  %u = ((f32[8]{{0}}), f32[32]{{0}}, u32[]) async-update(%s){repeated}\n"
    f"  ROOT %d = f32[32]{{0}} async-done(%u){repeated}\n"
  )
  computation = f"%async (q: f32[8]) -> f32[32] {{\n  {inner}\n}}\n"
  module = _hlo.parse(f"{HEAD}{computation}ENTRY %e (p: f32[8]) -> f32[32] {{\n{main}}}\n")
  (found,) = _hlo_products.collectives(module)
  assert (found.operation, found.nbytes, found.count) == ("all-gather", 128, 1)


def test_collectives_of_a_loop_count_each_time_and_add_up():
  line = "%a = f32[8]{0} all-reduce(%p), to_apply=%add"
  (found,) = collectives_of(f"{line}, {NAME}", loop=[f"ROOT {line}"])
  assert (found.nbytes, found.count) == (32 + 7 * 32, 8)
  assert found.sources == ("GPT/head",)


# Products, against counts of multiplications one by one.


def products_of(function, *args):
  compiled = jax.jit(function).lower(*args).compile()
  return _hlo_products.kernel_products(_hlo.parse(compiled.as_text()), "cpu")


def total(products):
  return sum(product.flops for product in products)


@pytest.mark.parametrize(
  ("spec", "shapes"),
  [
    ("ij,jk->ik", [(32, 48), (48, 80)]),
    ("bij,bjk->bik", [(3, 32, 48), (3, 48, 80)]),
    ("bhtd,bhsd->bhts", [(2, 4, 64, 32), (2, 4, 64, 32)]),
    ("ij,jkl->ikl", [(32, 48), (48, 5, 16)]),
    ("ijk,jkl->il", [(32, 4, 12), (4, 12, 80)]),
  ],
)
@pytest.mark.parametrize("dtype", [f32, bf16])
def test_flops_of_products(spec, shapes, dtype):
  (product,) = products_of(functools.partial(jnp.einsum, spec), *(a_shape(*s, dtype=dtype) for s in shapes))
  letters = dict(zip("".join(spec.split("->")[0].split(",")), itertools.chain(*shapes), strict=True))
  assert product.flops == 2 * math.prod(letters.values())
  assert (product.kernel, product.times) == ("dot", 1)
  assert not product.fp8


def test_products_of_a_gradient_cost_twice_those_of_the_function():
  loss = lambda w, x: jnp.sum(jnp.tanh(x @ w[0]) @ w[1])
  found = products_of(jax.grad(loss), [a_shape(48, 64), a_shape(64, 32)], a_shape(16, 48))
  first, second = 2 * 16 * 48 * 64, 2 * 16 * 64 * 32
  # The second product's result is only summed, and the first argument has no gradient.
  assert total(found) in (2 * first + 2 * second, 2 * first + 3 * second)


def test_products_of_a_scan_count_each_time():
  scan = lambda w, x: lax.scan(lambda c, _: (jnp.tanh(c @ w), None), x, None, length=7)[0]
  (product,) = products_of(scan, a_shape(64, 64), a_shape(16, 64))
  assert (product.times, product.flops) == (7, 7 * 2 * 16 * 64 * 64)


def multiplications(size, taps, stride, low, high, dilation):
  """Pairs of result and tap that meet an input, along one dimension."""
  reach = (taps - 1) * dilation + 1
  results = (size + low + high - reach) // stride + 1
  at = [r * stride - low + t * dilation for r in range(results) for t in range(taps)]
  return sum(0 <= i < size for i in at)


CONVOLUTIONS = [
  # taps, stride, padding, dilation
  ((3, 3), (1, 1), ((0, 0), (0, 0)), (1, 1)),
  ((3, 3), (1, 1), ((1, 1), (1, 1)), (1, 1)),
  ((3, 3), (2, 2), ((1, 1), (1, 1)), (1, 1)),
  ((2, 2), (2, 2), ((0, 0), (0, 0)), (1, 1)),
  ((1, 1), (2, 1), ((0, 0), (0, 0)), (1, 1)),
  ((5, 3), (2, 3), ((2, 1), (0, 2)), (1, 1)),
  ((3, 3), (1, 1), ((2, 2), (2, 2)), (2, 2)),
]
IMAGES, KERNEL = ("NHWC", "HWIO", "NHWC"), (4, 12, 10, 16, 24)


def a_convolution(taps, stride, padding, dilation):
  """(function, arguments, its FLOPs) of 4 images of 12 x 10 with 16 features to 24."""
  n, height, width, features, made = KERNEL
  convolve = lambda x, w: lax.conv_general_dilated(
    x, w, stride, padding, rhs_dilation=dilation, dimension_numbers=IMAGES
  )
  met = math.prod(
    multiplications(size, taps[i], stride[i], *padding[i], dilation[i])
    for i, size in enumerate((height, width))
  )
  args = a_shape(n, height, width, features), a_shape(*taps, features, made)
  return convolve, args, 2 * n * features * made * met


@pytest.mark.parametrize(("taps", "stride", "padding", "dilation"), CONVOLUTIONS)
def test_flops_of_convolutions_leave_out_the_padding(taps, stride, padding, dilation):
  convolve, args, flops = a_convolution(taps, stride, padding, dilation)
  assert total(products_of(convolve, *args)) == flops


@pytest.mark.parametrize(("taps", "stride", "padding", "dilation"), CONVOLUTIONS)
def test_gradients_of_convolutions_multiply_as_often_as_the_function(taps, stride, padding, dilation):
  convolve, args, flops = a_convolution(taps, stride, padding, dilation)
  gradients = jax.grad(lambda x, w: jnp.sum(jnp.tanh(convolve(x, w))), argnums=(0, 1))
  assert total(products_of(gradients, *args)) == 3 * flops


def test_grouped_convolution_multiplies_within_groups():
  convolve = lambda x, w: lax.conv_general_dilated(
    x, w, (1, 1), "VALID", dimension_numbers=IMAGES, feature_group_count=4
  )
  found = products_of(convolve, a_shape(2, 8, 8, 16), a_shape(3, 3, 4, 24))
  assert total(found) == 2 * 2 * 6 * 6 * 24 * 3 * 3 * 4


# The same on programs for described devices.


def compile_for(target, function, *args):
  described = get_target(target)
  if lacks := compilers.missing(described):
    pytest.skip(lacks)
  return _hlo.parse(compilers.compile_step(function, args, [], described).text), described.kind


def model_gradient(w, x):
  """Of a convolution with a stride, a product and a batched one, whose FLOPs are below."""

  def loss(w, x):
    h = jnp.tanh(lax.conv_general_dilated(x, w["conv"], (2, 2), ((1, 1), (1, 1)), dimension_numbers=IMAGES))
    h = jnp.tanh(h.reshape(8, 256, 128) @ w["up"])
    h = jnp.einsum("btd,bsd->bts", h, h)
    return jnp.sum(jnp.tanh(h))

  return jax.grad(loss)(w, x)


def model_arguments(dtype):
  weights = {"conv": a_shape(3, 3, 64, 128, dtype=dtype), "up": a_shape(128, 256, dtype=dtype)}
  return weights, a_shape(8, 32, 32, 64, dtype=dtype)


def model_flops():
  conv = 2 * 8 * 64 * 128 * multiplications(32, 3, 2, 1, 1, 1) ** 2
  up = 2 * 8 * 256 * 128 * 256
  scores = 2 * 8 * 256 * 256 * 256
  # The images have no gradient. Both operands of the scores are one value: a compiler may add up what
  # multiplies it and then multiply once.
  return [2 * conv + 3 * up + n * scores for n in (2, 3)]


@pytest.mark.slow
@pytest.mark.aot
@pytest.mark.parametrize("target", ["v5e", "h200"])
def test_flops_of_programs_for_described_devices(target):
  args = *model_arguments(f32), *model_arguments(bf16)
  both = lambda w, x, v, y: (model_gradient(w, x), model_gradient(v, y))
  module, kind = compile_for(target, both, *args)
  products = _hlo_products.kernel_products(module, kind)
  assert total(products) in [f + g for f in model_flops() for g in model_flops()]
  if kind == "gpu":
    for dtype in ("f32", "bf16"):
      assert total([p for p in products if p.dtypes == (dtype, dtype)]) in model_flops(), dtype
    assert {"cublas", "cudnn"} <= {product.kernel for product in products} <= {"cublas", "cudnn", "triton"}
  else:
    # Casts of operands are part of a TPU's products, which take both dtypes.
    assert {product.kernel for product in products} == {"dot"}


def bytes_of(program):
  found = _hlo_products.collectives(_hlo.parse(program.text))
  return {(c.operation, c.dtype): (c.nbytes, c.count) for c in found}


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("target", ["v5e:2x2", "h200:4"])
def test_every_collective_is_its_bytes_in_the_forms_of_each_release(version, target):
  want = {
    (operation, jnp.dtype(dtype).name): (int(share * 4096 * 128 * jnp.dtype(dtype).itemsize), 1)
    for _, dtype, operation, share in CROSSINGS
  }
  assert bytes_of(kept(version, "crossing", target)) == want


@pytest.mark.parametrize(("name", "target"), [(name, t) for name in ("data", "fsdp") for t in STEPS[name][1]])
def test_a_step_crosses_as_much_on_each_release(name, target):
  one, *others = (bytes_of(kept(version, name, target)) for version in VERSIONS)
  weights = 2 * 512 * 2048
  assert all(other == one for other in others)
  whole = one["all-reduce", "bfloat16"] if name == "data" else one["all-gather", "bfloat16"]
  assert whole[0] == 2 * weights
