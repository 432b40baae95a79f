"""Parameters that are not trained: no gradient, no state, no check, the same bits on every mesh."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, PartitionSpec

import mpjax

D = 48
RNG = np.random.default_rng(0)
BATCH = {"x": RNG.normal(size=(48, D)).astype(np.float32), "y": RNG.normal(size=(48, D)).astype(np.float32)}


# A zero with a sign, and 0.1, of which three do not sum to three times as much.
BASE = np.where(np.eye(D) > 0, 1.0, np.where(RNG.normal(size=(D, D)) > 0, 0.1, -0.0))


def params(dtype=np.float32):
  return {
    "base": {"w": jnp.asarray(BASE, dtype), "v": jnp.ones((D, D)).at[:, 0].set(0.0)},
    "lora": {"a": jnp.full((D, 4), 0.05), "b": jnp.zeros((4, D))},
  }


def loss_fn(p, batch):
  gain = jnp.sqrt(jnp.sum(p["base"]["v"] ** 2, 0))  # whose gradient is NaN in its zero column
  h = batch["x"] @ p["base"]["w"].astype(batch["x"].dtype)
  return jnp.mean((h * gain + (h @ p["lora"]["a"]) @ p["lora"]["b"] - batch["y"]) ** 2)


def mesh(devices, fsdp=1):
  shape, names = (devices // fsdp, fsdp), ("data", "fsdp")
  return jax.make_mesh(shape, names, axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:devices])


def bits(tree):
  return [np.asarray(x).tobytes() for x in jax.tree.leaves(tree)]


LABELS = {"base": "freeze", "lora": "train"}
FREEZERS = {
  "partition": lambda tx: optax.partition({"train": tx, "freeze": optax.set_to_zero()}, LABELS),
  "multi_transform": lambda tx: optax.multi_transform({"train": tx, "freeze": optax.set_to_zero()}, LABELS),
  "masked after": lambda tx: optax.chain(
    tx, optax.masked(optax.set_to_zero(), {"base": True, "lora": False})
  ),
  "by path": lambda tx: optax.chain(
    tx,
    optax.stateless_with_tree_map(lambda u, _: u),
    optax.stateless(
      lambda us, _: jax.tree_util.tree_map_with_path(
        lambda path, u: jnp.zeros_like(u) if path[0].key == "base" else u, us
      )
    ),
  ),
}
CHOICES = {
  "regex": "lora",
  "list": ["lora/a", "lora/b"],
  "booleans": {"base": {"w": False, "v": False}, "lora": {"a": True, "b": True}},
  "predicate": lambda path, leaf: path.startswith("lora/") and leaf.ndim == 2,
}


def plain_steps(tx, n):
  p, s = params(), tx.init(params())
  for _ in range(n):
    u, s = tx.update(jax.grad(loss_fn)(p, BATCH), s, p)
    p = optax.apply_updates(p, u)
  return p


@pytest.mark.parametrize("how", [*FREEZERS, *CHOICES])
def test_frozen_leaves_decide_nothing_and_cost_no_product(how):
  inner = optax.adam(1e-2)
  tx = FREEZERS[how](inner) if how in FREEZERS else inner
  step = mpjax.make_train_step(loss_fn, tx, "fp32", skip_nonfinite=True, wrt=CHOICES.get(how), donate=False)
  first = state = step.init(params())

  def plain(p, opt_state, batch):
    lora = {"lora": p["lora"]}
    grads = jax.grad(lambda lora: loss_fn({**p, **lora}, batch))(lora)
    updates, opt_state = inner.update(grads, opt_state, lora)
    return optax.apply_updates(lora, updates), opt_state

  flops = lambda lowered: lowered.compile().cost_analysis()["flops"]
  # So large that the products count, and shapes alone.
  wider = lambda x: jax.ShapeDtypeStruct([256 if n == D else n for n in x.shape], x.dtype)
  large, batch = (
    jax.tree.map(wider, params()),
    {k: jax.ShapeDtypeStruct((1024, 256), jnp.float32) for k in BATCH},
  )
  bare = flops(jax.jit(plain).lower(large, jax.eval_shape(inner.init, {"lora": large["lora"]}), batch))
  assert flops(step.jitted.lower(jax.eval_shape(step.init, large), batch)) <= 1.02 * bare
  for _ in range(3):
    state, metrics = step(state, BATCH)
  assert metrics["skipped_steps"] == 0
  assert bits(state.params["base"]) == bits(first.params["base"])
  want = plain_steps(FREEZERS["partition"](inner), 3)["lora"]
  for got, right in zip(jax.tree.leaves(state.params["lora"]), jax.tree.leaves(want), strict=True):
    np.testing.assert_allclose(got, right, rtol=1e-5, atol=1e-7)
  if how in CHOICES:
    assert all(leaf.shape != (D, D) for leaf in jax.tree.leaves(state.opt_state))
    grads = step.gradients(state, BATCH)[1]
    assert jax.tree.leaves(grads["base"]) == []


def test_what_clips_all_gradients_together_reads_the_frozen_ones():
  """As in plain optax: the norm is of all leaves, so that a NaN among them is one of each update."""
  tx = optax.chain(optax.clip_by_global_norm(1.0), FREEZERS["partition"](optax.adam(1e-2)))
  step = mpjax.make_train_step(loss_fn, tx, "fp32", skip_nonfinite=True)
  assert step(step.init(params()), BATCH)[1]["skipped_steps"] == 1


@pytest.mark.parametrize("gather", ["step", "block"])
@pytest.mark.parametrize(("devices", "fsdp"), [(1, 1), (3, 3), (8, 4)])
def test_the_same_bits_on_every_mesh(devices, fsdp, gather):
  step = mpjax.make_train_step(
    loss_fn, optax.adam(1e-2), "bf16", wrt="lora", accumulate=2, mesh=mesh(devices, fsdp), gather=gather
  )
  given = params(jnp.bfloat16)
  state = step.init(given)
  assert state.params["base"]["w"].dtype == jnp.bfloat16
  text = step.jitted.lower(state, BATCH).compile().as_text()
  reduced = [line for line in text.splitlines() if " reduce-scatter(" in line or " all-reduce(" in line]
  assert not any(f"[{D},{D}]" in line.split("reduce")[0] for line in reduced)
  spec = state.params["base"]["v"].sharding.spec
  assert "fsdp" in spec or fsdp == 1
  for _ in range(20):
    state, _ = step(state, BATCH)
  assert bits(state.params["base"]) == bits(given["base"])
  assert state.params["base"]["v"].sharding.spec == spec


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 3, 8])
def test_the_same_bits_after_a_thousand_steps(devices):
  tx = FREEZERS["partition"](optax.adam(1e-3))
  step = mpjax.make_train_step(loss_fn, tx, "fp32", skip_nonfinite=True, mesh=mesh(devices))
  given = params()
  state = step.init(given)
  for _ in range(1000):
    state, metrics = step(state, BATCH)
  assert metrics["skipped_steps"] == 0
  assert bits(state.params["base"]) == bits(given["base"])


class Net(nnx.Module):
  def __init__(self, rngs):
    self.l1 = nnx.LoRALinear(D, 96, lora_rank=2, rngs=rngs)
    self.norm = nnx.BatchNorm(96, rngs=rngs)
    self.l2 = nnx.LoRALinear(96, D, lora_rank=2, rngs=rngs)

  def __call__(self, x):
    return self.l2(jax.nn.relu(self.norm(self.l1(x))))


def of_net(model, batch):
  return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)


@pytest.mark.parametrize("gather", ["step", "block"])
def test_a_frozen_base_of_a_module_is_divided_and_not_reduced(gather):
  step = mpjax.make_train_step(
    of_net, optax.adam(1e-2), "bf16", wrt=nnx.LoRAParam, mesh=mesh(8, 8), gather=gather
  )
  state = step.init(Net(nnx.Rngs(0)))
  base = np.asarray(state.model_state["l1"]["kernel"])
  text = step.jitted.lower(state, BATCH).compile().as_text()
  assert not any("all-reduce(" in line and f"f32[{D},96]" in line for line in text.splitlines())
  assert "fsdp" in state.model_state["l1"]["kernel"].sharding.spec
  assert state.model_state["norm"]["mean"].sharding.spec == PartitionSpec()
  before = np.asarray(state.model_state["norm"]["mean"])
  for _ in range(3):
    state, metrics = step(state, BATCH)
  np.testing.assert_array_equal(state.model_state["l1"]["kernel"], base)
  assert "fsdp" in state.model_state["l1"]["kernel"].sharding.spec
  assert not np.allclose(state.model_state["norm"]["mean"], before)
  alone = mpjax.make_train_step(of_net, optax.adam(1e-2), "fp32", wrt=nnx.LoRAParam)
  other = alone.init(Net(nnx.Rngs(0)))
  assert float(metrics["loss"]) < float(alone(other, BATCH)[1]["loss"])


def test_a_frozen_base_in_place():
  step = mpjax.make_train_step(of_net, optax.adam(1e-2), "bf16", wrt=nnx.LoRAParam, mesh=mesh(3))
  model = Net(nnx.Rngs(0))
  optimizer = nnx.Optimizer(model, step.tx, wrt=nnx.LoRAParam)
  base, a = np.asarray(model.l1.kernel[...]), np.asarray(model.l1.lora.lora_b[...])
  for _ in range(2):
    step(model, optimizer, BATCH)
  np.testing.assert_array_equal(model.l1.kernel[...], base)
  assert not np.array_equal(model.l1.lora.lora_b[...], a)


def test_few_bytes_and_another_policy():
  step = mpjax.make_train_step(loss_fn, optax.adam(1e-2), "bf16_lean", wrt="lora")
  state = step.init(params())
  assert state.params["base"]["w"].dtype == jnp.float32  # as given
  assert state.params["lora"]["a"].dtype == jnp.bfloat16
  state, _ = step(state, BATCH)
  other = step.with_policy("fp16")
  adopted = other.adopt(state, step, warn=False)
  assert adopted.params["lora"]["a"].dtype == jnp.float32
  assert bits(adopted.params["base"]) == bits(params()["base"])
  other(adopted, BATCH)


def test_optax_accumulates_round_a_partition():
  tx = optax.MultiSteps(FREEZERS["partition"](optax.adam(1e-2)), 2).gradient_transformation()
  step = mpjax.make_train_step(loss_fn, tx, "fp16")
  state = step.init(params())
  for _ in range(2):
    state, metrics = step(state, BATCH)
  assert metrics["skipped_steps"] == 0
  assert bits(state.params["base"]) == bits(params()["base"])
  assert not np.array_equal(state.params["lora"]["b"], params()["lora"]["b"])


def test_own_loops_and_their_check_pass_over_frozen_leaves():
  tx = mpjax.dynamic_loss_scale(FREEZERS["partition"](optax.adam(1e-2)))
  mpjax.loss_scale.check_loss_scaling(tx, params())
  grads = jax.tree.map(jnp.ones_like, params()) | {
    "base": jax.tree.map(lambda x: x * jnp.nan, params()["base"])
  }
  for update in (tx.update, jax.jit(tx.update)):
    _, state = update(grads, tx.init(params()), params(), grad=grads)
    assert state.skipped_steps == 0


def test_an_infinite_parameter_that_nobody_moves_decides_nothing():
  masked = lambda p, b: jnp.mean(jax.nn.softmax(b["x"] @ p["w"] + jax.lax.stop_gradient(p["mask"]))[:, 0])
  step = mpjax.make_train_step(masked, optax.sgd(0.1), "fp16")
  first = {"w": np.ones((D, 2), np.float32), "mask": np.float32([0, -np.inf])}
  state, metrics = step(step.init(first), BATCH)
  assert metrics["skipped_steps"] == 0
  np.testing.assert_array_equal(state.params["mask"], first["mask"])


def test_what_is_overwritten_is_so_whatever_is_trained():
  tree = {"w": jnp.ones(3), "other": jnp.ones(3), "_overwrite_with_gradient": {"scale": jnp.ones(())}}

  @jax.custom_vjp
  def seen(x, scale):
    return x

  seen.defvjp(lambda x, scale: (x, None), lambda _, g: (g, jnp.float32(2)))
  loss = lambda p, b: jnp.sum(seen(p["w"] * p["other"], p["_overwrite_with_gradient"]["scale"]) * b.mean())
  step = mpjax.make_train_step(loss, optax.sgd(0.1), "bf16", wrt="w")
  state, _ = step(step.init(tree), jnp.ones(4))
  assert state.params["_overwrite_with_gradient"]["scale"] == 2
  assert bits(state.params["other"]) == bits(tree["other"])


def test_integers_can_be_frozen():
  step = mpjax.make_train_step(
    lambda p, b: jnp.mean((b["x"] @ (p["codes"] * p["scale"]) - b["y"]) ** 2),
    optax.sgd(0.1),
    "bf16",
    wrt="scale",
  )
  codes = jnp.asarray(RNG.integers(-127, 127, (D, D)), jnp.int8)
  state, _ = step(step.init({"codes": codes, "scale": jnp.full(D, 0.01)}), BATCH)
  np.testing.assert_array_equal(state.params["codes"], codes)


def test_a_filter_that_selects_nothing():
  step = mpjax.make_train_step(of_net, optax.sgd(0.1), "bf16", wrt="l1")
  with pytest.raises(ValueError, match="selects no variable of the module"):
    step.init(Net(nnx.Rngs(0)))


@pytest.mark.parametrize(
  ("wrt", "error", "match"),
  [
    ("lroa", ValueError, "'lroa' matches no parameter: there are base/v, base/w, lora/a"),
    ({"base": False}, ValueError, "no boolean for the parameter 'base/v'"),
    (lambda path, leaf: False, ValueError, "leaves nothing to train"),
    (nnx.LoRAParam, TypeError, "for a tree of parameters: expected a regular expression"),
    (3, TypeError, "expected a regular expression"),
  ],
)
def test_a_wrong_choice(wrt, error, match):
  with pytest.raises(error, match=match):
    mpjax.make_train_step(loss_fn, optax.sgd(0.1), "bf16", wrt=wrt).init(params())
