"""Plans of steps with Pallas kernels: a row for each, with what it states of its work."""

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas.ops.tpu.flash_attention import flash_attention

import mpjax
from mpjax.planner import get_target
from mpjax.planner._from_jaxpr import from_jaxpr
from mpjax.planner._time import compiled_time
from mpjax.planner.compiled._from_hlo import from_hlo
from mpjax.planner.compiled._work import state_kernels
from tests.planner._programs import Program
from tests.planner._steps import F32, S

W, X = S((512, 512), F32), S((2, 1024, 512), F32)


def attend(w, x):
  q = (x @ w).reshape(2, 1024, 4, 128).swapaxes(1, 2)
  return mpjax.half_precision(flash_attention)(q, q, q, causal=True).astype(jnp.float32).sum()


def plan_of(fun, *args):
  return mpjax.plan(fun, *args, target="v5e", compile=False)


def kernels(plan):
  return [row for row in plan.products if row.kernel]


@pytest.mark.parametrize(("policy", "dtype"), [("bf16", "bfloat16"), ("fp32", "float32")])
def test_each_kernel_has_a_row_with_its_dtypes(policy, dtype):
  made = plan_of(jax.grad(mpjax.autocast(attend, policy)), W, X)
  assert [(row.batch, row.dtype.split(", ")[0]) for row in kernels(made)] == [(1, dtype)] * 3
  assert {row.phase for row in kernels(made)} == {"forward", "backward"}
  assert "fused kernels: " in str(made)


def doubled(flops):
  cost = None if flops is None else pl.CostEstimate(flops=flops, bytes_accessed=0, transcendentals=0)

  def kernel(x, out):
    out[...] = 2 * x[...]

  def call(x):
    return pl.pallas_call(kernel, jax.ShapeDtypeStruct(x.shape, x.dtype), cost_estimate=cost)(x)

  return call


def test_stated_flops_count_by_repetition_and_do_not_bound_the_time():
  def scanned(x):
    return jax.lax.scan(lambda x, _: (doubled(10**12)(x), None), x, None, length=5)[0]

  made = plan_of(scanned, S((128, 128), jnp.bfloat16))
  (kernel,) = kernels(made)
  assert (kernel.batch, kernel.flops, made.matrix_flops(), made.eligible) == (5, 5 * 10**12, {}, 1)
  assert made.floor.parts["matrix units"] == 0  # causal attention states twice what it computes


def both_in_one_module(x):
  with jax.named_scope("attention"):
    return doubled(10**12)(x), doubled(5 * 10**12)(x[:64])


def seconds_on_a_gpu(fun):
  return mpjax.plan(fun, S((128, 128), jnp.bfloat16), target="h100", compile=False).time.seconds


def test_each_kernel_of_a_module_takes_the_time_of_its_own_flops():
  alone = seconds_on_a_gpu(doubled(10**12)), seconds_on_a_gpu(doubled(5 * 10**12))
  assert seconds_on_a_gpu(both_in_one_module) == pytest.approx(sum(alone), rel=1e-3)


@pytest.mark.parametrize("rows", [(128,), (64,), (64, 128)])
def test_a_compiled_kernel_is_the_traced_one_of_its_module_and_shapes(rows):
  traced = from_jaxpr(jax.make_jaxpr(both_in_one_module)(S((128, 128), jnp.bfloat16)))
  program = Program()
  main = program.computation("main")
  for size in rows:
    shape, triton = ("bf16", size, 128), {"custom_call_target": "__gpu$xla.gpu.triton"}
    main.add(
      "custom-call", shape, main.add("parameter", shape), op_name="jit(f)/attention/pallas_call", **triton
    )
  compiled = from_hlo(program.parse())
  state_kernels(compiled, traced)
  seconds = compiled_time(compiled, get_target("h100")).seconds
  own = sum(seconds_on_a_gpu(doubled({128: 10**12, 64: 5 * 10**12}[size])) for size in rows)
  assert seconds == pytest.approx(own, rel=1e-3)


def test_what_a_kernel_does_not_state_is_said_and_nothing_without_kernels():
  made = plan_of(doubled(None), S((128, 128), F32))
  assert kernels(made)[0].flops == 0
  assert "not stated" in made.table("products")
  without = plan_of(lambda w, x: (x @ w).sum(), W, X)
  assert kernels(without) == []
  assert "kernels of" not in without.table("all")
