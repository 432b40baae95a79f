"""`make_train_step` on a mesh: what one device computes, divided; overflow and keys agreed upon by all."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn, nnx
from jax.sharding import PartitionSpec as P

import mpjax
from tests.step._problems import assert_near, assert_same, np_tree

RNG = np.random.default_rng(0)
X = RNG.normal(size=(32, 64)).astype(np.float32)
Y = RNG.integers(0, 8, 32)
BATCH = {"x": X, "y": Y}
normal = lambda *shape: (RNG.normal(size=shape) * shape[-2] ** -0.5).astype(np.float32)
WEIGHTS = {
  "in": normal(64, 64),
  "scale": np.ones(64, np.float32),
  "hidden": normal(64, 128),
  "out": normal(128, 8),
}


def mesh(data=1, fsdp=1, tensor=1):
  count = data * fsdp * tensor
  return jax.make_mesh((data, fsdp, tensor), ("data", "fsdp", "tensor"), devices=jax.devices()[:count])


def cross_entropy(logits, y):
  losses = optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), y)
  return losses.mean(), {"right": (logits.argmax(-1) == y).sum(), "mean_logit": logits.mean()}


def plain(p, batch):
  x = jax.nn.gelu(batch["x"] @ p["in"])
  x *= p["scale"] * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6)
  return cross_entropy(jax.nn.gelu(x @ p["hidden"]) @ p["out"], batch["y"])


class Normed(nn.Module):
  @nn.compact
  def __call__(self, x):
    x = nn.Dense(64, use_bias=False)(x)
    x = nn.BatchNorm(use_running_average=False, axis_name=mpjax.batch_axes() or None)(x)
    return nn.Dense(8)(nn.relu(x))


def with_statistics(p, batch, model_state):
  logits, model_state = Normed().apply({"params": p, **model_state}, batch["x"], mutable=["batch_stats"])
  return *cross_entropy(logits, batch["y"]), model_state


def of_weights():
  return {"params": WEIGHTS}


def of_statistics():
  variables = jax.jit(Normed().init)(jax.random.key(0), X)
  return {"params": variables["params"], "model_state": {"batch_stats": variables["batch_stats"]}}


def train(loss, policy, init, steps=4, batch=BATCH, tx=None, **options):
  step = mpjax.make_train_step(loss, tx or optax.adam(1e-2), policy, **options)
  state = step.init(**init(), **({"batch": batch} if step.needs_batch else {}))
  curve = []
  for _ in range(steps):
    state, metrics = step(state, batch)
    curve.append({name: np.asarray(value) for name, value in metrics.items()})
  return step, state, curve


def make(loss=plain, policy="fp32", tx=None, **options):
  return mpjax.make_train_step(loss, tx or optax.sgd(1.0), policy, **options)


def test_parameters_and_moments_are_divided_and_stay_so():
  _, state, _ = train(plain, "fp16", of_weights, 2, mesh=mesh(data=2, fsdp=4))
  first = jax.devices()[0]
  shards = lambda tree: [shard for x in jax.tree.leaves(tree) for shard in x.addressable_shards]
  on_first = lambda tree: sum(shard.data.nbytes for shard in shards(tree) if shard.device == first)
  adam = state.opt_state.inner_state[0]
  for tree in (state.params, adam.mu, adam.nu):
    whole = sum(x.nbytes for x in jax.tree.leaves(tree))
    assert on_first(tree) == (whole - 64 * 4) / 4 + 64 * 4  # the scale is whole everywhere
    # Hidden has its largest dimension divided.
    specs = [x.sharding.spec for x in jax.tree.leaves(tree)]
    assert specs == [P(None, "fsdp"), P("fsdp"), P("fsdp"), P()]


@pytest.mark.parametrize(
  ("rules", "expected"),
  [
    (
      {"in": ("tensor", None), "hidden": ("fsdp", "tensor"), "scale": ()},
      {"in": P("tensor"), "hidden": P("fsdp", "tensor"), "out": P("fsdp"), "scale": P()},
    ),
    (
      lambda path, shape: ("fsdp", *(None,) * (len(shape) - 1)) if path == "scale" else None,
      {"in": P("fsdp"), "hidden": P(None, "fsdp"), "out": P("fsdp"), "scale": P("fsdp")},
    ),
  ],
  ids=["by pattern", "by path and shape"],
)
def test_rules_of_the_user_come_first(rules, expected):
  step = make(mesh=mesh(fsdp=4, tensor=2), sharding=rules)
  placed = step.layout.shardings(jax.eval_shape(step.init, WEIGHTS)).params
  assert {name: sharding.spec for name, sharding in placed.items()} == expected


# A gradient of 1000 on every row: 8 shards give 8 times as much before it is divided.
def steep(p, batch):
  return (p["w"] * batch["g"][:, None]).sum(1).mean() * batch["weight"]


STEEP = {"w": np.zeros(2048, np.float32)}


@pytest.mark.parametrize(("reduce_dtype", "skipped"), [("float16", 1), ("float32", 0)])
def test_an_overflow_that_arises_in_the_reduction_alone_is_skipped(reduce_dtype, skipped):
  batch = {"g": np.full(16, 1000, np.float32), "weight": np.float32(1)}
  policy = {"base": "fp16", "reduce_dtype": reduce_dtype, "loss_scaling": {"init_scale": 16.0}}
  # A device's gradient is 16000, and float16 holds 65504; the sum is 128000, and 64000 at half the scale.
  step = make(steep, policy, mesh=mesh(data=8))
  state, metrics = step(step.init(STEEP), batch)
  assert metrics["grads_finite"] != skipped
  assert metrics["skipped_steps"] == skipped
  assert mpjax.get_loss_scale(state.opt_state).scale == (8 if skipped else 16)
  np.testing.assert_array_equal(state.params["w"], 0 if skipped else -1000)
  state, metrics = step(state, batch)
  assert metrics["grads_finite"]
  np.testing.assert_array_equal(state.params["w"], -1000 if skipped else -2000)


def test_gradients_are_rounded_to_the_dtype_in_which_they_cross_and_scalars_are_the_same_for_all():
  step = make(steep, {"base": "fp32", "reduce_dtype": "bfloat16"}, mesh=mesh(data=8), accumulate=2)
  # 8 devices with 1 + 2^-7 each: in bfloat16 each is held exactly; 1 + 2^-9 is not.
  for g, expected in ((1 + 2.0**-7, 1 + 2.0**-7), (1 + 2.0**-9, 1.0)):
    batch = {"g": np.full(16, g, np.float32), "weight": np.float32(0.5)}
    state, _ = step(step.init(STEEP), batch)
    np.testing.assert_array_equal(state.params["w"], -0.5 * expected)


def replicas(state):
  """Each array's copies, by the part of the array that they are of."""
  for x in jax.tree.leaves(state):
    x = jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
    parts = {}
    for shard in x.addressable_shards:
      parts.setdefault(str(shard.index), []).append(np.asarray(shard.data))
    yield from parts.values()


def assert_replicas_agree(state):
  for copies in replicas(state):
    for copy in copies:
      np.testing.assert_array_equal(copy, copies[0])


def infinite(kind):
  x = X.copy()
  x[29, 3] = kind  # on the last device
  return {"x": x, "y": Y}


@pytest.mark.parametrize(
  ("base", "shape", "reduce_dtype"),
  [
    ("fp16", {"data": 8}, "float16"),
    ("fp16", {"data": 4, "fsdp": 2}, "float16"),
    ("bf16", {"fsdp": 8}, "float32"),
  ],
)
def test_what_is_not_finite_on_one_device_skips_the_step_on_all(base, shape, reduce_dtype):
  policy = {"base": base, "reduce_dtype": reduce_dtype}
  policy |= {"loss_scaling": {"init_scale": 256}} if base == "fp16" else {}
  options = {"mesh": mesh(**shape), "skip_nonfinite": True}
  step = make(with_statistics, policy, optax.adam(1e-2), **options)
  state, _ = step(step.init(**of_statistics()), BATCH)
  kept = lambda: np_tree((state.params, state.model_state, state.opt_state.inner_state))
  before, scale = kept(), 256
  for skipped, kind in enumerate((np.inf, np.nan), 1):
    state, metrics = step(state, infinite(kind))
    scale /= 2
    assert not metrics["grads_finite"]
    assert metrics["skipped_steps"] == skipped
    assert mpjax.get_loss_scale(state.opt_state).scale == (scale if base == "fp16" else 1)
    assert_same(kept(), before)
  state, metrics = step(state, BATCH)
  assert metrics["grads_finite"]
  assert_replicas_agree(state)


def test_each_device_has_a_key_of_its_own():
  def noise(p, batch, rng):
    drawn = jax.random.normal(rng, (4,))
    same = jnp.zeros(8).at[batch["row"][0] // 4].set(drawn[0])
    return (p["w"].sum() * 0).astype(jnp.float32), {"same": same}

  init = lambda: {"params": {"w": np.zeros(4, np.float32)}, "rng": jax.random.key(0)}
  _, _, curve = train(noise, "fp32", init, 2, {"row": np.arange(32)}, optax.sgd(0.1), mesh=mesh(data=8))
  drawn = np.concatenate([c["same"] for c in curve]) * 8
  assert len(set(drawn.tolist())) == 16


class Dropped(nnx.Module):
  def __init__(self, rngs):
    self.hidden, self.out = nnx.Linear(64, 64, rngs=rngs), nnx.Linear(64, 8, rngs=rngs)
    self.drop = nnx.Dropout(0.5, rngs=rngs)

  def __call__(self, x):
    return self.out(self.drop(nnx.relu(self.hidden(x))))


def test_an_nnx_module_with_dropout_of_its_own():
  # Equal rows on all devices: their outputs differ by what dropout leaves out.
  batch = {"x": np.tile(X[:4], (8, 1)), "y": np.tile(Y[:4], 8)}

  def loss(model, batch):
    logits = model(batch["x"])
    every = jax.lax.all_gather(logits[0], mpjax.batch_axes()) if mpjax.batch_axes() else logits[::4]
    return cross_entropy(logits, batch["y"])[0], {"first": every.astype(jnp.float32)}

  step = make(loss, "bf16", optax.adam(1e-2), mesh=mesh(data=8))
  state = step.init(Dropped(nnx.Rngs(0)))
  keys = lambda state: np.asarray(jax.random.key_data(state.model_state["drop"]["rngs"]["key"]))
  before = keys(state)
  state, metrics = step(state, batch)
  assert len(np.unique(np.asarray(metrics["first"]), axis=0)) == 8
  np.testing.assert_array_equal(keys(state), before)
  assert state.model_state["drop"]["rngs"]["count"] == 1
  assert_replicas_agree(state)


@jax.custom_vjp
def remember(x, amax):
  return x


# The "gradient" of what is overwritten is its next value: here of the largest magnitude of the rows at hand, which
# float16 does not hold.
remember.defvjp(
  lambda x, amax: (x, x), lambda x, g: (g, 1e5 * jnp.abs(x).max().astype(jnp.float32).reshape(1))
)


@pytest.mark.parametrize(
  ("policy", "shape", "accumulate"),
  [("fp32", {"data": 8}, 1), ("fp16", {"data": 2, "fsdp": 4}, 2), ("fp16", None, 2)],
)
def test_what_is_overwritten_becomes_the_largest_value_of_all_rows(policy, shape, accumulate):
  """It is neither cast nor unscaled."""
  kept = "_overwrite_with_gradient"
  params = {"w": np.eye(64, dtype=np.float32), kept: {"amax": np.full(1, 2e5, np.float32)}}
  x = X / np.abs(X).max(1, keepdims=True) * np.arange(1.0, 33.0)[:, None]  # row i has amax i + 1
  loss = lambda p, batch: (remember(batch["x"], p[kept]["amax"]) @ p["w"]).mean()
  step = make(loss, policy, mesh=mesh(**shape) if shape else None, accumulate=accumulate, donate=False)
  state = step.init(params)
  after, _ = step(state, {"x": x})
  for tree in (after.params, step.gradients(state, {"x": x})[1]):
    np.testing.assert_allclose(tree[kept]["amax"], [32e5], rtol=1e-3)
    assert tree[kept]["amax"].dtype == jnp.float32


def test_amax_histories_on_a_mesh_are_those_of_all_rows():
  # Device i has rows of magnitude 2 ** i, and enough of them for an FP8 product in the middle layer.
  x = np.sign(np.tile(X, (8, 1))) * np.repeat(2.0 ** np.arange(8), 32)[:, None].astype(np.float32)
  policy = {"base": "fp8", "fp8": {"recipe": "delayed", "emulate": True, "min_dim": 16}}
  loss = lambda p, batch: (batch["x"] @ p["a"] @ p["b"] @ p["c"]).astype(jnp.float32).mean()
  init = lambda: {"params": {name: np.eye(64, dtype=np.float32) for name in "abc"}}
  _, state, _ = train(loss, policy, init, 1, {"x": x}, mesh=mesh(data=8), accumulate=2)
  (histories,) = state.fp8_state["amax"].values()
  assert np.max(histories["lhs"]) == 128


@pytest.mark.parametrize("gather", ["step", "block"])
def test_a_metric_may_be_a_number_of_python_and_a_second_step_compiles_nothing(gather):
  loss = lambda p, batch: ((p["w"] * batch["x"]).mean() * p["v"], {"weight": 0.5, "rows": 3})
  step = make(loss, tx=optax.sgd(0.1), mesh=mesh(data=2, fsdp=4), gather=gather)
  state = step.init({"w": np.ones((64,), np.float32), "v": jnp.asarray(1.5)})  # weakly typed
  for _ in range(2):
    state, metrics = step(state, {"x": X})
  assert (metrics["weight"], metrics["rows"]) == (0.5, 3 * 8)  # the mean over devices, and the sum
  assert step.jitted._cache_size() == 1
  assert_near(
    state.params["v"], 1.5 - 0.1 * X.mean() - 0.1 * ((1 - 0.15 * X.mean(0) / 64) * X).mean(), rtol=1e-3
  )


def with_dropout(p, batch, row_rngs):
  keep = lambda key, x: jnp.where(jax.random.bernoulli(key, 0.8, x.shape), x / 0.8, 0)
  return plain(p, {**batch, "x": jax.vmap(keep)(row_rngs, batch["x"])})


of_dropout = lambda: {"params": WEIGHTS, "rng": jax.random.key(1)}
CASES = {
  "keys by row": (with_dropout, of_dropout, {"accumulate": 2}),
  "statistics of the batch": (with_statistics, of_statistics, {}),
}


@pytest.mark.parametrize("case", CASES)
def test_steps_on_a_mesh_are_those_of_one_device(case):
  loss, init, options = CASES[case]
  options = {"tx": optax.sgd(0.02, momentum=0.9), **options}
  _, one, expected = train(loss, "fp32", init, **options)
  for gather in ("step", "block"):
    on_mesh = {"mesh": mesh(data=2, fsdp=2, tensor=2), "gather": gather}
    _, state, found = train(loss, "fp32", init, **options, **on_mesh)
    assert_near([m["loss"] for m in found], [m["loss"] for m in expected], rtol=1e-6)
    assert_near((state.params, state.model_state), (one.params, one.model_state), rtol=0, atol=1e-4)
