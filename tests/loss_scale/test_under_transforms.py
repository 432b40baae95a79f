"""Loss scaling under jit, donation, scan, vmap, shard_map, pmap and sharded parameters."""

import functools
import re

import jax
import jax.numpy as jnp
import jmp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import mpjax

PARAMS = {"w": jnp.asarray([[0.5, -1.25], [2.0, 0.125]]), "b": jnp.asarray([0.1, -0.2])}
GRADS = {"w": jnp.asarray([[1.0, 2.0], [3.0, 4.0]]), "b": jnp.asarray([5.0, 6.0])}


def mesh():
  return jax.make_mesh((8,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))


def same_bits(a, b):
  assert a.dtype == b.dtype
  assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def test_a_scan_over_steps_is_a_loop_of_steps():
  tx = mpjax.dynamic_loss_scale(optax.adam(0.1), growth_interval=2)
  finite_steps = [True, False, True, True, True]

  def step(carry, finite):
    params, state = carry
    grads = jax.tree.map(lambda g: jnp.where(finite, g * state.scale, jnp.inf), GRADS)
    updates, state = tx.update(grads, state, params)
    return (optax.apply_updates(params, updates), state), state.scale

  carry = PARAMS, tx.init(PARAMS)
  scanned, scales = jax.jit(lambda c: jax.lax.scan(step, c, jnp.asarray(finite_steps)))(carry)
  for finite in finite_steps:
    carry, _ = jax.jit(step)(carry, finite)
  jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6), scanned, carry)
  np.testing.assert_array_equal(scales, np.asarray([1, 0.5, 0.5, 1, 1]) * 2.0**16)


def test_members_of_an_ensemble_have_their_own_scale():
  tx = mpjax.dynamic_loss_scale(optax.adam(0.1), init_scale=16.0)
  params = {"w": jnp.ones((3, 2))}
  state = jax.vmap(tx.init)(params)
  grads = {"w": jnp.asarray([[1.0, 1.0], [jnp.inf, 1.0], [1.0, 1.0]])}
  updates, state = jax.jit(jax.vmap(tx.update))(grads, state, params)
  np.testing.assert_array_equal(state.scale, [16, 8, 16])
  np.testing.assert_array_equal((updates["w"] != 0).all(1), [True, False, True])
  np.testing.assert_array_equal(state.inner_state[0].count, [1, 0, 1])


def test_vmap_over_an_ensemble_can_agree_too():
  tx = mpjax.dynamic_loss_scale(optax.sgd(0.1), axis_name="member")
  grads = {"w": jnp.asarray([1.0, jnp.inf, 1.0])}
  state = jax.vmap(tx.init)(grads)
  updates, state = jax.vmap(tx.update, axis_name="member")(grads, state, grads)
  np.testing.assert_array_equal(updates["w"], np.zeros(3))
  np.testing.assert_array_equal(state.scale, np.full(3, 2.0**15))


@pytest.mark.parametrize("check_vma", [False, True])
@pytest.mark.parametrize("bad", [None, 5])
def test_every_shard_takes_the_same_decision(bad, check_vma):
  tx = mpjax.dynamic_loss_scale(optax.sgd(1.0), axis_name="d")
  grads = jnp.ones((8,)) if bad is None else jnp.ones((8,)).at[bad].set(jnp.inf)
  state = tx.init(grads)

  @jax.jit
  @functools.partial(
    jax.shard_map,
    mesh=mesh(),
    in_specs=(PartitionSpec("d"), PartitionSpec()),
    out_specs=(PartitionSpec("d"), PartitionSpec()),
    check_vma=check_vma,
  )
  def step(grads, state):
    return tx.update(grads, state)

  updates, state = step(grads, state)
  np.testing.assert_array_equal(updates, np.full(8, 0.0 if bad is not None else -(2.0**-16)))
  assert float(state.scale) == (2.0**16 if bad is None else 2.0**15)
  assert bool(state.grads_finite) == (bad is None)


def test_every_device_of_pmap_takes_the_same_decision():
  tx = mpjax.dynamic_loss_scale(optax.adam(0.1), axis_name="d")
  params = jnp.ones((8, 2))
  state = jax.pmap(tx.init)(params)
  step = jax.pmap(tx.update, axis_name="d")
  updates, state = step(params.at[3, 1].set(jnp.nan), state, params)
  np.testing.assert_array_equal(updates, np.zeros((8, 2)))
  np.testing.assert_array_equal(state.scale, np.full(8, 2.0**15))
  updates, state = step(params, state, params)
  assert (updates != 0).all()


@pytest.mark.slow
def test_an_empty_shard_agrees_with_the_others():
  tx = mpjax.dynamic_loss_scale(optax.sgd(1.0), axis_name="d")

  def step(grads):
    tree = {"empty": jnp.zeros((0,)), "g": grads}
    updates, state = tx.update(tree, tx.init(tree))
    return updates["g"], state.grads_finite[None]

  spec = PartitionSpec("d")
  sharded = jax.shard_map(step, mesh=mesh(), in_specs=spec, out_specs=spec, check_vma=False)
  _, finite = sharded(jnp.ones(8).at[0].set(jnp.nan))
  assert not finite.any()


def test_sharded_gradients_are_judged_as_one_under_jit():
  put = lambda x: jax.device_put(x, NamedSharding(mesh(), PartitionSpec("d")))
  tx = mpjax.dynamic_loss_scale(optax.adam(0.1))
  params = {"w": put(jnp.ones((16, 2)))}
  state = tx.init(params)
  bad = {"w": put(jnp.ones((16, 2)).at[13, 1].set(jnp.nan))}
  updates, state = jax.jit(tx.update)(bad, state, params)
  assert not state.grads_finite
  assert (updates["w"] == 0).all()
  assert state.scale.sharding.is_fully_replicated
  assert state.inner_state[0].mu["w"].sharding.is_equivalent_to(params["w"].sharding, 2)


def test_sharded_steps_move_no_gradient_between_devices():
  """The agreement is one scalar: no array of a parameter's size is gathered or reduced for it."""
  sharding = NamedSharding(mesh(), PartitionSpec("d"))
  tx = mpjax.dynamic_loss_scale(optax.adamw(0.1))
  params = {"w": jax.ShapeDtypeStruct((1024, 16), jnp.float32, sharding=sharding)}
  on = lambda s: NamedSharding(mesh(), PartitionSpec("d") if s.ndim else PartitionSpec())
  state = jax.tree.map(
    lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=on(s)), jax.eval_shape(tx.init, params)
  )
  text = jax.jit(tx.update).lower(params, state, params).compile().as_text()
  collectives = [line for line in text.splitlines() if "all-reduce(" in line or "all-gather(" in line]
  assert collectives
  assert not any(re.search(r"\[\d", line.split("all-")[0]) for line in collectives)


def test_one_trace_ahead_of_time_compilation_and_no_host_transfer():
  traces = []
  tx = mpjax.dynamic_loss_scale(optax.adamw(0.1))

  @functools.partial(jax.jit, donate_argnums=(0, 1))
  def step(params, state, grads):
    traces.append(1)
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state

  params = jax.tree.map(jnp.copy, PARAMS)
  state = tx.init(params)
  shapes = jax.eval_shape(step, params, state, GRADS)
  assert jax.tree.structure(shapes[1]) == jax.tree.structure(state)
  compiled = step.lower(params, state, GRADS).compile()
  # All but what was finite in the last step, which no step reads.
  read = state._replace(grads_finite=None, updates_finite=None)
  size = sum(leaf.nbytes for leaf in jax.tree.leaves((params, read)))
  assert compiled.memory_analysis().alias_size_in_bytes == size
  traces.clear()
  jax.clear_caches()
  with jax.transfer_guard("disallow"):
    for _ in range(4):
      params, state = step(params, state, GRADS)
  assert len(traces) == 1


@pytest.mark.parametrize("platform", ["tpu", "cuda", "cpu"])
def test_a_skip_is_selects_and_no_conditional(platform):
  tx = mpjax.dynamic_loss_scale(optax.adamw(0.1))
  state = tx.init(PARAMS)
  text = jax.export.export(jax.jit(tx.update), platforms=[platform])(PARAMS, state, PARAMS).mlir_module()
  assert "stablehlo.case" not in text
  assert "stablehlo.if" not in text


@pytest.mark.parametrize("platform", ["tpu", "cuda", "cpu"])
def test_only_a_cpu_is_given_the_branch_that_was_asked_for(platform):
  tx = mpjax.with_loss_scaling(optax.adamw(0.1), "dynamic", branch_on_cpu=True)
  state = tx.init(PARAMS)
  text = jax.export.export(jax.jit(tx.update), platforms=[platform])(PARAMS, state, PARAMS).mlir_module()
  # A case by something else than a constant: whether the gradients are finite.
  branches = re.findall(r"(%\w+) = stablehlo.convert .*tensor<i1>.*\n.*stablehlo.case.*\(\1\)", text)
  assert len(branches) == (platform == "cpu")


@pytest.mark.parametrize("over", ["nothing", "vmap", "shard_map"])
def test_a_branch_does_what_selects_do(over):
  grads = [GRADS, jax.tree.map(lambda g: g.at[(0,) * g.ndim].set(jnp.inf), GRADS), GRADS]
  results = []
  for branch in (False, True):
    tx = mpjax.with_loss_scaling(optax.adamw(0.1), {"init_scale": 8.0}, branch_on_cpu=branch)

    def step(state, grads, tx=tx):
      updates, new = tx.update(grads, state, PARAMS)
      return new, updates

    if over == "vmap":
      run = jax.jit(jax.vmap(step))
      state = jax.tree.map(lambda x: jnp.stack([x, x]), tx.init(PARAMS))
      stacked = [jax.tree.map(lambda a, b: jnp.stack([a, b]), g, GRADS) for g in grads]
    elif over == "shard_map":
      mesh = jax.make_mesh((2,), ("data",))
      whole = jax.sharding.PartitionSpec()
      run = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=(whole, whole), out_specs=whole))
      state, stacked = tx.init(PARAMS), grads
    else:
      run, state, stacked = jax.jit(step), tx.init(PARAMS), grads
    out = []
    for g in stacked:
      state, updates = run(state, g)
      out.append(updates)
    results.append((state, out))
  for a, b in zip(*map(jax.tree.leaves, results), strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7)


def test_the_new_state_is_not_held_beside_the_kept_one():
  # Adam's update is computed from its new moments: selected at the end, both would be in memory.
  params = {"w": jnp.ones((512, 512))}
  tx = mpjax.dynamic_loss_scale(optax.adam(0.1))

  def step(params, state, x):
    grads = jax.grad(lambda p: mpjax.scale_loss(jnp.tanh(x @ p["w"]).sum(), state))(params)
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state

  memory = jax.jit(step, donate_argnums=(0, 1)).lower(params, tx.init(params), jnp.ones((8, 512))).compile()
  # The gradient, and a byte an entry for each of two looks at what is finite.
  assert memory.memory_analysis().temp_size_in_bytes < 1.51 * params["w"].nbytes


def test_the_compiled_step_has_fewer_instructions_than_a_select_of_everything():
  params = [{"w": jnp.ones((64, 64)), "b": jnp.ones(64)} for _ in range(6)]
  forward = lambda params, x: functools.reduce(lambda x, p: jnp.tanh(x @ p["w"] + p["b"]), params, x).mean()
  plain, tx = optax.adamw(1e-3), mpjax.dynamic_loss_scale(optax.adamw(1e-3))

  def by_hand(params, state, x):
    inner, scale = state[0], jmp.DynamicLossScale(*state[1])
    grads = jax.grad(lambda p: scale.scale(forward(p, x)))(params)
    grads = scale.unscale(grads)
    finite = jmp.all_finite(grads)
    updates, new = plain.update(grads, inner, params)
    after = optax.apply_updates(params, updates)
    new = jmp.select_tree(finite & jmp.all_finite(after), (after, new), (params, inner))
    scale = scale.adjust(finite)
    return new[0], (new[1], (scale.loss_scale, scale.counter))

  def ours(params, state, x):
    grads = jax.grad(lambda p: mpjax.scale_loss(forward(p, x), state))(params)
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state

  def count(step, state):
    lowered = jax.jit(step, donate_argnums=(0, 1)).lower(params, state, jnp.ones((8, 64)))
    return sum(" = " in line for line in lowered.compile().as_text().splitlines())

  peer = count(by_hand, (plain.init(params), (jnp.float32(2**15), jnp.int32(0))))
  assert count(ours, tx.init(params)) < peer


@pytest.mark.parametrize(
  "inner", [optax.adam(0.1), optax.MultiSteps(optax.adam(0.1), 3).gradient_transformation()]
)
def test_the_state_survives_a_trip_through_numpy(inner):
  """As from a checkpoint, also in the middle of an accumulation."""
  tx = mpjax.dynamic_loss_scale(inner)
  step = jax.jit(tx.update)
  _, state = step(GRADS, tx.init(PARAMS), PARAMS)
  restored = jax.tree.map(np.asarray, state)
  jax.tree.map(same_bits, step(GRADS, state, PARAMS), step(GRADS, restored, PARAMS))


def test_a_scale_is_added_to_a_run_that_had_none():
  plain, tx = optax.adam(0.1), mpjax.dynamic_loss_scale(optax.adam(0.1))
  _, old = plain.update(GRADS, plain.init(PARAMS), PARAMS)
  state = tx.init(PARAMS)._replace(inner_state=old)
  updates, _ = tx.update(jax.tree.map(lambda g: g * state.scale, GRADS), state, PARAMS)
  expected, _ = plain.update(GRADS, old, PARAMS)
  jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6), updates, expected)


def test_state_that_is_passed_on_swapped_or_kept_twice_is_still_kept():
  """Whatever an inner transform does with the leaves of its state, a skip leaves them be."""

  def update(grads, state, params=None):
    a, b, *_ = state
    same = a + grads
    return same, (b, a, same, same, 3.0)

  tx = mpjax.static_loss_scale(
    optax.GradientTransformation(lambda p: tuple(map(jnp.float32, range(5))), update), 1.0
  )
  state = tx.init(None)
  _, moved = jax.jit(tx.update)(jnp.float32(10), state)
  assert [float(x) for x in moved.inner_state] == [1, 0, 10, 10, 3]
  _, kept = jax.jit(tx.update)(jnp.float32(jnp.nan), moved)
  assert [float(x) for x in kept.inner_state] == [1, 0, 10, 10, 3]


def test_a_changed_structure_of_the_state_is_named():
  tx = mpjax.static_loss_scale(
    optax.GradientTransformation(lambda p: (), lambda g, s, p=None: (g, (g,))), 1.0
  )
  with pytest.raises(ValueError, match="changed the structure of its state"):
    tx.update(jnp.ones(()), tx.init(None))


def test_an_update_that_looks_at_a_value_is_skipped_all_the_same():
  def update(grads, count, params=None):
    count = count + 1
    return (
      grads if count > 0 else -grads
    ), count  # `bool` of an array: the program of this alone has no value

  tx = mpjax.static_loss_scale(optax.GradientTransformation(lambda p: jnp.zeros([], int), update), 2.0)
  state = tx.init(None)
  updates, new_state = jax.vmap(lambda grads: tx.update(grads, state))(jnp.asarray([4.0, jnp.nan, 6.0]))
  np.testing.assert_array_equal(updates, [2, 0, 3])
  np.testing.assert_array_equal(new_state.inner_state, [1, 0, 1])


def test_an_error_of_the_wrapped_transform_is_raised_as_it_is():
  calls = []

  def update(grads, state, params=None):
    calls.append(grads)
    raise NotImplementedError("no update")

  tx = mpjax.static_loss_scale(optax.GradientTransformation(lambda p: (), update), 1.0)
  with pytest.raises(NotImplementedError, match="no update"):
    jax.jit(tx.update)(jnp.ones(()), tx.init(None))
  assert len(calls) == 1  # it is not taken for an update that cannot be traced, and tried another way


def test_collectives_inside_the_wrapped_transform():
  mean = optax.stateless(lambda grads, params: jax.tree.map(lambda g: jax.lax.pmean(g, "d"), grads))
  tx = mpjax.dynamic_loss_scale(optax.chain(mean, optax.trace(0.9)), init_scale=2.0, axis_name="d")

  @jax.jit
  @functools.partial(
    jax.shard_map, mesh=mesh(), in_specs=PartitionSpec("d"), out_specs=PartitionSpec(), check_vma=False
  )
  def step(grads):
    return tx.update(grads, tx.init(grads))[0]

  np.testing.assert_allclose(step(jnp.arange(8.0)), [1.75])


def test_updates_can_be_differentiated():
  tx = mpjax.dynamic_loss_scale(optax.adam(0.1), init_scale=4.0)

  def after(grads):
    updates, _ = tx.update({"g": grads * 4}, tx.init({"g": grads}))
    return updates["g"].sum()

  plain = lambda grads: optax.adam(0.1).update(grads, optax.adam(0.1).init(grads))[0].sum()
  grads = jnp.asarray([1e-9, -2e-9])
  np.testing.assert_allclose(jax.grad(after)(grads), jax.grad(plain)(grads), rtol=1e-4)
