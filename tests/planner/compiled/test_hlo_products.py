"""The collectives and matrix products of compiled programs, against bytes and multiplications counted by hand."""

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from mpjax.planner import get_target
from mpjax.planner._program import collectives_of
from mpjax.planner._time import compiled_time
from mpjax.planner.compiled._from_hlo import from_hlo
from mpjax.planner.compiled._hlo import parse
from mpjax.planner.compiled._work import group_of
from mpjax.planner.compiled._worker import module_proto
from tests.planner.compiled._hlo_text import computation, program
from tests.planner.compiled.programs import CROSSINGS, KEPT, VERSIONS, parsed

pytestmark = pytest.mark.optimised
f32, bf16 = jnp.float32, jnp.bfloat16


def collectives(module):
  """The collectives of a module."""
  return collectives_of(from_hlo(module))


def products_in(module, kind="gpu"):
  """Each product of a module, with its operation and how often it runs."""
  return [(p, o, times) for o, times in from_hlo(module, kind).each() for p in o.products if p.flops]


def a_shape(*shape, dtype=f32):
  return jax.ShapeDtypeStruct(shape, dtype)


NAME = 'metadata={op_name="jit(step)/transpose(jvp(GPT))/head/dot_general"}'
REDUCED, GATHERED = ("all-reduce", "float32", 32, 1), ("all-gather", "float32", 128, 1)
SCATTERED = ("reduce-scatter", "bfloat16", 4, 1)
P, Q, WIDE, NARROW = "f32[8]{0}", "bf16[8]{0}", "f32[32]{0}", "bf16[32]{0}"
READ = f"%p = {P} parameter(0); %q = {Q} parameter(1)"


def begun(operation, start, done, rest, operands="%p"):
  """An operation that begins in a line and ends in another."""
  return f"%s = {start} {operation}-start({operands}), {rest}; %d = {done} {operation}-done(%s)"


# Lines of a program, and what crosses in it.
OF_TWO = f"(({P}, {Q}), ({WIDE}, {NARROW}))", f"({WIDE}, {NARROW})"
PAIRS, SCATTER = "source_target_pairs={{0,1}}", "dimensions={0}, to_apply=%add"
COLLECTIVES = [
  (f"%a = {P} all-reduce(%p), to_apply=%add, {NAME}", [REDUCED]),
  (f"%a = ({P}, {Q}) all-reduce(%p, %q), to_apply=%add", [REDUCED, ("all-reduce", "bfloat16", 16, 1)]),
  (begun("all-reduce", P, P, "to_apply=%add"), [REDUCED]),
  (begun("all-gather", f"({P}, {WIDE})", WIDE, "dimensions={0}"), [GATHERED]),
  (begun("all-gather", *OF_TWO, "dimensions={0}", "%p, %q"), [("all-gather", "bfloat16", 64, 1), GATHERED]),
  (
    begun("collective-permute", f"({Q}, {Q}, u32[], u32[])", Q, PAIRS, "%q"),
    [("collective-permute", "bfloat16", 16, 1)],
  ),
  (f"%r = bf16[2]{{0}} reduce-scatter(%q), {SCATTER}", [SCATTERED]),
  (begun("reduce-scatter", f"(({Q}), bf16[2]{{0}})", "bf16[2]{0}", SCATTER, "%q"), [SCATTERED]),
  ("%r = f32[4,2]{1,0} all-to-all(%p), dimensions={0}", [("all-to-all", "float32", 32, 1)]),
  (f'%c = {P} custom-call(%p); %k = {P} add(%c, %c), metadata={{op_name="all-reduce"}}', []),
]


def test_bytes_that_cross_devices():
  for lines, want in COLLECTIVES:
    found = collectives(program(f"{READ}; {lines}"))
    assert sorted((c.operation, c.dtype, c.nbytes, c.count) for c in found) == sorted(want), lines


def test_which_devices_exchange():
  for groups, devices in (
    ("replica_groups={{0,1,2,3},{4,5,6,7}}", (0, 1, 2, 3)),
    ("replica_groups={{3,7},{0,4}}", (3, 7)),
    ("replica_groups={{0},{1}}", (0,)),
    ("replica_groups=[2,4]<=[8]", (0, 1, 2, 3)),
    ("replica_groups=[4,2]<=[2,4]T(1,0)", (0, 4)),
    ("replica_groups=mesh['data'=2,'fsdp'=4,'tensor'=1] {'data'}", (0, 4)),
    ("replica_groups=mesh['data'=2,'fsdp'=4] {'data','fsdp'}", tuple(range(8))),
    ("replica_groups=mesh['data'=8] {'data':(1)4}", (0, 2, 4, 6)),
    ("replica_groups={}", ()),
  ):
    lines = f"{READ}; %a = f32[8]{{0}} all-reduce(%p), channel_id=7, {groups}, to_apply=%add"
    module = program(lines)
    assert tuple(group_of(module.root)) == devices, groups
    (found,) = collectives(module)
    assert found.group == len(devices), groups


def test_collectives_of_a_loop_count_each_time_and_add_up():
  line = "%a = f32[8]{0} all-reduce(%p), to_apply=%add"
  body = computation("%b", f"%p = f32[8]{{0}} parameter(0); ROOT {line}")
  test = computation("%t", "%p = f32[8]{0} parameter(0); ROOT %c = pred[] custom-call(%p)")
  loop = '%w = f32[8]{0} while(%p), condition=%t, body=%b, backend_config={"known_trip_count":{"n":"7"}}'
  (found,) = collectives(program(f"{READ}; {loop}; {line}, {NAME}", body + test))
  assert (found.nbytes, found.count) == (32 + 7 * 32, 8)
  assert found.sources == ("GPT/head",)


def bytes_of(*kept):
  return {(c.operation, c.dtype): (c.nbytes, c.count) for c in collectives(parsed(*kept))}


def test_every_collective_is_its_bytes_in_the_forms_of_each_release():
  want = {
    (operation, jnp.dtype(dtype).name): (int(share * 4096 * 128 * jnp.dtype(dtype).itemsize), 1)
    for _, dtype, operation, share in CROSSINGS
  }
  for version, target in itertools.product(VERSIONS, ("v5e:2x2", "h200:4")):
    assert bytes_of(version, "crossing", target) == want, (version, target)


# Products, against counts of multiplications one by one.


def total(products):
  return sum(product.flops * times for product, _, times in products)


def multiplications(size, taps, stride, low, high, dilation):
  """Pairs of result and tap that meet an input, along one dimension."""
  reach = (taps - 1) * dilation + 1
  results = (size + low + high - reach) // stride + 1
  at = [r * stride - low + t * dilation for r in range(results) for t in range(taps)]
  return sum(0 <= i < size for i in at)


# Taps, stride, padding, dilation.
CONVOLUTIONS = [
  ((3, 3), (1, 1), ((0, 0), (0, 0)), (1, 1)),
  ((3, 3), (1, 1), ((1, 1), (1, 1)), (1, 1)),
  ((3, 3), (2, 2), ((1, 1), (1, 1)), (1, 1)),
  ((2, 2), (2, 2), ((0, 0), (0, 0)), (1, 1)),
  ((1, 1), (2, 1), ((0, 0), (0, 0)), (1, 1)),
  ((5, 3), (2, 3), ((2, 1), (0, 2)), (1, 1)),
  ((3, 3), (1, 1), ((2, 2), (2, 2)), (2, 2)),
]


def convolve(x, w, stride, padding, dilation=(1, 1), groups=1):
  images = {"dimension_numbers": ("NHWC", "HWIO", "NHWC"), "feature_group_count": groups}
  return lax.conv_general_dilated(x, w, stride, padding, rhs_dilation=dilation, **images)


def a_convolution(taps, stride, padding, dilation):
  """(function, arguments, its FLOPs) of 4 images of 12 x 10 with 16 features to 24."""
  sizes = (12, 10)
  function = functools.partial(convolve, stride=stride, padding=padding, dilation=dilation)
  met = [multiplications(sizes[i], taps[i], stride[i], *padding[i], dilation[i]) for i in range(2)]
  return function, (a_shape(4, *sizes, 16), a_shape(*taps, 16, 24)), 2 * 4 * 16 * 24 * math.prod(met)


def test_flops_of_convolutions_leave_out_the_padding():
  for row in CONVOLUTIONS:
    function, args, flops = a_convolution(*row)
    module = parse(module_proto(jax.jit(function).lower(*args).compile()))
    assert total(products_in(module, "cpu")) == flops, row


# What multiplies on a GPU: lines that read `a` of [8, 16] and `b` of [16, 4].
GEMM = '{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],"lhs_batch_dimensions":[]}}'
CUBLAS = f'custom_call_target="__cublas$gemm", backend_config={{"gemm_backend_config":{GEMM}}}'
DOT_OF = "ROOT %d = f32[8,4] dot(%a, %b), DOT"
FUSION = 'ROOT %f = f32[8,4] fusion(%a, %b), kind=kCustom, calls=%gemm, backend_config={"fusion_backend_config":{"kind":"KIND"}}'


def test_a_gpus_products_are_of_the_kernel_that_multiplies():
  for dtypes, line, kernel in (
    (("f32", "f32"), DOT_OF, "loop"),
    (("f32", "f32"), FUSION.replace("KIND", "__loop"), "loop"),
    (("bf16", "bf16"), f"ROOT %d = (bf16[8,4], s8[32]) custom-call(%a, %b), {CUBLAS}", "cublas"),
    (("f8e4m3fn", "f8e5m2"), FUSION.replace("KIND", "__triton_gemm"), "triton"),
    (("f8e4m3fn", "f8e4m3fn"), FUSION.replace("KIND", "__cudnn$fusion"), "cudnn"),
    (("f4e2m1fn", "f4e2m1fn"), FUSION.replace("KIND", "__triton_nested_gemm_fusion"), "triton"),
  ):
    read = f"%a = {dtypes[0]}[8,16] parameter(0); %b = {dtypes[1]}[16,4] parameter(1)"
    inside = DOT_OF
    if dtypes[0] == "f4e2m1fn":  # with scales
      read += "; %s = f8e4m3fn[8,1] parameter(2); %t = f8e4m3fn[1,4] parameter(3)"
      inside = "ROOT %d = bf16[8,4] scaled-dot(%a, %b, %s, %t), DOT"
    module = program(f"{read}; {line}", computation("%gemm", f"{read}; {inside}"))
    ((found, *_),) = products_in(module)
    assert (found.kernel, found.operands, found.flops) == (kernel, dtypes, 2 * 8 * 16 * 4), line


@pytest.mark.parametrize("config", ["", ', backend_config={"triangular_solve_options":{"lower":true}}'])
def test_a_call_of_cublas_that_is_no_product_leaves_the_others_readable(config):
  read = "%a = f32[8,16] parameter(0); %b = f32[16,4] parameter(1); %u = f32[8,8] parameter(2)"
  product = f"%d = f32[8,4] custom-call(%a, %b), {CUBLAS}"
  solve = f'ROOT %s = f32[8,4] custom-call(%u, %d), custom_call_target="__cublas$triangularSolve"{config}'
  module = program(f"{read}; {product}; {solve}")
  ((found, *_),) = products_in(module)
  assert found.flops == 2 * 8 * 16 * 4
  assert compiled_time(from_hlo(module), get_target("h100")).parts.keys() == {"products", "element-wise"}


def test_cudnns_calls_with_a_stride_multiply_as_often_in_each_pass():
  images, weights, made = "f32[4,12,10,16]", "f32[3,3,16,24]", "f32[4,6,5,24]"
  flops = a_convolution((3, 3), (2, 2), ((1, 1), (1, 1)), (1, 1))[-1]
  rest = "window={size=3x3 stride=2x2 pad=1_1x1_1}, dim_labels=b01f_01io->b01f"
  for call, left, right, out in (
    ("convForward", images, weights, made),
    ("convBackwardInput", made, weights, images),
    ("convBackwardFilter", images, made, weights),
  ):
    read = f"%a = {left} parameter(0); %b = {right} parameter(1)"
    line = f'ROOT %c = ({out}, u8[0]) custom-call(%a, %b), custom_call_target="__cudnn${call}", {rest}'
    ((found, *_),) = products_in(program(f"{read}; {line}"))
    assert (found.kernel, found.flops) == ("cudnn", flops), call


def training_of(layers, width, rows):
  """FLOPs of a training step of a chain of square products; the first has no gradient of what it reads."""
  return (3 * layers - 1) * 2 * rows * width * width


def kept_flops():
  """FLOPs of the functions whose programs are kept, on each device."""
  # Four convolutions of 3 x 3, 16 features to 16, of 32 images of 16 x 16.
  convolution = 2 * 32 * 16 * 16 * multiplications(16, 3, 1, 1, 1, 1) ** 2
  return {
    "training": 9 * 2 * 128 * 64 * 64,  # a scan has all three products of every layer
    "step": training_of(6, 256, 2048),
    "half precision": training_of(6, 256, 512),
    "wide layers": training_of(4, 512, 32),
    "scan": 18 * 2 * 2048 * 128 * 128,
    "scan in half precision": 18 * 2 * 512 * 256 * 256,
    "convolutions": 11 * convolution,
    "updating": 2 * 64 * 512 * 512,
    "branching": 2 * 2 * 256**3,
    "crossing": 0,
    "data": 5 * 2 * 1024 * 512 * 2048,  # the rows of one of four devices
    "fsdp": 5 * 2 * 512 * 512 * 2048,
  }


def test_flops_and_kernels_of_programs_that_compilers_for_devices_made():
  known = kept_flops()
  kernels = {"cpu": {"dot"}, "tpu": {"dot"}, "gpu": {"cublas", "cudnn"}}
  for version, name, target in KEPT:
    kind = get_target(target).kind
    products = products_in(parsed(version, name, target), kind)
    made = total(products)
    kinds = {product.kernel for product, *_ in products}
    if name == "computing again":  # which an older compiler for CPUs does not
      once = training_of(6, 256, 2048)
      assert made in (once, once + 6 * 2 * 2048 * 256 * 256), (version, target)
    else:
      assert made == known[name], (version, name, target)
    assert kinds <= kernels[kind], (version, name, target)
    if kind == "gpu":
      dtype = "bf16" if "half" in name or name in ("data", "fsdp") else "f32"
      assert {product.operands for product, *_ in products} <= {(dtype, dtype)}, (version, name)
      assert ("cudnn" in kinds) == (name == "convolutions")
