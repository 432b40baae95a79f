"""`make_train_step` on a mesh: what one device computes, divided; overflow and randomness agreed upon by all."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

import mpjax
from tests.step._small_networks import (
  BATCH,
  X,
  Y,
  cross_entropy,
  mesh,
  np_tree,
  of_statistics,
  of_weights,
  plain,
  train,
  weights,
  with_statistics,
)


def test_parameters_and_moments_are_divided_and_stay_so():
  _, state, _ = train(plain, "fp16", of_weights, mesh=mesh(data=2, fsdp=4))
  first = jax.devices()[0]
  on_first = lambda tree: sum(
    shard.data.nbytes
    for x in jax.tree.leaves(tree)
    for shard in x.addressable_shards
    if shard.device == first
  )
  adam = state.opt_state.inner_state[0]
  for tree in (state.params, adam.mu, adam.nu):
    whole = sum(x.nbytes for x in jax.tree.leaves(tree))
    assert on_first(tree) == (whole - 64 * 4) / 4 + 64 * 4  # the scale is whole everywhere
    assert [x.sharding.spec for x in jax.tree.leaves(tree)] == [
      PartitionSpec(None, "fsdp"),  # hidden: its largest dimension
      PartitionSpec("fsdp"),
      PartitionSpec("fsdp"),
      PartitionSpec(),
    ]


def test_rules_of_the_user_come_first():
  rules = {"in": ("tensor", None), "hidden": ("fsdp", "tensor"), "scale": ()}
  _, state, _ = train(plain, "fp32", of_weights, mesh=mesh(fsdp=4, tensor=2), sharding=rules, steps=1)
  specs = {name: x.sharding.spec for name, x in state.params.items()}
  P = PartitionSpec
  assert specs == {"in": P("tensor"), "hidden": P("fsdp", "tensor"), "out": P("fsdp"), "scale": P()}


def test_a_rule_may_be_a_function_of_path_and_shape():
  rule = lambda path, shape: ("fsdp", *(None,) * (len(shape) - 1)) if path == "scale" else None
  step = mpjax.make_train_step(plain, optax.sgd(1e-2), "fp32", mesh=mesh(fsdp=4), sharding=rule)
  specs = jax.tree.map(lambda s: s.spec, step.layout.shardings(jax.eval_shape(step.init, weights())).params)
  assert specs["scale"] == PartitionSpec("fsdp")
  assert specs["hidden"] == PartitionSpec(None, "fsdp")


@pytest.mark.parametrize(
  ("of", "words"),
  [
    (lambda: mpjax.make_train_step(plain, optax.sgd(1.0), "fp32", mesh=8), ["mesh=8", "jax.sharding.Mesh"]),
    (lambda: mpjax.make_train_step(plain, optax.sgd(1.0), "fp32", mesh=jax.make_mesh((8,), ("rows",))), ["'rows'", "data, fsdp, tensor"]),
    (lambda: mpjax.make_train_step(plain, optax.sgd(1.0), "fp32", sharding={}), ["mesh="]),
    (lambda: mpjax.make_train_step(plain, optax.sgd(1.0), {"base": "fp32", "reduce_dtype": "bfloat16"}), ["reduce_dtype='bfloat16'", "mesh="]),
    (lambda: mpjax.make_train_step(plain, optax.sgd(1.0), {"base": "bf16", "reduce_dtype": "float8_e5m2"}, mesh=mesh(8)), ["float8_e5m2", "float32"]),
    (lambda: train(plain, "fp32", of_weights, mesh=mesh(8), batch={"x": X[:12], "y": Y[:12]}), ["batch['x']", "[12, 64]", "8 devices"]),
    (lambda: train(plain, "fp32", of_weights, mesh=mesh(8), accumulate=8), ["accumulate=8"]),
    (lambda: mpjax.make_train_step(lambda p, b, rng, row_rngs: 0.0, optax.sgd(1.0), "fp32"), ["'rng' and 'row_rngs'"]),
  ],
)  # fmt: skip
def test_what_does_not_fit_is_named(of, words):
  with pytest.raises(ValueError) as error:
    of()
  assert all(word in str(error.value) for word in words), error.value


def test_a_mesh_of_explicit_axes_and_a_batch_laid_out_on_it():
  explicit = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Explicit,))
  _, _, expected = train(plain, "fp32", of_weights)
  step = mpjax.make_train_step(plain, optax.adam(1e-2), "fp32", mesh=explicit)
  batch = jax.device_put(BATCH, step.layout.batch_sharding)
  _, metrics = step(step.init(weights()), batch)
  np.testing.assert_allclose(metrics["loss"], expected[0]["loss"], rtol=1e-5)


# A gradient of 1000 on every row: 8 shards give 8 times as much before it is divided.
def steep(p, batch):
  return (p["w"] * batch["g"][:, None]).sum(1).mean()


STEEP = lambda: {"params": {"w": jnp.zeros(2048)}}


@pytest.mark.parametrize(("scale", "skipped"), [(2.0, False), (16.0, True)])
def test_an_overflow_that_arises_in_the_reduction_alone_is_skipped(scale, skipped):
  batch = {"g": np.full(16, 1000, np.float32)}
  policy = {"base": "fp16", "reduce_dtype": "float16", "loss_scaling": {"init_scale": scale}}
  # On each device the gradient is 1000 * scale, which float16 holds: at most 16000 of 65504.
  _, state, curve = train(steep, policy, STEEP, 1, batch, optax.sgd(1.0), mesh=mesh(data=8))
  assert curve[0]["grads_finite"] != skipped
  assert curve[0]["skipped_steps"] == skipped
  assert mpjax.get_loss_scale(state.opt_state).scale == (scale / 2 if skipped else scale)
  np.testing.assert_array_equal(state.params["w"], 0 if skipped else -1000)
  # In float32 the sum is finite.
  _, state, curve = train(
    steep, {**policy, "reduce_dtype": "float32"}, STEEP, 1, batch, optax.sgd(1.0), mesh=mesh(data=8)
  )
  assert curve[0]["grads_finite"]
  np.testing.assert_array_equal(state.params["w"], -1000)


def test_gradients_are_rounded_to_the_dtype_in_which_they_cross():
  # 8 devices with 1 + 2^-7 each: in bfloat16 each is held exactly; 1 + 2^-9 is not.
  for g, expected in ((1 + 2.0**-7, 1 + 2.0**-7), (1 + 2.0**-9, 1.0)):
    batch = {"g": np.full(8, g, np.float32)}
    _, state, _ = train(
      steep, {"base": "fp32", "reduce_dtype": "bfloat16"}, STEEP, 1, batch, optax.sgd(1.0), mesh=mesh(data=8)
    )
    np.testing.assert_array_equal(state.params["w"], -expected)


def replicas(state):
  """Each array's copies, by the part of the array that they are of."""
  for x in jax.tree.leaves(state):
    x = jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
    parts = {}
    for shard in x.addressable_shards:
      parts.setdefault(str(shard.index), []).append(np.asarray(shard.data))
    yield from parts.values()


def infinite(kind):
  batch = {"x": X.copy(), "y": Y}
  if kind is not None:
    batch["x"][29, 3] = kind  # on the last device
  return batch


@pytest.mark.parametrize(
  ("kind", "shape", "reduce_dtype"),
  [
    (np.inf, {"data": 8}, "float32"),
    (np.nan, {"data": 8}, "float16"),
    (np.nan, {"fsdp": 8}, "float32"),
    (np.inf, {"fsdp": 8}, "float16"),
    (np.inf, {"data": 4, "fsdp": 2}, "float16"),
  ],
)
def test_one_infinity_on_one_device_skips_the_step_on_all(kind, shape, reduce_dtype):
  policy = {"base": "fp16", "reduce_dtype": reduce_dtype, "loss_scaling": {"init_scale": 256}}
  step = mpjax.make_train_step(plain, optax.adam(1e-2), policy, mesh=mesh(**shape))
  state, _ = step(step.init(weights()), infinite(None))
  before = np_tree((state.params, state.opt_state.inner_state))
  state, metrics = step(state, infinite(kind))
  assert not metrics["grads_finite"]
  assert metrics["skipped_steps"] == 1
  assert mpjax.get_loss_scale(state.opt_state).scale == 128
  jax.tree.map(np.testing.assert_array_equal, np_tree((state.params, state.opt_state.inner_state)), before)
  state, metrics = step(state, infinite(None))
  assert metrics["grads_finite"]
  for copies in replicas(state):
    for copy in copies[1:]:
      np.testing.assert_array_equal(copy, copies[0])


@pytest.mark.parametrize("policy", [{"base": "fp16", "loss_scaling": {"init_scale": 256}}, "bf16"])
@pytest.mark.parametrize("shape", [{"data": 8}, {"fsdp": 8}])
def test_statistics_of_a_step_that_one_device_spoils_are_taken_back_on_all(policy, shape):
  options = {"mesh": mesh(**shape), "skip_nonfinite": True}
  step = mpjax.make_train_step(with_statistics, optax.adam(1e-2), policy, **options)
  state, _ = step(step.init(**of_statistics()), infinite(None))
  before = np_tree((state.params, state.model_state))
  state, metrics = step(state, infinite(np.nan))
  assert not metrics["grads_finite"]
  jax.tree.map(np.testing.assert_array_equal, np_tree((state.params, state.model_state)), before)
  for copies in replicas(state):
    for copy in copies[1:]:
      np.testing.assert_array_equal(copy, copies[0])


@pytest.mark.slow
def test_one_infinity_under_gspmd_and_in_a_shard_map_of_the_users_own():
  tx = mpjax.dynamic_loss_scale(optax.adam(1e-2), init_scale=256.0)
  agreed = mpjax.dynamic_loss_scale(optax.adam(1e-2), init_scale=256.0, axis_name="data")
  devices = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
  loss = lambda p, batch, state: mpjax.scale_loss(mpjax.autocast(plain, "fp16")(p, batch)[0], state)

  def gspmd(p, state, batch):
    updates, state = tx.update(jax.grad(loss)(p, batch, state), state, p)
    return optax.apply_updates(p, updates), state

  def each(p, state, batch):
    grads = jax.grad(loss)(p, batch, state)
    # Decided before the reduction, so that what differs between the devices is decided alike.
    updates, state = agreed.update(grads, state, p)
    updates = jax.lax.pmean(updates, "data")
    return optax.apply_updates(p, updates), state._replace(
      inner_state=jax.lax.pmean(state.inner_state, "data")
    )

  P = PartitionSpec
  mapped = jax.shard_map(each, mesh=devices, in_specs=(P(), P(), P("data")), out_specs=P(), check_vma=False)
  for run, transform in ((gspmd, tx), (mapped, agreed)):
    put = lambda tree, spec: jax.device_put(tree, NamedSharding(devices, spec))
    p = put(weights(), P())
    state = put(transform.init(p), P())
    p, state = jax.jit(run)(p, state, put(infinite(np.inf), P("data")))
    assert state.skipped_steps == 1
    jax.tree.map(np.testing.assert_array_equal, np_tree(p), np_tree(weights()))
    p, state = jax.jit(run)(p, state, put(infinite(None), P("data")))
    assert state.grads_finite
    for copies in replicas((p, state)):
      for copy in copies:
        np.testing.assert_array_equal(copy, copies[0])


def test_each_device_has_a_key_of_its_own():
  def noise(p, batch, rng):
    drawn = jax.random.normal(rng, (4,))
    return (p["w"].sum() * 0).astype(jnp.float32), {
      "same": jnp.zeros(8).at[batch["row"][0] // 4].set(drawn[0])
    }

  batch = {"row": np.arange(32)}
  init = lambda: {"params": {"w": jnp.zeros(4)}, "rng": jax.random.key(0)}
  _, _, curve = train(noise, "fp32", init, 2, batch, mesh=mesh(data=8))
  drawn = np.concatenate([c["same"] for c in curve]) * 8
  assert len(set(drawn.tolist())) == 16


def test_an_nnx_module_with_dropout_of_its_own():
  class Net(nnx.Module):
    def __init__(self, rngs):
      self.hidden, self.drop, self.out = (
        nnx.Linear(64, 64, rngs=rngs),
        nnx.Dropout(0.5, rngs=rngs),
        nnx.Linear(64, 8, rngs=rngs),
      )

    def __call__(self, x):
      return self.out(self.drop(nnx.relu(self.hidden(x))))

  # Equal rows on all devices: their outputs differ by what dropout leaves out.
  batch = {"x": np.tile(X[:4], (8, 1)), "y": np.tile(Y[:4], 8)}

  def loss(model, batch):
    logits = model(batch["x"])
    every = jax.lax.all_gather(logits[0], mpjax.batch_axes()) if mpjax.batch_axes() else logits[::4]
    return cross_entropy(logits, batch["y"])[0], {"first": every.astype(jnp.float32)}

  step = mpjax.make_train_step(loss, optax.adam(1e-2), "bf16", mesh=mesh(data=8))
  state = step.init(Net(nnx.Rngs(0)))
  key = np.asarray(jax.random.key_data(state.model_state["drop"]["rngs"]["key"]))
  state, metrics = step(state, batch)
  assert len(np.unique(np.asarray(metrics["first"]), axis=0)) == 8
  after = state.model_state["drop"]["rngs"]
  np.testing.assert_array_equal(jax.random.key_data(after["key"]), key)
  assert after["count"] == 1
  for copies in replicas(state):
    for copy in copies:
      np.testing.assert_array_equal(copy, copies[0])


def test_nnx_in_place_on_a_mesh():
  model = nnx.Linear(64, 64, rngs=nnx.Rngs(0))
  loss = lambda model, batch: cross_entropy(model(batch["x"]), batch["y"])
  step = mpjax.make_train_step(loss, optax.sgd(0.1), "fp32", mesh=mesh(fsdp=8))
  optimizer = nnx.Optimizer(model, step.tx, wrt=nnx.Param)
  losses = [float(step(model, optimizer, BATCH)["loss"]) for _ in range(3)]
  assert losses[2] < losses[0]
  assert model.kernel[...].sharding.spec == PartitionSpec("fsdp")


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["current", "delayed"])
def test_fp8_on_a_mesh_is_close_to_one_device(recipe):
  policy = {"base": "fp8", "fp8": {"recipe": recipe, "emulate": True}}
  _, one, expected = train(plain, policy, of_weights)
  _, many, curve = train(plain, policy, of_weights, mesh=mesh(data=2, fsdp=4))
  np.testing.assert_allclose([c["loss"] for c in curve], [c["loss"] for c in expected], rtol=3e-2)
  # Histories are of the whole batch: the largest of what the devices saw.
  histories = jax.tree.leaves(one.fp8_state)
  assert bool(histories) == (recipe == "delayed")
  for a, b in zip(histories, jax.tree.leaves(many.fp8_state), strict=True):
    assert b.sharding.is_fully_replicated
    if a.ndim:
      np.testing.assert_allclose(np.asarray(b)[-1:], np.asarray(a)[-1:], rtol=0.5)


@jax.custom_vjp
def remember(x, amax):
  return x


# The "gradient" of what is overwritten is its next value: here the largest magnitude of the rows at hand.
remember.defvjp(lambda x, amax: (x, x), lambda x, g: (g, jnp.abs(x).max().reshape(1)))


@pytest.mark.parametrize("shape", [{"data": 8}, {"fsdp": 8}, {"data": 2, "fsdp": 4}])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_what_is_overwritten_becomes_the_largest_value_of_all_devices(shape, accumulate):
  kept = "_overwrite_with_gradient"
  params = {"w": jnp.eye(64), kept: {"amax": jnp.zeros(1)}}
  x = X / np.abs(X).max(1, keepdims=True) * np.arange(1.0, 33.0)[:, None]  # row i has amax i + 1
  loss = lambda p, batch: (remember(batch["x"], p[kept]["amax"]) @ p["w"]).mean()
  step = mpjax.make_train_step(loss, optax.sgd(0.1), "fp32", mesh=mesh(**shape), accumulate=accumulate)
  state, _ = step(step.init(params), {"x": x})
  np.testing.assert_allclose(state.params[kept]["amax"], [32.0], rtol=1e-6)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_amax_histories_on_a_mesh_are_those_of_all_rows(accumulate):
  # Device i has rows of magnitude 2 ** i, and enough of them for an FP8 product in the middle layer.
  x = np.sign(np.tile(X, (8, 1))) * np.repeat(2.0 ** np.arange(8), 32)[:, None].astype(np.float32)
  policy = {"base": "fp8", "fp8": {"recipe": "delayed", "emulate": True, "min_dim": 16}}
  loss = lambda p, batch: (batch["x"] @ p["a"] @ p["b"] @ p["c"]).astype(jnp.float32).mean()
  init = lambda: {"params": {name: jnp.eye(64) for name in "abc"}}
  _, state, _ = train(loss, policy, init, 1, {"x": x}, mesh=mesh(data=8), accumulate=accumulate)
  (histories,) = state.fp8_state["amax"].values()
  assert np.max(histories["lhs"]) == 128


@pytest.mark.slow
def test_a_state_moves_between_meshes_and_trains_on():
  _, _, expected = train(plain, "fp32", of_weights)
  _, state, first = train(plain, "fp32", of_weights, 2, mesh=mesh(data=2, fsdp=4))
  other = mpjax.make_train_step(plain, optax.adam(1e-2), "fp32", mesh=mesh(fsdp=2))
  state = other.layout.place(state)
  curve = first
  for _ in range(2):
    state, metrics = other(state, BATCH)
    curve.append(metrics)
  np.testing.assert_allclose([c["loss"] for c in curve], [c["loss"] for c in expected], rtol=1e-5)


@pytest.mark.slow
def test_plain_gradients_of_a_step_on_a_mesh():
  step = mpjax.make_train_step(plain, optax.adam(1e-2), "fp16", mesh=mesh(data=2, fsdp=4))
  loss, grads = step.gradients(step.init(weights()), BATCH)
  expected, of = jax.value_and_grad(lambda p: plain(p, BATCH)[0])(weights())
  np.testing.assert_allclose(loss, expected, rtol=1e-2)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-3), np_tree(grads), np_tree(of))


@pytest.mark.slow
def test_a_scalar_in_the_batch_is_the_same_for_all():
  weighted = lambda p, batch: plain(p, batch)[0] * batch["weight"]
  batch = {**BATCH, "weight": np.float32(0.5)}
  curves = [
    train(weighted, "fp32", of_weights, 2, batch, accumulate=2, **options)[2]
    for options in ({}, {"mesh": mesh(data=4, fsdp=2)})
  ]
  np.testing.assert_allclose(*([c["loss"] for c in curve] for curve in curves), rtol=1e-5)


def test_a_metric_may_be_a_number_of_python():
  loss = lambda p, batch: (plain(p, batch)[0], {"weight": 0.5, "rows": 3})
  for gather in ("step", "block"):
    _, _, curve = train(loss, "fp32", of_weights, 1, mesh=mesh(data=2, fsdp=4), gather=gather)
    assert (curve[0]["weight"], curve[0]["rows"]) == (0.5, 3 * 8)  # the mean over devices, and the sum


def test_a_second_step_compiles_nothing():
  step = mpjax.make_train_step(
    lambda p, b: (p["w"] * b["x"]).mean(), optax.sgd(0.1), "fp32", mesh=mesh(fsdp=8)
  )
  state = step.init({"w": jnp.asarray(1.5)})  # weakly typed
  for _ in range(2):
    state, _ = step(state, {"x": X})
  assert step.jitted._cache_size() == 1
