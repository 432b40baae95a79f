"""The collectives that a program states, against bytes counted by hand and the targets' compilers."""

import jax
import jax.numpy as jnp
import optax
import pytest
from jax import lax
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

import mpjax
from mpjax.jaxpr import rows
from mpjax.planner import get_target
from mpjax.planner.compiled import _compile as compilers
from mpjax.planner.compiled._hlo_opcodes import COLLECTIVES

P = PartitionSpec
MESH = AbstractMesh((4, 2, 1), ("data", "fsdp", "tensor"), axis_types=(AxisType.Auto,) * 3)
ROWS, WIDTH = 64, 8


def test_collectives_have_the_names_that_compiled_programs_have():
  assert {row.collective for _, row in rows() if row.collective} == COLLECTIVES


def planned(body, out):
  """The plan of a function of a device's rows, float32[8, 8] of 64."""
  divided = P(("data", "fsdp"))

  def step(x):
    return jax.shard_map(body, mesh=MESH, in_specs=divided, out_specs=out, check_vma=False)(x)

  x = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32, sharding=NamedSharding(MESH, divided))
  return mpjax.plan(step, (x,), target="h200:8", compile=False)


def scanned(x):
  return lax.scan(lambda total, _: (total + lax.psum(x, "data"), None), x, None, length=5)[0]


def branched(x):
  return lax.cond(x[0, 0] > 0, lambda x: x @ x.T @ x, lambda x: lax.psum(x, "data"), x)


ROW = 4 * WIDTH
CASES = {
  "all-reduce": (lambda x: lax.psum(x, ("data", "fsdp")), P(), [("all-reduce", 8 * ROW, 1, 8)]),
  "mean": (lambda x: lax.pmean(x, "data"), P("fsdp"), [("all-reduce", 8 * ROW, 1, 4)]),
  "largest": (lambda x: lax.pmax(x, "fsdp"), P("data"), [("all-reduce", 8 * ROW, 1, 2)]),
  "reduce-scatter": (
    lambda x: lax.psum_scatter(x, "fsdp", tiled=True),
    P(("data", "fsdp")),
    [("reduce-scatter", 4 * ROW, 1, 2)],
  ),
  "all-gather": (
    lambda x: lax.all_gather(x, "data", tiled=True),
    P("fsdp"),
    [("all-gather", 32 * ROW, 1, 4)],
  ),
  "permute": (
    lambda x: lax.ppermute(x, "data", [(0, 1), (1, 0)]),
    P(("data", "fsdp")),
    [("collective-permute", 8 * ROW, 1, 0)],
  ),
  "all-to-all": (
    lambda x: lax.all_to_all(x, "data", 0, 0, tiled=True),
    P(("data", "fsdp")),
    [("all-to-all", 8 * ROW, 1, 4)],
  ),
  "groups": (
    lambda x: lax.psum(x, "data", axis_index_groups=[[0, 1], [2, 3]]),
    P(("data", "fsdp")),
    [("all-reduce", 8 * ROW, 1, 2)],
  ),
  "one device": (lambda x: lax.psum(x, "tensor"), P(("data", "fsdp")), []),
  "loop": (scanned, P("fsdp"), [("all-reduce", 5 * 8 * ROW, 5, 4)]),
  "branch": (branched, P(("data", "fsdp")), [("all-reduce", 8 * ROW, 1, 4)]),
}


@pytest.mark.parametrize("case", CASES)
def test_bytes_are_those_of_the_results_on_a_device(case):
  body, out, expected = CASES[case]
  found = planned(body, out).collectives
  assert [(c.operation, c.nbytes, c.count, c.group) for c in found] == expected
  assert {c.dtype for c in found} <= {"float32"}


def test_of_a_conditional_what_may_cross_is_listed_and_the_floor_has_what_must():
  plan = planned(*CASES["branch"][:2])
  assert [c.operation for c in plan.collectives] == ["all-reduce"]
  assert "interconnect" not in plan.floor.parts


def test_keys_cross_as_their_words():
  def body(x):
    keys = jax.random.split(jax.random.key(0), 4)
    return x + jax.random.normal(lax.all_gather(keys, "data", tiled=True)[0])

  found = planned(body, P(("data", "fsdp"))).collectives
  assert [(c.operation, c.dtype, c.nbytes) for c in found] == [("all-gather", "uint32", 16 * 8)]


def test_modules_and_dtypes_are_told_apart():
  def body(x):
    with jax.named_scope("Net/one"):
      wide = lax.psum(x, "data")
    with jax.named_scope("Net/two"):
      return wide + lax.psum(x.astype(jnp.bfloat16), "data")

  found = planned(body, P("fsdp")).collectives
  assert [(c.dtype, c.nbytes, c.sources) for c in found] == [
    ("float32", 8 * ROW, ("Net/one",)),
    ("bfloat16", 4 * ROW, ("Net/two",)),
  ]


def test_the_time_floor_has_what_a_device_must_send():
  link = get_target("h200:8").interconnect
  seconds = lambda body, out: planned(body, out).floor.parts["interconnect"] * link
  assert seconds(*CASES["all-reduce"][:2]) == pytest.approx(8 * ROW)
  assert seconds(*CASES["all-gather"][:2]) == pytest.approx(32 * ROW * 3 / 4)
  # Both halves of what it has but its own.
  assert seconds(*CASES["reduce-scatter"][:2]) == pytest.approx(4 * ROW)
  assert "interconnect" not in planned(*CASES["one device"][:2]).floor.parts


def planned_step(policy, target="h200:8", compile=False, **options):
  """The plan of a training step on 4 x 2 devices."""

  def loss(params, batch):
    x = batch["x"]
    return batch["scale"] * jnp.mean((jnp.tanh(x @ params["up"]) @ params["down"] - x) ** 2)

  params = {"up": jnp.zeros((256, 512)), "down": jnp.zeros((512, 256))}
  rules = {"up": ("fsdp", None), "down": (None, "fsdp")}
  step = mpjax.make_train_step(loss, optax.sgd(0.1), policy, mesh=MESH, sharding=rules, **options)
  shapes = step.layout.shapes(
    jax.eval_shape(lambda: step.init(params)), {"x": jnp.zeros((64, 256)), "scale": 1.0}
  )
  return mpjax.plan(step, shapes, target=target, compile=compile)


WEIGHTS = 2 * 256 * 512


@pytest.mark.parametrize(
  ("policy", "gathered", "reduced"),
  [
    ("fp32", {"float32": 4 * WEIGHTS}, {"float32": 4 * WEIGHTS}),
    ("bf16", {"bfloat16": 2 * WEIGHTS}, {"float32": 4 * WEIGHTS}),
    (
      {"base": "bf16", "reduce_dtype": "bfloat16"},
      {"bfloat16": 2 * WEIGHTS},
      {"bfloat16": 2 * WEIGHTS},
    ),
    (
      {"base": "bf16", "gather_dtype": "float8_e4m3fn"},
      {"float8_e4m3fn": WEIGHTS},
      {"float32": 4 * WEIGHTS},
    ),
  ],
  ids=str,
)
def test_a_step_states_what_its_policy_says(policy, gathered, reduced):
  found = planned_step(policy).collectives
  of = lambda operation: {c.dtype: c.nbytes for c in found if c.operation == operation and c.nbytes > 100}
  assert of("all-gather") == gathered
  # Each of the two devices of `fsdp` has half, which is then added over `data`.
  assert of("reduce-scatter") == of("all-reduce") == {dtype: n // 2 for dtype, n in reduced.items()}
  assert {(c.operation, c.group) for c in found if c.nbytes > 100} == {
    ("all-gather", 2),
    ("reduce-scatter", 2),
    ("all-reduce", 4),
  }


@pytest.mark.slow
@pytest.mark.aot
@pytest.mark.parametrize("gather", ["step", "block"])
def test_what_is_stated_is_what_the_compiler_makes(gather):
  if lacks := compilers.missing(get_target("h200:8")):
    pytest.skip(lacks)
  stated, made = (planned_step("bf16", compile=compile, gather=gather) for compile in (False, True))
  large = lambda plan: {
    (c.operation, c.dtype, c.group): c.nbytes for c in plan.collectives if c.nbytes > 1000
  }
  if gather == "step":
    assert large(stated) == large(made)
    assert stated.floor.parts["interconnect"] == pytest.approx(made.floor.parts["interconnect"], rel=0.01)
  else:  # the compiler gathers the last parameter once, which is read at the end of one pass and in the next
    last = {("all-gather", "bfloat16", 2): 2 * 256 * 512}
    assert large(stated) == {key: n + last.get(key, 0) for key, n in large(made).items()}
