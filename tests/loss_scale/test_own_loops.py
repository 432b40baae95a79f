"""`value_and_grad` and `keep_if_finite`: one loop of one's own for every policy."""

import functools

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec

import mpjax

SHAPE = (8, 8)
RNG = np.random.default_rng(0)
PARAMS = {name: jnp.asarray(RNG.normal(size=SHAPE) / 4, jnp.float32) for name in ("w", "v")}
X = jnp.asarray(RNG.normal(size=SHAPE), jnp.float32)
SCALED = functools.partial(mpjax.dynamic_loss_scale, init_scale=2.0**10)
GROUPS = {"w": "a", "v": "b"}
OPTIMISERS = {
  "bare": lambda: SCALED(optax.sgd(0.1)),
  "static": lambda: mpjax.static_loss_scale(optax.sgd(0.1), 8.0),
  "chain": lambda: optax.chain(optax.identity(), SCALED(optax.sgd(0.1))),
  "MultiSteps": lambda: optax.MultiSteps(SCALED(optax.sgd(0.1)), 2).gradient_transformation(),
  "round MultiSteps": lambda: SCALED(optax.MultiSteps(optax.sgd(0.1), 2).gradient_transformation()),
  "multi_transform": lambda: optax.multi_transform(
    {"a": SCALED(optax.sgd(0.1)), "b": optax.sgd(0.1)}, GROUPS
  ),
  "policy": lambda: mpjax.with_loss_scaling(optax.sgd(0.1), mpjax.get_policy("fp16")),
  "no scale": lambda: mpjax.with_loss_scaling(optax.sgd(0.1), mpjax.get_policy("bf16")),
}


def loss_fn(params, x):
  return jnp.mean((jnp.tanh(x @ params["w"]) @ params["v"] - 1) ** 2)


def scale_of(state):
  """The scale as a number; 1 without one."""
  is_scale = lambda s: isinstance(s, mpjax.LossScaleState)
  return next((float(s.scale) for s in jax.tree.leaves(state, is_leaf=is_scale) if is_scale(s)), 1.0)


def close(tree, expected, rtol=1e-6, atol=1e-7):
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=atol), tree, expected)


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("name", OPTIMISERS)
def test_the_value_is_the_loss_and_the_gradients_are_scaled(name, jit):
  state = OPTIMISERS[name]().init(PARAMS)
  of = lambda params, state, x: mpjax.value_and_grad(loss_fn, state)(params, x)
  loss, grads = (jax.jit(of) if jit else of)(PARAMS, state, X)
  expected, plain = jax.value_and_grad(loss_fn)(PARAMS, X)
  close(loss, expected)
  close(jax.tree.map(lambda g: g / scale_of(state), grads), plain)
  assert loss.dtype == jnp.float32


@pytest.mark.parametrize("scaled", [False, True])
def test_argnums_aux_and_keyword_arguments_are_those_of_jax(scaled):
  def fun(x, w, *, v, count):
    return jnp.mean((x @ w @ v) ** 2), {"count": count + 1, "name": "aux", "none": None}

  tx = SCALED(optax.sgd(0.1)) if scaled else optax.sgd(0.1)
  state = tx.init(PARAMS)
  keywords = {"v": PARAMS["v"], "count": 2}
  for argnums in (0, 1, (1,), (0, 1), -1):
    (loss, aux), grads = mpjax.value_and_grad(fun, state, argnums, has_aux=True)(X, PARAMS["w"], **keywords)
    (expected, _), plain = jax.value_and_grad(fun, argnums, has_aux=True)(X, PARAMS["w"], **keywords)
    close(loss, expected)
    assert aux == {"count": 3, "name": "aux", "none": None}
    assert jax.tree.structure(grads) == jax.tree.structure(plain)
    close(jax.tree.map(lambda g: g / scale_of(state), grads), plain)


@pytest.mark.parametrize("policy", ["fp32", "bf16", "fp16", {"base": "fp16", "loss_scaling": 128.0}])
def test_one_loop_trains_under_every_policy(policy):
  policy = mpjax.get_policy(policy)
  tx = mpjax.with_loss_scaling(optax.adamw(1e-2), policy)

  @jax.jit
  def step(params, state, x):
    loss, grads = mpjax.value_and_grad(mpjax.autocast(loss_fn, policy), state)(params, x)
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state, loss

  def reference(params, state, x):
    loss, grads = jax.value_and_grad(loss_fn)(params, x)
    updates, state = optax.adamw(1e-2).update(grads, state, params)
    return optax.apply_updates(params, updates), state, loss

  ours, theirs = (PARAMS, tx.init(PARAMS)), (PARAMS, optax.adamw(1e-2).init(PARAMS))
  for _ in range(20):
    *ours, loss = step(*ours, X)
    *theirs, expected = jax.jit(reference)(*theirs, X)
  np.testing.assert_allclose(loss, expected, rtol=1e-6 if policy.label == "fp32" else 0.02)
  assert loss < 0.9 * loss_fn(PARAMS, X)


def test_a_loss_in_half_precision_comes_out_in_float32():
  state = SCALED(optax.sgd(1.0)).init(PARAMS)
  low = lambda p: loss_fn(mpjax.cast_floating(p, jnp.float16), X.astype(jnp.float16)).astype(jnp.float16)
  loss, grads = mpjax.value_and_grad(low, state)(PARAMS)
  assert (loss.dtype, loss) == (jnp.float32, low(PARAMS).astype(jnp.float32))
  assert mpjax.all_finite(grads)
  close(jax.tree.map(lambda g: g / 2.0**10, grads), jax.grad(low)(PARAMS), rtol=0.1, atol=1e-3)


MODES = {
  "checking_leaks": jax.checking_leaks,
  "strict promotion": lambda: jax.numpy_dtype_promotion("strict"),
  "disable_jit": jax.disable_jit,
  "x64": lambda: jax.enable_x64(True),
}


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_steps_under_modes_that_find_mistakes(mode, scaled):
  inner = optax.sgd(0.1, momentum=0.9)
  tx = SCALED(inner) if scaled else inner

  def of(params, x):
    new = {"mean": jnp.mean(x, 0), "count": jnp.ones([], jnp.int32)}
    return jnp.mean((jnp.tanh(x @ params["w"]) @ params["v"]) ** 2), new

  @jax.jit
  def step(params, state, stats, x):
    (loss, new), grads = mpjax.value_and_grad(of, state, has_aux=True)(params, x)
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state, mpjax.keep_if_finite(state, new, stats), loss

  with MODES[mode]():
    stats = {"mean": jnp.zeros(8, jnp.float32), "count": jnp.zeros([], jnp.int32)}
    params, state = PARAMS, tx.init(PARAMS)
    for _ in range(2):
      params, state, stats, loss = step(params, state, stats, X)
  assert int(stats["count"]) == 1
  assert stats["mean"].dtype == jnp.float32
  assert loss < of(PARAMS, X)[0]


@pytest.mark.parametrize("scaled", [False, True])
def test_a_scan_of_steps_keeps_statistics_of_finite_steps(scaled):
  tx = SCALED(optax.sgd(0.1)) if scaled else optax.sgd(0.1)

  def of(params, x):
    return jnp.mean((x @ params["w"]) ** 2), jnp.mean(x, 0)

  def step(carry, x):
    params, state, stats = carry
    (loss, new), grads = mpjax.value_and_grad(of, state, has_aux=True)(params, x)
    updates, state = tx.update(grads, state, params)
    return (optax.apply_updates(params, updates), state, mpjax.keep_if_finite(state, new, stats)), loss

  xs = jnp.stack([X, X.at[0, 0].set(jnp.inf), 2 * X])
  first = (PARAMS, tx.init(PARAMS), jnp.zeros(8))
  (params, state, stats), losses = jax.jit(lambda xs: jax.lax.scan(step, first, xs))(xs)
  if scaled:
    assert int(mpjax.get_loss_scale(state).skipped_steps) == 1
    assert mpjax.all_finite(params)
    close(stats, jnp.mean(2 * X, 0))
  (_, _, after_two), _ = jax.lax.scan(step, first, xs[:2])
  assert bool(mpjax.all_finite(after_two)) == scaled
  np.testing.assert_array_equal(np.isfinite(losses[:2]), [True, False])


@pytest.mark.parametrize("bad", [None, 5])
@pytest.mark.parametrize("how", ["pmap", "shard_map", "shard_map, check_vma=False"])
def test_shards_agree_on_the_step_and_on_what_is_kept(how, bad):
  tx = SCALED(optax.sgd(0.1), axis_name="d")
  x = jnp.asarray(RNG.normal(size=(16, 8)), jnp.float32)
  seen = x if bad is None else x.at[2 * bad, 0].set(jnp.inf)
  state = tx.init(PARAMS)

  def of(params, x):
    return jnp.mean((jnp.tanh(x @ params["w"]) @ params["v"] - 1) ** 2), jnp.mean(x, 0)

  def step(params, state, stats, x):
    if how == "shard_map":  # gradients of what varies are each shard's own
      local = jax.tree.map(lambda p: jax.lax.pcast(p, "d", to="varying"), params)
    else:
      local = params
    (loss, new), grads = mpjax.value_and_grad(of, state, has_aux=True)(local, x)
    grads, loss, new = jax.lax.pmean((grads, loss, new), "d")
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state, mpjax.keep_if_finite(state, new, stats), loss

  if how == "pmap":
    stack = lambda tree: jax.tree.map(lambda leaf: jnp.stack([leaf] * 8), tree)
    run = jax.pmap(step, axis_name="d")
    out = run(stack(PARAMS), stack(state), stack(jnp.zeros(8)), seen.reshape(8, 2, 8))
    for leaf in jax.tree.leaves(out[:3]):
      np.testing.assert_array_equal(leaf, jnp.stack([leaf[0]] * 8))
    params, state, stats, loss = jax.tree.map(lambda leaf: leaf[0], out)
  else:
    mesh = jax.make_mesh((8,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    whole = PartitionSpec()
    run = jax.shard_map(
      step,
      mesh=mesh,
      in_specs=(whole, whole, whole, PartitionSpec("d")),
      out_specs=whole,
      check_vma=how == "shard_map",
    )
    params, state, stats, loss = jax.jit(run)(PARAMS, state, jnp.zeros(8), seen)
  if bad is not None:
    close((params, stats), (PARAMS, jnp.zeros(8)))
    assert int(mpjax.get_loss_scale(state).skipped_steps) == 1
    return
  (expected, _), grads = jax.value_and_grad(of, has_aux=True)(PARAMS, x)
  close(loss, expected)
  close(stats, jnp.mean(x, 0), rtol=1e-5)
  close(params, jax.tree.map(lambda p, g: p - 0.1 * g, PARAMS, grads), rtol=1e-5)


def test_an_ensemble_under_vmap_has_a_scale_and_a_skip_for_each_member():
  tx = SCALED(optax.sgd(0.1))
  params = jax.tree.map(lambda p: jnp.stack([p, 2 * p]), PARAMS)
  x = jnp.stack([X, X.at[0, 0].set(jnp.nan)])

  def step(params, state, x):
    loss, grads = mpjax.value_and_grad(loss_fn, state)(params, x)
    _, state = tx.update(grads, state, params)
    return loss, mpjax.keep_if_finite(state, jnp.ones(2), jnp.zeros(2))

  loss, kept = jax.jit(jax.vmap(step))(params, jax.vmap(tx.init)(params), x)
  np.testing.assert_array_equal(kept, [[1, 1], [0, 0]])
  close(loss[0], loss_fn(PARAMS, X))


def test_layerwise_scales_inside_a_loss_compose_with_one_round_the_optimiser():
  scaling = mpjax.layerwise_loss_scale()

  def of(params, x):
    h = scaling.apply(jnp.tanh, scaling.layer(lambda w, x: x @ w, params["w"], scaling.start(x)))
    return jnp.mean((scaling.finish(scaling.layer(lambda w, x: x @ w, params["v"], h)) - 1) ** 2)

  for tx in (optax.sgd(1.0), SCALED(optax.sgd(1.0))):
    state = tx.init(PARAMS)
    loss, grads = jax.jit(mpjax.value_and_grad(of, state))(PARAMS, X)
    close(loss, loss_fn(PARAMS, X))
    updates, _ = tx.update(grads, state, PARAMS)
    close(jax.tree.map(lambda u: -u, updates), jax.grad(loss_fn)(PARAMS, X), rtol=1e-5)


def test_of_several_scales_one_is_named():
  tx = optax.partition(
    {"a": SCALED(optax.sgd(1.0)), "b": mpjax.static_loss_scale(optax.sgd(1.0), 4.0)}, GROUPS
  )
  state = tx.init(PARAMS)
  for use in (
    lambda **path: mpjax.value_and_grad(loss_fn, state, **path),
    lambda **path: mpjax.keep_if_finite(state, X, X, **path),
  ):
    with pytest.raises(ValueError, match=r"2 loss scales.*path="):
      use()
    use(path="'b'")
  loss, grads = mpjax.value_and_grad(loss_fn, state, path="'b'")(PARAMS, X)
  close(loss, loss_fn(PARAMS, X))
  close(grads, jax.tree.map(lambda g: 4 * g, jax.grad(loss_fn)(PARAMS, X)))


class BatchNormed(nn.Module):
  """A linen network with running statistics."""

  @nn.compact
  def __call__(self, x):
    return nn.Dense(1)(nn.relu(nn.BatchNorm(use_running_average=False)(nn.Dense(8)(x))))


def test_linen_batch_statistics_outlive_an_infinite_batch():
  model = BatchNormed()
  variables = model.init(jax.random.key(0), X)
  params, stats = variables["params"], variables["batch_stats"]
  tx = SCALED(optax.sgd(0.1))
  state = tx.init(params)

  def of(params, stats, x):
    out, mutated = model.apply({"params": params, "batch_stats": stats}, x, mutable="batch_stats")
    return jnp.mean(out**2), mutated["batch_stats"]

  @jax.jit
  def step(params, state, stats, x):
    (loss, new), grads = mpjax.value_and_grad(of, state, has_aux=True)(params, stats, x)
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state, mpjax.keep_if_finite(state, new, stats), loss

  params, state, good, _ = step(params, state, stats, X)
  params, state, kept, loss = step(params, state, good, X.at[0, 0].set(jnp.inf))
  assert not np.isfinite(loss)
  jax.tree.map(np.testing.assert_array_equal, kept, good)
  assert not np.array_equal(good["BatchNorm_0"]["mean"], stats["BatchNorm_0"]["mean"])


class NnxNormed(nnx.Module):
  """An nnx network with running statistics and dropout."""

  def __init__(self, rngs):
    self.linear = nnx.Linear(8, 8, rngs=rngs)
    self.norm = nnx.BatchNorm(8, rngs=rngs)
    self.dropout = nnx.Dropout(0.1, rngs=rngs)

  def __call__(self, x):
    return self.dropout(self.norm(self.linear(x)))


@pytest.mark.parametrize("policy", ["fp32", "fp16"])
def test_an_nnx_module_and_its_optimizer(policy):
  model = NnxNormed(nnx.Rngs(0))
  tx = mpjax.with_loss_scaling(optax.sgd(0.1), mpjax.get_policy(policy))
  optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
  of = lambda model, x: jnp.mean((model(x) - 1) ** 2)
  twin = NnxNormed(nnx.Rngs(0))
  expected, plain = nnx.value_and_grad(of)(twin, X)

  @nnx.jit
  def step(model, optimizer, x):
    old = nnx.as_pure(nnx.state(model, nnx.BatchStat))
    loss, grads = mpjax.value_and_grad(of, optimizer)(model, x)
    optimizer.update(model, grads)
    nnx.update(model, mpjax.keep_if_finite(optimizer, nnx.state(model, nnx.BatchStat), old))
    return loss

  close(step(model, optimizer, X), expected)
  kernel = NnxNormed(nnx.Rngs(0)).linear.kernel[...]
  close(model.linear.kernel[...], kernel - 0.1 * plain["linear"]["kernel"][...], rtol=1e-5)
  close(model.norm.mean[...], twin.norm.mean[...])
  step(model, optimizer, X.at[0, 0].set(jnp.inf))
  assert bool(jnp.isfinite(model.norm.mean[...]).all()) == (policy == "fp16")


def test_the_own_variables_of_a_module_are_refused_as_the_old_ones():
  model = NnxNormed(nnx.Rngs(0))
  optimizer = nnx.Optimizer(model, SCALED(optax.sgd(0.1)), wrt=nnx.Param)
  statistics = nnx.state(model, nnx.BatchStat)
  with pytest.raises(ValueError, match=r"same Variables.*nnx\.as_pure"):
    mpjax.keep_if_finite(optimizer, nnx.state(model, nnx.BatchStat), statistics)


def test_an_equinox_module_is_differentiated_as_a_tree():
  model = eqx.nn.MLP(8, 1, 8, 1, key=jax.random.key(0))
  params, static = eqx.partition(model, eqx.is_inexact_array)
  of = lambda params, x: jnp.mean(jax.vmap(eqx.combine(params, static))(x) ** 2)
  state = SCALED(optax.sgd(0.1)).init(params)
  loss, grads = mpjax.value_and_grad(of, state)(params, X)
  close(loss, of(params, X))
  close(jax.tree.map(lambda g: g / 2.0**10, grads), jax.grad(of)(params, X))
  assert mpjax.keep_if_finite(state, model, model).activation is model.activation


def test_what_is_kept_has_the_dtypes_of_the_old():
  new = {
    "half": jnp.ones(2, jnp.bfloat16),
    "key": jax.random.key(1),
    "count": 2,
    "none": None,
    "np": np.ones(2),
  }
  old = {
    "half": jnp.zeros(2),
    "key": jax.random.key(0),
    "count": 1,
    "none": None,
    "np": np.zeros(2, np.float32),
  }
  for tx in (optax.sgd(1.0), SCALED(optax.sgd(1.0))):
    state = tx.init(PARAMS)
    kept = mpjax.keep_if_finite(state, new, old)
    assert kept["half"].dtype == jnp.float32
    assert (kept["np"] == 1).all()
    assert (kept["half"] == 1).all()
    assert int(kept["count"]) == 2
    assert jax.random.key_data(kept["key"])[1] == 1
  _, state = tx.update(jax.tree.map(lambda p: p * jnp.inf, PARAMS), state)
  kept = mpjax.keep_if_finite(state, new, old)
  assert (kept["half"] == 0).all()
  assert int(kept["count"]) == 1
  assert jax.random.key_data(kept["key"])[1] == 0


MISTAKES = {
  "an optimiser in place of its state": (
    lambda: mpjax.value_and_grad(loss_fn, SCALED(optax.sgd(1.0))),
    TypeError,
    r"opt_state is an optimiser: pass its state",
  ),
  "the same, to keep": (
    lambda: mpjax.keep_if_finite(optax.sgd(1.0), 1, 2),
    TypeError,
    r"opt_state is an optimiser",
  ),
  "arguments swapped": (
    lambda: mpjax.value_and_grad(SCALED(optax.sgd(1.0)).init(PARAMS), loss_fn),
    TypeError,
    r"fun is a LossScaleState: call mpjax\.value_and_grad\(loss_fn, opt_state\)",
  ),
  "aux that was not announced": (
    lambda: of_state(lambda p: (p["w"].sum(), 1))(PARAMS),
    TypeError,
    r"loss that is tuple.*has_aux=True",
  ),
  "no aux": (
    lambda: of_state(lambda p: p["w"].sum(), has_aux=True)(PARAMS),
    TypeError,
    r"expected \(loss, aux\)",
  ),
  "an integer loss": (lambda: of_state(lambda p: jnp.int32(1))(PARAMS), TypeError, r"loss that is int32"),
  "a vector": (lambda: of_state(lambda p: p["w"][0])(PARAMS), TypeError, r"scalar"),
  "other structure": (
    lambda: mpjax.keep_if_finite(SCALED(optax.sgd(1.0)).init(PARAMS), {"a": X, "b": X}, {"a": X}),
    ValueError,
    r"differ in structure \(at b\)",
  ),
}


def of_state(fun, **options):
  return mpjax.value_and_grad(fun, SCALED(optax.sgd(1.0)).init(PARAMS), **options)


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_an_error_that_says_what_to_do(name):
  make, error, message = MISTAKES[name]
  with pytest.raises(error, match=message) as info:
    make()
  assert len(str(info.value)) < 300


def test_a_policy_in_place_of_a_loss_scaling_is_taken_and_errors_are_short():
  policy = mpjax.get_policy("fp16")
  state = mpjax.with_loss_scaling(optax.sgd(1.0), policy).init(PARAMS)
  assert mpjax.get_loss_scale(state).scale == policy.loss_scaling.init_scale
  plain = optax.sgd(1.0)
  assert mpjax.with_loss_scaling(plain, mpjax.get_policy("bf16")) is plain
  with pytest.raises(ValueError, match=r"loss_scaling=tuple") as info:
    mpjax.with_loss_scaling(plain, (policy, policy))
  assert len(str(info.value)) < 400
