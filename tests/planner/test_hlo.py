"""What is read from the text of compiled programs: sizes, names, lines, products, collectives."""

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from mpjax.planner import compile as compilers
from mpjax.planner import hlo, hlo_names, hlo_products
from mpjax.planner.targets import get_target

f32, bf16 = jnp.float32, jnp.bfloat16


def a_shape(*shape, dtype=f32):
  return jax.ShapeDtypeStruct(shape, dtype)


HEAD = "HloModule jit_step, is_scheduled=true, entry_computation_layout={()->f32[]}\n"

# A loop of five steps in a program with aliases, tiles, a tuple and the tables of its lines.
MODULE = """\
HloModule jit_step, is_scheduled=true, input_output_alias={ {0}: (2, {}, may-alias), {1, 0}: (0, {}, must-alias) }, \
entry_computation_layout={(f32[100,260]{0,1:T(8,128)}, s32[]{:T(128)}, bf16[7,129]{1,0:T(8,128)(2,1)})->f32[]}

FileNames
1 "/home/me/train.py"
2 "/venv/lib/python3.11/site-packages/optax/_src/base.py"

FunctionNames
1 "step"
2 "update"

FileLocations
1 {file_name_id=1 function_name_id=1 line=29 end_line=29 column=2 end_column=57}
2 {file_name_id=2 function_name_id=2 line=7 end_line=8 column=2 end_column=9}
3 {file_name_id=1 function_name_id=1 line=12 end_line=12 column=2 end_column=9}

StackFrames
1 {file_location_id=1 parent_frame_id=1}
2 {file_location_id=3 parent_frame_id=2}
3 {file_location_id=2 parent_frame_id=3}


%body (state.1: (s32[], f32[8])) -> (s32[], f32[8]) {
  %state.1 = (s32[]{:T(128)}, f32[8]{0:T(128)}) parameter(0)
  %i.1 = s32[]{:T(128)} get-tuple-element(%state.1), index=0
  %x.1 = f32[8]{0:T(128)} get-tuple-element(%state.1), index=1
  %tanh.3 = f32[8]{0:T(128)} tanh(%x.1), metadata={op_name="jit(step)/jvp(GPT)/h0/tanh" stack_frame_id=3}
  ROOT %tuple.1 = (s32[]{:T(128)}, /*index=1*/f32[8]{0:T(128)}) tuple(%i.1, %tanh.3)
}

%condition (state.2: (s32[], f32[8])) -> pred[] {
  %state.2 = (s32[]{:T(128)}, f32[8]{0:T(128)}) parameter(0)
  ROOT %less = pred[]{:T(512)} custom-call(%state.2), custom_call_target="less"
}

ENTRY %main.7 (w.1: f32[100,260], n.1: s32[], h.1: bf16[7,129]) -> (f32[8], f32[]) {
  %n.1 = s32[]{:T(128)} parameter(1), metadata={op_name="n"}
  %w.1 = f32[100,260]{0,1:T(8,128)} parameter(0), metadata={op_name="w"}
  %h.1 = bf16[7,129]{1,0:T(8,128)(2,1)} parameter(2)
  %copy-start = (f32[100,260]{0,1:T(8,128)S(1)}, f32[100,260]{0,1:T(8,128)}, u32[]{:S(2)}) copy-start(%w.1)
  %copy-done = f32[100,260]{0,1:T(8,128)S(1)} copy-done(%copy-start)
  %first.2 = (s32[]{:T(128)}, f32[8]{0:T(128)}) fusion(%n.1, %copy-done), kind=kLoop, calls=%not_here
  %loop.1 = (s32[]{:T(128)}, f32[8]{0:T(128)}) while(%first.2), condition=%condition, body=%body, backend_config={"known_trip_count":{"n":"5"},"x":{"y":")"}}
  %last = f32[8]{0:T(128)} get-tuple-element(%loop.1), index=1
  %sum = f32[]{:T(128)} custom-call(%last), custom_call_target="sum", called_computations={%condition, %body}
  ROOT %out = (f32[8]{0:T(128)}, f32[]{:T(128)}) tuple(%last, %sum)
}
"""


@pytest.fixture(scope="module")
def module():
  return hlo.parse(MODULE)


def test_computations_are_in_order_and_know_their_entry(module):
  assert list(module.computations) == ["body", "condition", "main.7"]
  assert module.entry == "main.7"
  assert list(module.computations["body"]) == ["state.1", "i.1", "x.1", "tanh.3", "tuple.1"]
  assert [i.name for i in module.computations["body"].values() if i.is_root] == ["tuple.1"]


def test_arguments_and_results_are_in_the_order_of_the_call(module):
  assert [(s.dtype, s.dims) for s in module.parameters()] == [
    ("f32", (100, 260)),
    ("s32", ()),
    ("bf16", (7, 129)),
  ]
  assert [(s.dtype, s.dims) for s in module.results()] == [("f32", (8,)), ("f32", ())]


def test_aliases_are_from_results_to_arguments(module):
  assert module.aliases == {0: 2, 1: 0}


def test_aliases_of_a_single_result_and_of_none():
  body = "ENTRY %e (x: f32[2]) -> f32[2] {\n  ROOT %x = f32[2]{0} parameter(0)\n}\n"
  layout = "entry_computation_layout={(f32[2]{0})->f32[2]{0}}"
  alone = f"HloModule m, input_output_alias={{ {{}}: (3, {{}}, may-alias) }}, {layout}\n{body}"
  assert hlo.parse(alone).aliases == {0: 3}
  assert hlo.parse(f"HloModule m, {layout}\n{body}").aliases == {}


@pytest.mark.parametrize(
  ("computation", "name", "operands", "called", "times"),
  [
    ("main.7", "copy-start", ["w.1"], [], 1),
    ("main.7", "first.2", ["n.1", "copy-done"], ["not_here"], 1),
    ("main.7", "loop.1", ["first.2"], ["condition", "body"], 5),
    ("main.7", "sum", ["last"], ["condition", "body"], 1),
    ("body", "tuple.1", ["i.1", "tanh.3"], [], 1),
  ],
)
def test_instruction_knows_what_it_reads_and_runs(module, computation, name, operands, called, times):
  instruction = module.computations[computation][name]
  assert instruction.operands == operands
  assert instruction.called == called
  assert instruction.trip_count == times


def test_loops_repeat_what_they_run(module):
  found = [(name, times, [c.name for c in callers]) for name, times, callers in module.repetitions()]
  assert found == [
    ("main.7", 1, []),
    ("condition", 5, ["loop.1"]),
    ("body", 5, ["loop.1"]),
    ("condition", 1, ["sum"]),
    ("body", 1, ["sum"]),
  ]


def test_asynchronous_copy_has_the_copy_its_source_and_a_counter(module):
  shapes = module.computations["main.7"]["copy-start"].shapes
  assert [(s.dtype, s.space) for s in shapes] == [("f32", 1), ("f32", 0), ("u32", 2)]
  assert [s.nbytes for s in shapes] == [264 * 128 * 4, 264 * 128 * 4, 4]


def test_frames_lead_from_a_line_to_its_callers(module):
  optax = "/venv/lib/python3.11/site-packages/optax/_src/base.py"
  assert module.lines == {
    1: [("/home/me/train.py", 29)],
    2: [("/home/me/train.py", 12), ("/home/me/train.py", 29)],
    3: [(optax, 7), ("/home/me/train.py", 12), ("/home/me/train.py", 29)],
  }


def test_source_is_the_users_line_not_the_librarys(module):
  tanh = module.computations["body"]["tanh.3"]
  assert hlo_names.source_of(module, tanh) == "train.py:12"
  assert hlo_names.source_of(module, module.computations["main.7"]["sum"]) == ""


def test_text_without_an_entry_is_refused():
  with pytest.raises(ValueError, match=r"no ENTRY computation: expected the text of an HLO module"):
    hlo.parse("HloModule nothing\n")


@pytest.mark.parametrize(
  ("text", "want"),
  [
    ("f32[]", [("f32", (), 4, 0)]),
    ("f32[3,5]{1,0}", [("f32", (3, 5), 60, 0)]),
    ("bf16[0,5]{1,0}", [("bf16", (0, 5), 0, 0)]),
    ("f32[64,100]{1,0:T(8,128)S(1)}", [("f32", (64, 100), 64 * 128 * 4, 1)]),
    (
      "(f32[2]{0}, /*index=1*/(s8[3]{0}, token[]), pred[])",
      [("f32", (2,), 8, 0), ("s8", (3,), 3, 0), ("pred", (), 1, 0)],
    ),
    ("token[]", []),
    ("()", []),
  ],
)
def test_shapes(text, want):
  assert [(s.dtype, s.dims, s.nbytes, s.space) for s in hlo.shapes(text)] == want


@pytest.mark.parametrize(
  ("dtype", "bits"),
  [
    *(("f32", 32), ("bf16", 16), ("f16", 16), ("f64", 64), ("pred", 8), ("s8", 8), ("u4", 4), ("s2", 2)),
    *(("f8e4m3fn", 8), ("f8e5m2", 8), ("f8e8m0fnu", 8), ("f4e2m1fn", 4), ("c64", 64), ("token", 0)),
  ],
)
def test_bits_of_an_element(dtype, bits):
  assert hlo.bits(dtype) == bits


@pytest.mark.parametrize(
  ("dtype", "dims", "layout", "elements"),
  [
    ("f32", (100, 260), "1,0", 100 * 260),
    ("f32", (100, 260), "1,0:T(8,128)", 104 * 384),
    ("f32", (100, 260), "0,1:T(8,128)", 264 * 128),
    ("f32", (260, 3), "0,1:T(4,128)", 4 * 384),
    ("bf16", (7, 129), "1,0:T(8,128)(2,1)", 8 * 256),
    ("f8e4m3fn", (7, 129), "1,0:T(8,128)(4,1)S(1)", 8 * 256),
    ("f32", (2, 3, 5), "1,2,0:T(8,128)", 2 * 8 * 128),
    ("f32", (2, 9, 130), "2,1,0:T(8,128)", 2 * 16 * 256),
    ("f32", (260,), "0:T(512)", 512),
    ("f32", (), ":T(128)", 128),
    ("s32", (6,), "0:T(8,128)", 8 * 128),
    ("f32", (0, 3), "1,0:T(8,128)", 0),
  ],
)
def test_padded_bytes(dtype, dims, layout, elements):
  assert hlo.padded_bytes(dtype, dims, layout) == elements * hlo.bits(dtype) // 8


@pytest.mark.parametrize(
  ("dtype", "name"),
  [
    *(("f32", "float32"), ("bf16", "bfloat16"), ("f16", "float16"), ("s32", "int32"), ("u8", "uint8")),
    *(("pred", "bool"), ("c64", "complex64"), ("f8e4m3fn", "float8_e4m3fn"), ("f8e5m2", "float8_e5m2")),
    *(("f8e8m0fnu", "float8_e8m0fnu"), ("f4e2m1fn", "float4_e2m1fn"), ("s4", "int4")),
  ],
)
def test_name_of_a_dtype_is_numpys(dtype, name):
  assert hlo.numpy_name(dtype) == name
  assert jnp.dtype(name).name == name


def test_elements_below_a_byte_are_packed():
  assert hlo.padded_bytes("s4", (3,), "0") == 2
  assert hlo.padded_bytes("u4", (10, 100), "1,0:T(8,128)") == 16 * 128 // 2


NAMES = [
  # name, modules, phase, operation
  ("jit(step)/jvp(GPT)/blocks/5/down/dot_general", "GPT/blocks/5/down", "forward", "dot_general"),
  ("jit(step)/transpose(jvp(GPT))/blocks/5/down/dot_general", "GPT/blocks/5/down", "backward", "dot_general"),
  ("jit(step)/transpose(jvp(GPT))/h0/checkpoint/rematted_computation/tanh", "GPT/h0", "backward", "tanh"),
  ("jit(step)/jvp(GPT)/h0/BTNH,BSNH->BNTS/dot_general", "GPT/h0", "forward", "dot_general"),
  ("jit(step)/jvp()/while/body/closed_call/mul", "", "forward", "mul"),
  ("jit(step)/jvp(vmap(Net))/fc/pjit(relu)/max", "Net/fc", "forward", "max"),
  ("jit(call)/call_exported/jit(flat)/jit(_step)/optimizer/add", "optimizer", "", "add"),
  ("jit(step)/jit(f)(a/b)/add", "", "", "add"),
  ("", "", "", ""),
]


@pytest.mark.parametrize(("name", "modules", "phase", "operation"), NAMES)
def test_what_a_name_says(name, modules, phase, operation):
  assert hlo_names.module_path(name) == modules
  assert hlo_names.phase_of(name) == phase
  assert hlo_names.operation_of(name) == operation


def test_names_that_the_compiler_joined_count_as_the_first():
  line = '  ROOT %x = f32[2]{0} parameter(0), metadata={op_name="jit(f)/A/mul;jit(f)/B/add"}'
  parsed = hlo.parse(f"{HEAD}ENTRY %e (x: f32[2]) -> f32[2] {{\n{line}\n}}\n")
  assert parsed.computations["e"]["x"].op_name == "jit(f)/A/mul"


def collectives_of(*lines, loop=None):
  """Collectives of a program of these lines; those of `loop` run seven times."""
  body = "".join(f"  {line}\n" for line in loop or ())
  inner = f"%b (t: (f32[8])) -> (f32[8]) {{\n{body}}}\n" if loop else ""
  call = (
    '  %w = (f32[8]{0}) while(%t), body=%b, backend_config={"known_trip_count":{"n":"7"}}\n' if loop else ""
  )
  text = "".join(f"  {line}\n" for line in lines)
  return hlo_products.collectives(
    hlo.parse(f"{HEAD}{inner}ENTRY %e (p: f32[8]) -> f32[8] {{\n{call}{text}}}\n")
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


def test_collectives_of_a_loop_count_each_time_and_add_up():
  line = "%a = f32[8]{0} all-reduce(%p), to_apply=%add"
  (found,) = collectives_of(f"{line}, {NAME}", loop=[f"ROOT {line}"])
  assert (found.nbytes, found.count) == (32 + 7 * 32, 8)
  assert found.sources == ("GPT/head",)


# Products, against counts of multiplications one by one.


def products_of(function, *args):
  compiled = jax.jit(function).lower(*args).compile()
  return hlo_products.kernel_products(hlo.parse(compiled.as_text()), "cpu")


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
  return hlo.parse(compilers.compile_step(function, args, [], described).text), described.kind


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


@pytest.mark.aot
@pytest.mark.parametrize("target", ["v5e", "h200"])
def test_flops_of_programs_for_described_devices(target):
  args = *model_arguments(f32), *model_arguments(bf16)
  both = lambda w, x, v, y: (model_gradient(w, x), model_gradient(v, y))
  module, kind = compile_for(target, both, *args)
  products = hlo_products.kernel_products(module, kind)
  assert total(products) in [f + g for f in model_flops() for g in model_flops()]
  if kind == "gpu":
    for dtype in ("f32", "bf16"):
      assert total([p for p in products if p.dtypes == (dtype, dtype)]) in model_flops(), dtype
    assert {"cublas", "cudnn"} <= {product.kernel for product in products} <= {"cublas", "cudnn", "triton"}
  else:
    # Casts of operands are part of a TPU's products, which take both dtypes.
    assert {product.kernel for product in products} == {"dot"}


@pytest.mark.aot
@pytest.mark.parametrize("target", ["v5e:2x2", "h200:4"])
def test_collectives_of_programs_for_described_devices(target):
  mesh = AbstractMesh((4,), ("data",), axis_types=(AxisType.Auto,))
  spec = PartitionSpec("data")
  each = [  # of [4096, 128] on a device: what is done with it, dtype, what that moves
    (lambda x: lax.psum(x, "data"), f32, "all-reduce", 1),
    (lambda x: lax.psum_scatter(x, "data", tiled=True), f32, "reduce-scatter", 1 / 4),
    (lambda x: lax.all_gather(x, "data", tiled=True), bf16, "all-gather", 4),
    (lambda x: lax.ppermute(x, "data", [(i, (i + 1) % 4) for i in range(4)]), bf16, "collective-permute", 1),
    (lambda x: lax.all_to_all(x, "data", 0, 0, tiled=True), f32, "all-to-all", 1),
  ]

  def local(*given):
    # Small results that depend on all of what crosses.
    moved = [move(x * 2) for (move, *_), x in zip(each, given, strict=True)]
    return [jnp.sum(jnp.tanh(x), axis=0, keepdims=True) for x in moved]

  sharded = jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
  place = NamedSharding(mesh, spec)
  args = [jax.ShapeDtypeStruct((4 * 4096, 128), dtype, sharding=place) for _, dtype, *_ in each]
  module, _ = compile_for(target, sharded, *args)
  found = {(c.operation, c.dtype): (c.nbytes, c.count) for c in hlo_products.collectives(module)}
  want = {
    (operation, jnp.dtype(dtype).name): (int(share * 4096 * 128 * jnp.dtype(dtype).itemsize), 1)
    for _, dtype, operation, share in each
  }
  assert found == want
