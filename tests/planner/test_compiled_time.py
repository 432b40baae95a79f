"""The time of a step from its compiled program."""

import jax
import jax.numpy as jnp
import pytest

import mpjax
from mpjax.planner import TIME_PARTS, Collective, get_target
from mpjax.planner._time import collective_seconds, compiled_time
from mpjax.planner.compiled._from_hlo import from_hlo
from tests.planner._programs import Program, cycles
from tests.planner._steps import described

CLOCK = 1.5e9 / 0.8  # of a TPU v5e, and the share of its compiler's cycles that passes
MB = ("f32", 1024, 256)


def of(program, target="v5e"):
  device = get_target(target)
  return compiled_time(from_hlo(program.parse(), device.kind), device)


def test_cycles_of_a_loop_count_as_often_as_it_runs():
  program = Program()
  body, condition = program.computation("body"), program.computation("condition")
  body.add("convert", MB, body.add("parameter", MB), config=cycles(3000))
  condition.add("parameter", ("pred",))
  main = program.computation("main")
  state = main.add("fusion", MB, main.add("parameter", MB), called=[body], config=cycles(500))
  main.add("while", MB, state, called=[body, condition], config={"known_trip_count": {"n": "7"}})
  time = of(program)
  assert time.seconds == pytest.approx((500 + 7 * 3000) / CLOCK)
  assert time.source == "compiler's cycles"


def test_a_conditional_takes_its_longest_branch():
  program = Program()
  branches = [program.computation(name) for name in ("skip", "update")]
  for branch, number in zip(branches, (10, 4000), strict=True):
    branch.add("negate", MB, branch.add("parameter", MB), config=cycles(number))
  main = program.computation("main")
  state = main.add("parameter", MB)
  main.add("conditional", MB, main.add("parameter", ("pred",)), state, state, called=branches)
  assert of(program).seconds == pytest.approx(4000 / CLOCK)


def gathering(between, *behind):
  """Gathers 64 MB over eight chips and computes for so many cycles meanwhile.

  Operations with the names `behind` are between its start and its end; an update brings operands.
  """
  program = Program()
  main = program.computation("main")
  part = main.add("parameter", ("f32", 2048, 1024))
  whole = ("f32", 16384, 1024)
  start = main.add(
    "all-gather-start", [("f32", 2048, 1024), whole], part, replica_groups=[{"replica_ids": range(8)}]
  )
  main.add("negate", MB, main.add("parameter", MB), config=cycles(between))
  for op in behind:
    start = main.add(op, [("f32", 2048, 1024), whole], start, *[part] * (op == "async-update"))
  main.add("all-gather-done", whole, start)
  return of(program, "v5e:2x4")


def test_a_collective_takes_what_no_other_work_hides():
  alone = gathering(0)
  gathered = alone.parts["collectives"]
  assert gathered == pytest.approx(64 * 2**20 * 7 / 8 / 1e11, rel=0.2)  # on two of four links of 50 GB/s
  half = gathering(int(gathered / 2 * CLOCK))
  assert half.hidden == pytest.approx(gathered / 2, rel=1e-5)  # of whole cycles
  assert half.seconds == pytest.approx(gathered)
  hidden = gathering(int(3 * gathered * CLOCK))
  assert "collectives" not in hidden.parts
  assert (hidden.hidden, hidden.seconds) == pytest.approx((gathered, 3 * gathered))


@pytest.mark.parametrize(
  "behind", [("bitcast",), ("opt-barrier",), ("async-update",), ("bitcast", "opt-barrier", "bitcast")]
)
def test_the_end_of_a_collective_is_no_pass_over_memory_behind_what_passes_its_start_on(behind):
  assert gathering(3000, *behind).parts["element-wise"] == gathering(3000).parts["element-wise"]


def test_neighbours_exchange_in_both_directions_at_once():
  def sending(*steps):
    program = Program()
    main = program.computation("main")
    part = main.add("parameter", MB)
    pairs = lambda step: [{"source": i, "target": (i + step) % 4} for i in range(4)]
    starts = [
      main.add("collective-permute-start", [MB, MB], part, source_target_pairs=pairs(step)) for step in steps
    ]
    for start in starts:
      main.add("collective-permute-done", MB, start)
    return of(program, "v5p:4x1x1").seconds

  assert sending(1, -1) == pytest.approx(sending(1))
  assert sending(1, 1) == pytest.approx(2 * sending(1))


def test_a_transfer_from_the_host_is_a_part_of_its_own():
  program = Program()
  main = program.computation("main")
  state = main.add("parameter", (*MB, {5}))
  start = main.add("copy-start", [MB, (*MB, {5})], state)
  main.add("copy-done", MB, start)
  assert of(program, "h100").parts["host"] == pytest.approx(2**20 / 5e10, rel=0.2)


def test_an_update_of_the_hosts_memory_moves_the_update():
  program = Program()
  inner = program.computation("update")
  whole, at = ("f32", 1000, 1024, 256, {5}), ("s32",)
  stacked = inner.add("parameter", whole)
  part = inner.add("parameter", ("f32", 1, 1024, 256), parameter_number=1)
  inner.add("dynamic-update-slice", whole, stacked, part, inner.add("parameter", at, parameter_number=2))
  main = program.computation("main")
  given = [main.add("parameter", shape) for shape in (whole, ("f32", 1, 1024, 256), at)]
  start = main.add("async-start", [whole, ("f32", 1, 1024, 256), at, whole], *given, called=[inner])
  main.add("async-done", whole, start)
  assert of(program, "v6e").parts["host"] < 1e-3  # the whole would take 70 ms


def test_the_state_of_a_loop_is_read_in_slices_and_written_in_place():
  program = Program()
  inner = program.computation("fused")
  stacked, at = (
    inner.add("parameter", ("f32", 1000, 1024, 256)),
    inner.add("parameter", ("s32",), parameter_number=1),
  )
  part = inner.add("dynamic-slice", ("f32", 1, 1024, 256), stacked, at)
  inner.add("negate", ("f32", 1, 1024, 256), part)
  main = program.computation("main")
  state = main.add("parameter", ("f32", 1000, 1024, 256))
  main.add("fusion", ("f32", 1, 1024, 256), state, main.add("parameter", ("s32",)), called=[inner])
  assert of(program, "h100").seconds < 5e-6  # 1 GB would take 300 us


def test_gpus_of_several_hosts_exchange_at_the_rate_of_the_network():
  target, nbytes = get_target("h100:2x8"), 1 << 30
  seconds = lambda group: collective_seconds(
    target, [Collective("all-reduce", "float32", nbytes, 1, ())], group
  )
  inside, across, every = (seconds(group) for group in (range(8), (0, 8), range(16)))
  assert inside == pytest.approx(2 * nbytes * 7 / 8 / 4.5e11, rel=0.3)
  assert across == pytest.approx(nbytes / 5e10, rel=0.3)  # one card of 400 Gbit/s each
  assert inside < every < across  # all cards of a host


def loss(params, batch):
  with jax.named_scope("up"):
    h = jnp.tanh(batch @ params["up"])
  with jax.named_scope("down"):
    return jnp.sum((h @ params["down"]).astype(jnp.float32) ** 2)


@pytest.mark.aot
@pytest.mark.parametrize("target", ["v5e", "h100"])
def test_a_plan_has_the_time_of_its_compiled_step(target):
  half = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16)
  params = {"up": half(1024, 4096), "down": half(4096, 1024)}
  plan = mpjax.plan(
    jax.value_and_grad(loss), params, half(4096, 1024), target=described(target), compile=True
  )
  time = plan.time
  assert plan.floor.seconds < time.seconds < 4 * plan.floor.seconds
  assert sum(time.parts.values()) == pytest.approx(time.seconds)
  assert sum(time.modules.values()) == pytest.approx(time.seconds)
  assert list(time.parts) == [name for name in TIME_PARTS if name in time.parts]
  assert max(time.parts, key=time.parts.get) == "products"
  assert {"up", "down"} <= set(time.modules)


def test_a_gpu_takes_the_time_of_each_pass_of_a_product():
  def took(algorithm):
    program = Program()
    main = program.computation("main")
    x = main.add("parameter", ("f32", 4096, 4096))
    dims = {"lhs_contracting_dimensions": [1], "rhs_contracting_dimensions": [0]}
    given = {"dot_dimension_numbers": dims, "precision_config": {"algorithm": algorithm}}
    main.add("dot", ("f32", 4096, 4096), x, x, **given)
    return of(program, "h200").seconds

  default, bf16, x3, x9, tf32x3, float32 = map(took, (0, 6, 7, 13, 10, 11))  # as XLA numbers the algorithms
  assert x3 == pytest.approx(3 * bf16, rel=0.1)
  assert x9 == pytest.approx(9 * bf16, rel=0.1)
  assert tf32x3 == pytest.approx(3 * default, rel=0.1)
  assert float32 > 2 * default
