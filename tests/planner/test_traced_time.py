"""The time of a step without a compiler."""

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import AbstractMesh, PartitionSpec

import mpjax
from mpjax.planner import TIME_PARTS, get_target
from tests.planner._steps import a_train_step

F32, BF16 = jnp.float32, jnp.bfloat16
MB = 1 << 20


def S(shape, dtype=F32):
  return jax.ShapeDtypeStruct(shape, dtype)


def time_of(fun, *args, target="h200", **options):
  return mpjax.plan(fun, *args, target=target, compile=False, **options).time


def seconds(fun, *args, **options):
  return time_of(fun, *args, **options).seconds


def test_this_machine_has_no_time_and_a_described_device_says_where_its_own_is_from():
  loss = lambda p, b: jnp.mean((b @ p["w"]) ** 2)
  step, state = a_train_step("bf16", params={"w": S((512, 512))}, loss=loss)
  plan = lambda target: mpjax.plan(step, state, S((1024, 512)), target=target, compile=False)
  assert plan("here").time is None
  time = plan("h200").time
  assert (time.source, time.error) == ("roofline of the traced program", 0.5)
  assert set(time.parts) <= set(TIME_PARTS)
  assert sum(time.parts.values()) == pytest.approx(time.seconds) == sum(time.modules.values())


def test_element_wise_operations_are_one_pass_over_memory():
  x = S((64 * MB // 4,))
  bandwidth = get_target("h200").bandwidth
  for fun, arrays in (
    (lambda x: jnp.tanh(x), 2),
    (lambda x: jnp.tanh(x * 2 + 1) * x, 2),
    (lambda x: (x * 2, x * 3), 3),  # one kernel with two results
    (lambda x: x.sum(), 1),
    (lambda x: x[: x.size // 2] * 2, 1),
  ):
    took = seconds(fun, x)
    assert 1 < took / (arrays * 64 * MB / bandwidth) < 1.35, arrays


def test_an_optimizer_reads_and_writes_its_state_once():
  tx = optax.adam(1e-3)
  params = S((4096, 4096))
  state = jax.eval_shape(tx.init, params)

  def update(params, state, grads):
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state

  took = seconds(update, params, state, params, donate_argnums=(0, 1))
  assert 1 < took / (7 * 64 * MB / get_target("h200").bandwidth) < 1.4


def test_products_take_their_passes_and_loops_their_turns():
  x = S((2048, 2048))
  for precision, passes in (("BF16_BF16_F32", 1), ("BF16_BF16_F32_X3", 3), ("highest", 6)):
    with jax.default_matmul_precision(precision):
      took = time_of(jnp.matmul, x, x, target="v5e")
    assert 1 < took.seconds / (passes * 2 * 2048**3 / 197e12) < 1.3, precision
    assert took.parts.keys() == {"products"}
  turns = lambda n: lambda x: jax.lax.scan(lambda y, _: (y @ y, None), x, None, n)[0]
  once, often = (seconds(turns(n), x) for n in (2, 8))
  assert often == pytest.approx(4 * once)


def test_fp8_saves_time_on_a_large_layer_and_none_on_a_small_one():
  def of(size, policy):
    loss = lambda w, x: jnp.mean((jnp.tanh(x @ w) @ w) ** 2)
    return seconds(jax.grad(loss), S((size, size)), S((size, size)), policy=policy)

  fp8 = {"base": "fp8", "fp8": {"recipe": "current", "first_layer": True, "last_layer": True}}
  assert of(8192, fp8) < 0.9 * of(8192, "bf16")
  assert of(512, fp8) > of(512, "bf16")


def test_collectives_that_the_program_states_are_exposed_in_part():
  mesh = AbstractMesh((8,), ("data",))
  rows, whole = PartitionSpec("data"), PartitionSpec()
  mean = jax.shard_map(lambda x: jax.lax.pmean(x, "data"), mesh=mesh, in_specs=rows, out_specs=whole)
  x = jax.ShapeDtypeStruct((8 * MB,), F32, sharding=jax.sharding.NamedSharding(mesh, rows))
  time = time_of(mean, x, target="h100:8")
  assert time.parts["collectives"] > time.hidden > 0
  assert time.parts["collectives"] + time.hidden > 4 * MB / get_target("h100:8").interconnect


def test_a_transfer_to_the_host_takes_the_time_of_its_link():
  time = time_of(lambda x: jax.device_put(x * 2, jax.memory.Space.Host), S((16 * MB,)))
  assert time.parts["host"] == pytest.approx(64 * MB / get_target("h200").speeds["host"])


def test_updates_and_lookups_move_a_part():
  x, few = S((64 * MB // 4 // 1024, 1024)), S((8, 1024))
  copy = 2 * 64 * MB / get_target("h200").bandwidth
  update = lambda x, few: jax.lax.dynamic_update_slice(x, few, (3, 0))
  assert 1 < seconds(lambda x: x.T, x) / copy < 1.35
  assert seconds(update, x, few, donate_argnums=0) < copy / 4
  assert seconds(lambda x, i: x[i], x, S((8,), jnp.int32)) < copy / 4


def test_a_loop_of_unknown_length_counts_once_and_has_a_note():
  step = lambda x, n: jax.lax.fori_loop(0, n, lambda _, c: jnp.tanh(c @ c), x)
  x = S((1024, 1024))
  plan = mpjax.plan(step, x, S((), jnp.int32), target="h200", compile=False)
  assert any(
    "does not say how often 1 of its loops run, the first at test_traced_time.py" in n for n in plan.notes
  )
  assert plan.time.parts["products"] == pytest.approx(time_of(lambda x: x @ x, x).parts["products"])
  known = mpjax.plan(lambda x: step(x, 3), x, target="h200", compile=False)
  assert not any("how often" in note for note in known.notes)
