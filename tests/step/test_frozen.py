"""Parameters that are not trained: no gradient, no state, no check, the same bits on every mesh."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from flax import nnx
from jax.sharding import PartitionSpec

import mpjax
from tests.step._problems import assert_near, mesh, train

D = 48
RNG = np.random.default_rng(0)
BATCH = {"x": RNG.normal(size=(48, D)).astype(np.float32), "y": RNG.normal(size=(48, D)).astype(np.float32)}
# A zero with a sign, and 0.1, of which three do not sum to three times as much.
BASE = np.where(np.eye(D) > 0, 1.0, np.where(RNG.normal(size=(D, D)) > 0, 0.1, -0.0)).astype(np.float32)
GAIN = np.ones((D, D), np.float32)
GAIN[:, 0] = 0
PARAMS = {
  "base": {"w": BASE, "v": GAIN},
  "lora": {"a": np.full((D, 4), 0.05, np.float32), "b": np.zeros((4, D), np.float32)},
}


def loss_fn(p, batch):
  gain = jnp.sqrt(jnp.sum(p["base"]["v"] ** 2, 0))  # whose gradient is NaN in its zero column
  h = batch["x"] @ p["base"]["w"].astype(batch["x"].dtype)
  return jnp.mean((h * gain + (h @ p["lora"]["a"]) @ p["lora"]["b"] - batch["y"]) ** 2)


TX = optax.adam(1e-2)


def make(loss=loss_fn, tx=TX, policy="bf16", **options):
  return mpjax.make_train_step(loss, tx, policy, **options)


def bits(tree):
  return [np.asarray(x).tobytes() for x in jax.tree.leaves(tree)]


PARTITION = optax.partition({"train": TX, "freeze": optax.set_to_zero()}, {"base": "freeze", "lora": "train"})
AWAY = lambda path, u: jnp.zeros_like(u) if path[0].key == "base" else u
WAYS = {
  "partition": {"tx": PARTITION},
  "by path": {
    "tx": optax.chain(
      TX,
      optax.stateless_with_tree_map(lambda u, _: u),
      optax.stateless(lambda us, _: jax.tree_util.tree_map_with_path(AWAY, us)),
    )
  },
  "regex": {"wrt": "lora"},
}


def flops(step, params, batch):
  """Returns what a step takes whose sizes are so large that products count."""
  wider = lambda x: jax.ShapeDtypeStruct([512 if n == D else n for n in x.shape], x.dtype)
  params, batch = jax.tree.map(wider, (params, batch))
  return step.jitted.lower(jax.eval_shape(step.init, params), batch).compile().cost_analysis()["flops"]


@functools.cache
def alone():
  """Returns LoRA parameters after three steps that train nothing else, and what such a step takes."""
  loss = lambda lora, batch: loss_fn({"base": batch["base"], "lora": lora}, batch)
  step, batch = make(loss, policy="fp32"), BATCH | {"base": PARAMS["base"]}
  state, _ = train(step, step.init(PARAMS["lora"]), 3, batch)
  return state.params, flops(step, PARAMS["lora"], batch)


@pytest.mark.parametrize("options", WAYS.values(), ids=WAYS)
def test_frozen_leaves_decide_nothing_and_cost_no_product(options):
  step = make(policy="fp32", skip_nonfinite=True, **options)
  lora, least = alone()
  assert flops(step, PARAMS, BATCH) <= 1.02 * least
  state, metrics = train(step, step.init(PARAMS), 3, BATCH)
  assert metrics["skipped_steps"] == 0
  assert bits(state.params["base"]) == bits(PARAMS["base"])
  assert_near(state.params["lora"], lora, rtol=1e-5, atol=1e-7)


def test_what_is_not_chosen_has_neither_gradient_nor_state():
  for wrt in (
    "lora",
    ["lora/a", "lora/b"],
    {"base": {"w": False, "v": False}, "lora": {"a": True, "b": True}},
    lambda path, leaf: path.startswith("lora/") and leaf.ndim == 2,
  ):
    step = make(wrt=wrt)
    state = jax.eval_shape(step.init, PARAMS)
    grads = jax.eval_shape(step.loss_and_gradients, state, BATCH)[1]
    assert jax.tree.leaves(grads["base"]) == []
    assert jax.tree.map(lambda g: g.shape, grads["lora"]) == {"a": (D, 4), "b": (4, D)}
    assert all(leaf.shape != (D, D) for leaf in jax.tree.leaves(state.opt_state))


@pytest.mark.parametrize(
  ("axes", "gather"), [({"fsdp": 3}, "block"), ({"data": 2, "fsdp": 4}, "step")], ids=str
)
def test_the_same_bits_on_every_mesh(axes, gather):
  step = make(wrt="lora", accumulate=2, mesh=mesh(**axes), gather=gather)
  given = {**PARAMS, "base": {"w": BASE.astype(jnp.bfloat16), "v": GAIN}}
  state = step.init(given)
  assert state.params["base"]["w"].dtype == jnp.bfloat16
  text = step.jitted.lower(state, BATCH).compile().as_text()
  reduced = [line for line in text.splitlines() if " reduce-scatter(" in line or " all-reduce(" in line]
  assert not any(f"[{D},{D}]" in line.split("reduce")[0] for line in reduced)
  spec = state.params["base"]["v"].sharding.spec
  assert "fsdp" in spec
  state, _ = train(step, state, 20, BATCH)
  assert bits(state.params["base"]) == bits(given["base"])
  assert state.params["base"]["v"].sharding.spec == spec


class Net(nnx.Module):
  def __init__(self, rngs):
    self.l1 = nnx.LoRALinear(D, 96, lora_rank=2, rngs=rngs)
    self.norm = nnx.BatchNorm(96, rngs=rngs)
    self.l2 = nnx.LoRALinear(96, D, lora_rank=2, rngs=rngs)

  def __call__(self, x):
    return self.l2(jax.nn.relu(self.norm(self.l1(x))))


def of_net(model, batch):
  return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)


def test_a_frozen_base_of_a_module_is_divided_and_not_reduced():
  step = make(of_net, wrt=nnx.LoRAParam, mesh=mesh(fsdp=8), gather="block")
  state = step.init(Net(nnx.Rngs(0)))
  base, before = np.asarray(state.params["l1"]["kernel"]), np.asarray(state.model_state["norm"]["mean"])
  text = step.jitted.lower(state, BATCH).compile().as_text()
  assert not any("all-reduce(" in line and f"f32[{D},96]" in line for line in text.splitlines())
  assert state.model_state["norm"]["mean"].sharding.spec == PartitionSpec()
  state, first = step(state, BATCH)
  assert "fsdp" in state.params["l1"]["kernel"].sharding.spec
  state, last = train(step, state, 2, BATCH)
  np.testing.assert_array_equal(state.params["l1"]["kernel"], base)
  assert not np.allclose(state.model_state["norm"]["mean"], before)
  assert last["loss"] < first["loss"]


def test_an_infinite_parameter_that_nobody_moves_decides_nothing():
  masked = lambda p, b: jax.nn.softmax(b["x"] @ p["w"] + jax.lax.stop_gradient(p["mask"]))[:, 0].mean()
  step = make(masked, optax.sgd(0.1), "fp16")
  first = {"w": np.ones((D, 2), np.float32), "mask": np.float32([0, -np.inf])}
  state, metrics = step(step.init(first), BATCH)
  assert metrics["skipped_steps"] == 0
  np.testing.assert_array_equal(state.params["mask"], first["mask"])


def test_what_is_overwritten_is_so_and_integers_are_frozen_whatever_is_trained():
  codes = RNG.integers(-127, 127, 3).astype(np.int8)
  scale = {"scale": np.ones((), np.float32)}
  tree = {"w": np.ones(3, np.float32), "codes": codes, "_overwrite_with_gradient": scale}

  @jax.custom_vjp
  def seen(x, scale):
    return x

  seen.defvjp(lambda x, scale: (x, None), lambda _, g: (g, jnp.float32(2)))
  loss = lambda p, b: (seen(p["w"] * p["codes"], p["_overwrite_with_gradient"]["scale"]) * b.mean()).sum()
  step = make(loss, optax.sgd(0.1), wrt="w")
  state, _ = step(step.init(tree), np.ones(4, np.float32))
  assert state.params["_overwrite_with_gradient"]["scale"] == 2
  assert_near(state.params["w"], 1 - 0.1 * codes, rtol=0.02)
  assert bits(state.params["codes"]) == bits(codes)


def test_a_gradient_that_decides_a_branch_of_the_optimiser_is_read():
  turned = lambda u, _: {
    "a": 0 * u["b"],
    "b": jax.lax.cond(u["a"].sum() > 0, lambda: u["b"], lambda: -u["b"]),
  }
  step = make(lambda p, b: ((p["a"] + p["b"]) * b).sum(), optax.stateless(turned), "fp32")
  state, _ = step(step.init({"a": np.ones(3, np.float32), "b": np.zeros(3, np.float32)}), np.ones(3))
  np.testing.assert_array_equal(state.params["b"], 1)


def test_a_wrong_choice_is_named():
  for wrt, params, error, match in (
    ("lroa", PARAMS, ValueError, "'lroa' matches no parameter; parameters: base/v, base/w, lora/a"),
    ({"base": False}, PARAMS, ValueError, "no boolean for the parameter 'base/v'"),
    (lambda path, leaf: False, PARAMS, ValueError, "leaves nothing to train"),
    (nnx.LoRAParam, PARAMS, TypeError, "for a tree of parameters: expected a regular expression"),
    (3, PARAMS, TypeError, "expected a regular expression"),
    ("l1", Net(nnx.Rngs(0)), ValueError, "selects no variable of the module"),
  ):
    with pytest.raises(error, match=match):
      make(of_net if wrt == "l1" else loss_fn, wrt=wrt).init(params)
