"""State and weights in few bytes round and inside other transforms, and in others' training states."""

import functools

import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState

import mpjax
from mpjax.optim import Quantized, is_quantized
from tests.optim._forms import FORMS, described, same_bits

KEY = jax.random.key(0)
TARGET = {"w": jax.random.normal(KEY, (64, 80)), "b": jnp.linspace(-1, 1, 7)}
GROUPS = {"w": "matrices", "b": "others"}
SCHEDULE = optax.cosine_decay_schedule(0.1, 100)
INNER = {
  "adamw with a schedule": lambda: optax.adamw(SCHEDULE),
  "adamw with clipping": lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(SCHEDULE)),
  "lion": lambda: optax.lion(optax.linear_schedule(0.1, 0.0, 60)),
  "muon": lambda: optax.contrib.muon(optax.linear_schedule(0.1, 0.0, 60)),
  "adafactor": lambda: optax.adafactor(0.1, min_dim_size_to_factor=32, momentum=0.9),
  "sgd with momentum": lambda: optax.sgd(0.1, momentum=0.9),
  "masked": lambda: optax.chain(
    optax.masked(optax.scale_by_adam(), {"w": True, "b": False}), optax.scale_by_learning_rate(SCHEDULE)
  ),
  "partition": lambda: optax.partition({"matrices": optax.adam(SCHEDULE), "others": optax.sgd(0.1)}, GROUPS),
  "multi_transform": lambda: optax.multi_transform(
    {"matrices": optax.adam(SCHEDULE), "others": optax.sgd(0.1)}, GROUPS
  ),
}


def loss(params):
  return sum(
    jnp.sum((p.astype(jnp.float32) - t) ** 2)
    for p, t in zip(jax.tree.leaves(params), jax.tree.leaves(TARGET), strict=True)
  )


def start(dtype):
  return jax.tree.map(lambda t: jnp.zeros_like(t, dtype), TARGET)


def trained(tx, dtype, steps=60):
  """Returns parameters and state after steps with noisy gradients in one scan, and the first state."""

  def step(carry, i):
    params, state = carry
    key = jax.random.fold_in(KEY, i)
    noise = jax.tree.map(lambda t: 0.3 * jax.random.normal(key, t.shape), TARGET)
    grads = jax.tree.map(lambda g, n: g.astype(jnp.float32) + n, jax.grad(loss)(params), noise)
    updates, state = tx.update(grads, state, params)
    return (optax.apply_updates(params, updates), state), None

  first = (start(dtype), tx.init(start(dtype)))
  run = jax.jit(lambda first: jax.lax.scan(step, first, jnp.arange(steps))[0])
  params, state = run(first)
  return params, state, first[1]


@functools.cache
def plain_loss(inner):
  return float(loss(trained(INNER[inner](), jnp.float32)[0]))


@pytest.mark.parametrize(
  ("form", "inner"),
  [
    *((form, "adamw with a schedule") for form in FORMS),
    *(("lean", inner) for inner in list(INNER)[1:]),
    ("bfloat16", "lion"),
  ],
)
def test_a_scan_of_steps_trains_as_in_float32(form, inner):
  wrap, dtype = FORMS[form]
  params, state, first = trained(wrap(INNER[inner]()), dtype)
  assert described(state) == described(first)
  assert all(p.dtype == dtype for p in jax.tree.leaves(params))
  begin = float(loss(start(dtype)))
  # With b2=0.99 a momentum moves by less than a step of its 8-bit code unless its gradient changes much.
  bound = 0.08 if (form, inner) == ("lean", "lion") else 0.01
  assert abs(float(loss(params)) - plain_loss(inner)) < bound * begin
  if "weights" not in form:
    stored = [x for x in jax.tree.leaves(state, is_leaf=is_quantized) if isinstance(x, Quantized)]
    assert stored
    assert all(x.codes.shape == (64, 80) for x in stored)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
  "guard", [mpjax.dynamic_loss_scale, lambda tx: mpjax.static_loss_scale(tx, 1)], ids=["dynamic", "static"]
)
def test_a_skipped_step_changes_no_bit(form, guard):
  wrap, dtype = FORMS[form]
  tx = guard(wrap(optax.adamw(0.1)))
  update = jax.jit(tx.update)
  params = start(dtype)
  grads = jax.tree.map(lambda t: t.astype(dtype), TARGET)
  state = tx.init(params)
  for _ in range(2):
    updates, state = update(grads, state, params)
    params = optax.apply_updates(params, updates)
  for value in (jnp.nan, jnp.inf, -jnp.inf):
    updates, after = update({**grads, "w": grads["w"].at[3, 70].set(value)}, state, params)
    assert not after.grads_finite
    same_bits(after.inner_state, state.inner_state)
    same_bits(optax.apply_updates(params, updates), params)


@pytest.mark.parametrize("form", FORMS)
def test_a_skip_of_a_guard_inside_changes_no_weight_and_no_code(form):
  wrap, dtype = FORMS[form]
  tx = wrap(mpjax.dynamic_loss_scale(optax.adamw(0.1)))
  update = jax.jit(tx.update)
  params, grads = start(dtype), jax.tree.map(lambda t: t.astype(dtype) * 2.0**18, TARGET)
  state = tx.init(params)
  for _ in range(3):
    updates, state = update(grads, state, params)
    params = optax.apply_updates(params, updates)
  updates, after = update({**grads, "w": grads["w"].at[3, 70].set(jnp.nan)}, state, params)
  same_bits(optax.apply_updates(params, updates), params)
  same_bits(mpjax.get_loss_scale(after).inner_state, mpjax.get_loss_scale(state).inner_state)
  if "weights" in form or form == "lean":
    same_bits(after.correction, state.correction)


@pytest.mark.parametrize("form", FORMS)
def test_gradients_that_are_not_finite_make_no_such_code(form):
  wrap, dtype = FORMS[form]
  tx = wrap(optax.adamw(0.1))
  params = start(dtype)
  bad = jax.tree.map(lambda t: t.astype(dtype).at[..., 3].set(jnp.nan), TARGET)
  _, state = jax.jit(tx.update)(bad, tx.init(params), params)
  for x in jax.tree.leaves(state, is_leaf=is_quantized):
    if isinstance(x, Quantized) and x.scales is not None:
      assert jnp.isfinite(x.codes.astype(jnp.float32)).all()
      assert not jnp.isfinite(x.scales).all()


def test_multi_steps_outside():
  """Gradients add up in float32, and moments move with every second one."""
  tx = optax.MultiSteps(mpjax.quantized_state(optax.adamw(0.1)), 2).gradient_transformation()
  once = mpjax.quantized_state(optax.adamw(0.1))
  params = start(jnp.float32)
  state, expected = tx.init(params), once.init(params)
  for i in range(4):
    grads = jax.tree.map(lambda t, i=i: t * (1 + i), TARGET)
    _, state = jax.jit(tx.update)(grads, state, params)
    if i % 2:
      mean = jax.tree.map(lambda t, i=i: t * (1 + i - 0.5), TARGET)
      _, expected = jax.jit(once.update)(mean, expected, params)
  assert int(state.inner_opt_state.steps) == 2
  back, wanted = mpjax.dequantize_state((state.inner_opt_state, expected))
  for a, b in zip(jax.tree.leaves(back), jax.tree.leaves(wanted), strict=True):
    np.testing.assert_allclose(a, b, rtol=0.13, atol=1e-6)


def test_weight_decay_sees_the_master_weights():
  seen = []

  def update(updates, state, params=None):
    seen.append(params["w"])
    return updates, state

  inner = optax.chain(optax.GradientTransformation(lambda params: optax.EmptyState(), update), optax.sgd(1.0))
  tx = mpjax.master_weights(inner)
  params = {"w": jnp.ones(8, jnp.bfloat16)}
  state = tx.init(params)
  for _ in range(3):
    updates, state = tx.update({"w": jnp.full(8, -(2.0**-10))}, state, params)
    params = optax.apply_updates(params, updates)
  assert [float(x[0]) for x in seen] == [1, 1 + 2.0**-10, 1 + 2.0**-9]
  assert float(params["w"][0]) == 1


@pytest.mark.parametrize("form", ["int8", "bfloat16", "weights int16", "lean"])
def test_in_an_nnx_optimizer(form):
  wrap, dtype = FORMS[form]
  model = nnx.Linear(64, 80, param_dtype=dtype, rngs=nnx.Rngs(0))
  optimizer = nnx.Optimizer(model, wrap(optax.adamw(0.1)), wrt=nnx.Param)
  x = jax.random.normal(KEY, (32, 64))

  @nnx.jit
  def step(model, optimizer):
    value, grads = nnx.value_and_grad(lambda model: jnp.mean((model(x) - 1) ** 2))(model)
    optimizer.update(model, grads)
    return value

  before = [(v.shape, v.dtype) for v in jax.tree.leaves(nnx.state(optimizer))]
  values = [float(step(model, optimizer)) for _ in range(20)]
  assert values[-1] < 0.3 * values[0]
  assert [(v.shape, v.dtype) for v in jax.tree.leaves(nnx.state(optimizer))] == before
  dtypes = {v.dtype for v in jax.tree.leaves(nnx.state(optimizer)) if v.shape == (64, 80)}
  stored = {"int8": jnp.int8, "bfloat16": jnp.bfloat16, "weights int16": jnp.int16, "lean": jnp.int8}[form]
  assert jnp.dtype(stored) in dtypes
  if form in ("int8", "bfloat16", "lean"):
    assert dtypes == {jnp.dtype(stored)}


@pytest.mark.parametrize("form", ["float8_e4m3fn", "lean"])
def test_in_a_train_state_that_flax_serializes(form):
  wrap, dtype = FORMS[form]
  make = lambda: TrainState.create(apply_fn=None, params=start(dtype), tx=wrap(optax.adamw(0.1)))
  step = jax.jit(lambda state: state.apply_gradients(grads=jax.grad(loss)(state.params)))
  state = make()
  for _ in range(3):
    state = step(state)
  restored = flax.serialization.from_bytes(make(), flax.serialization.to_bytes(state))
  same_bits((restored.params, restored.opt_state), (state.params, state.opt_state))
  same_bits(step(restored).opt_state, step(state).opt_state)


@pytest.mark.parametrize("form", ["bfloat16", "lean", pytest.param("float8_e4m3fn", marks=pytest.mark.slow)])
def test_orbax_brings_every_bit_back(form, tmp_path):
  ocp = pytest.importorskip("orbax.checkpoint")
  wrap, dtype = FORMS[form]
  params, state, _ = trained(wrap(optax.adamw(0.1)), dtype, steps=3)
  with ocp.CheckpointManager(tmp_path) as manager:
    manager.save(0, args=ocp.args.StandardSave({"params": params, "opt_state": state}))
    manager.wait_until_finished()
    template = jax.eval_shape(lambda: {"params": params, "opt_state": state})
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    template = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=device), template)
    restored = manager.restore(0, args=ocp.args.StandardRestore(template))
  same_bits(restored, {"params": params, "opt_state": state})
