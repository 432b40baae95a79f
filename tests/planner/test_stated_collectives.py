"""The collectives that a program states, against bytes counted by hand and the targets' compilers."""

import jax
import jax.numpy as jnp
import optax
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import mpjax
from mpjax.jaxpr import rows
from mpjax.planner import get_target
from mpjax.planner.compiled._hlo import COLLECTIVES  # what the reader of programs looks for
from tests.planner._steps import F32, S, described, mesh_of, on

MESH = mesh_of(data=4, fsdp=2, tensor=1)
EACH = P(("data", "fsdp"))


def test_collectives_have_the_names_that_compiled_programs_have():
  assert {row.collective for _, row in rows() if row.collective} == COLLECTIVES


def planned(body, out):
  """The plan of a function of a device's rows, float32[8, 8] of 64."""
  step = jax.shard_map(body, mesh=MESH, in_specs=EACH, out_specs=out, check_vma=False)
  return mpjax.plan(lambda x: step(x), on(MESH, S((64, 8), F32), *EACH), target="h200:8", compile=False)


def scanned(x):
  return lax.scan(lambda total, _: (total + lax.psum(x, "data"), None), x, None, length=5)[0]


def branched(x):
  return lax.cond(x[0, 0] > 0, lambda x: x @ x.T @ x, lambda x: lax.psum(x, "data"), x)


ROW = 4 * 8  # bytes
HALVES = [[0, 1], [2, 3]]
# What is done, how the result lies, and (operation, bytes, count, group) of what crosses.
CASES = {
  "all-reduce": (lambda x: lax.psum(x, ("data", "fsdp")), P(), ("all-reduce", 8 * ROW, 1, 8)),
  "mean": (lambda x: lax.pmean(x, "data"), P("fsdp"), ("all-reduce", 8 * ROW, 1, 4)),
  "largest": (lambda x: lax.pmax(x, "fsdp"), P("data"), ("all-reduce", 8 * ROW, 1, 2)),
  "scatter": (lambda x: lax.psum_scatter(x, "data", tiled=True), EACH, ("reduce-scatter", 2 * ROW, 1, 4)),
  "gather": (lambda x: lax.all_gather(x, "data", tiled=True), P("fsdp"), ("all-gather", 32 * ROW, 1, 4)),
  "permute": (
    lambda x: lax.ppermute(x, "data", [(0, 1), (1, 0)]),
    EACH,
    ("collective-permute", 8 * ROW, 1, 0),
  ),
  "all-to-all": (lambda x: lax.all_to_all(x, "data", 0, 0, tiled=True), EACH, ("all-to-all", 8 * ROW, 1, 4)),
  "groups": (lambda x: lax.psum(x, "data", axis_index_groups=HALVES), EACH, ("all-reduce", 8 * ROW, 1, 2)),
  "one device": (lambda x: lax.psum(x, "tensor"), EACH, None),
  "loop": (scanned, P("fsdp"), ("all-reduce", 5 * 8 * ROW, 5, 4)),
  "branch": (branched, EACH, ("all-reduce", 8 * ROW, 1, 4)),
}
# Bytes that a device must send: what may cross is none, and of what is gathered or scattered all but its own.
SENT = {
  "all-reduce": 8 * ROW,
  "gather": 32 * ROW * 3 / 4,
  "scatter": 3 * 2 * ROW,
  "one device": 0,
  "branch": 0,
}


def test_bytes_are_those_of_the_results_on_a_device_and_the_time_floor_has_what_it_must_send():
  link = get_target("h200:8").interconnect
  for case, (body, out, expected) in CASES.items():
    plan = planned(body, out)
    found = [(c.operation, c.nbytes, c.count, c.group) for c in plan.collectives]
    assert found == ([expected] if expected else []), case
    assert {c.dtype for c in plan.collectives} <= {"float32"}, case
    if case in SENT:
      seconds = plan.floor.parts.get("interconnect", 0)
      assert seconds * link == pytest.approx(SENT[case]), case
      assert ("interconnect" in plan.floor.parts) == bool(SENT[case]), case


def test_modules_and_dtypes_are_told_apart():
  def body(x):
    with jax.named_scope("Net/one"):
      wide = lax.psum(x, "data")
    with jax.named_scope("Net/two"):
      return wide + lax.psum(x.astype(jnp.bfloat16), "data")

  wide, half = planned(body, P("fsdp")).collectives
  assert (wide.dtype, wide.nbytes, wide.sources) == ("float32", 8 * ROW, ("Net/one",))
  assert (half.dtype, half.nbytes, half.sources) == ("bfloat16", 4 * ROW, ("Net/two",))


def planned_step(policy, compile=False, **options):
  """The plan of a training step on 4 x 2 devices."""

  def loss(params, batch):
    x = batch["x"]
    return batch["scale"] * jnp.mean((jnp.tanh(x @ params["up"]) @ params["down"] - x) ** 2)

  params = {"up": S((256, 512), F32), "down": S((512, 256), F32)}
  rules = {"up": ("fsdp", None), "down": (None, "fsdp")}
  step = mpjax.make_train_step(loss, optax.sgd(0.1), policy, mesh=MESH, sharding=rules, **options)
  zeros = lambda: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), params)
  state, batch = jax.eval_shape(lambda: step.init(zeros())), {"x": S((64, 256), F32), "scale": S((), F32)}
  return mpjax.plan(step, *step.layout.shapes(state, batch), target="h200:8", compile=compile)


WEIGHTS = 2 * 256 * 512


def test_a_step_states_what_its_policy_says():
  narrow, eight = (
    {"base": "bf16", "reduce_dtype": "bfloat16"},
    {"base": "bf16", "gather_dtype": "float8_e4m3fn"},
  )
  for policy, gathered, reduced in (
    ("fp32", {"float32": 4 * WEIGHTS}, {"float32": 4 * WEIGHTS}),
    ("bf16", {"bfloat16": 2 * WEIGHTS}, {"float32": 4 * WEIGHTS}),
    (narrow, {"bfloat16": 2 * WEIGHTS}, {"bfloat16": 2 * WEIGHTS}),
    (eight, {"float8_e4m3fn": WEIGHTS}, {"float32": 4 * WEIGHTS}),
  ):
    found = [c for c in planned_step(policy).collectives if c.nbytes > 100]
    of = lambda operation, found=found: {c.dtype: c.nbytes for c in found if c.operation == operation}
    assert of("all-gather") == gathered, policy
    # Each of the two devices of `fsdp` has half, which is then added over `data`.
    halves = {dtype: n // 2 for dtype, n in reduced.items()}
    assert of("reduce-scatter") == of("all-reduce") == halves, policy
    groups = {(c.operation, c.group) for c in found}
    assert groups == {("all-gather", 2), ("reduce-scatter", 2), ("all-reduce", 4)}, policy


@pytest.mark.slow
@pytest.mark.aot
@pytest.mark.parametrize("gather", ["step", "block"])
def test_what_is_stated_is_what_the_compiler_makes(gather):
  described("h200:8")
  stated, made = (planned_step("bf16", compile=compile, gather=gather) for compile in (False, True))
  key = lambda c: (c.operation, c.dtype, c.group)
  large = lambda plan: {key(c): c.nbytes for c in plan.collectives if c.nbytes > 1000}
  if gather == "step":
    assert large(stated) == large(made)
    assert stated.floor.parts["interconnect"] == pytest.approx(made.floor.parts["interconnect"], rel=0.01)
  else:  # the compiler gathers the last parameter once, which is read at the end of one pass and in the next
    last = {("all-gather", "bfloat16", 2): 2 * 256 * 512}
    assert large(stated) == {key: n + last.get(key, 0) for key, n in large(made).items()}
