"""A training step under a policy with autocast, beside the same policy that casts parameters and batch."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import mpjax

X = np.random.default_rng(0).normal(size=(32, 8)).astype(np.float32)
Y = (X[:, :3] @ np.ones((3, 4), np.float32)).astype(np.float32)
BATCH = {"x": X, "y": Y}


class Net(nn.Module):
  @nn.compact
  def __call__(self, x, train):
    x = nn.BatchNorm(use_running_average=not train, name="norm")(
      nn.Dense(16, use_bias=False, name="first")(x)
    )
    return nn.Dense(4, name="head")(nn.relu(x))


NET = Net()
VARIABLES = NET.init(jax.random.key(0), X, False)


def loss_fn(params, batch, model_state):
  out, model_state = NET.apply({"params": params, **model_state}, batch["x"], True, mutable=["batch_stats"])
  return ((out - batch["y"]) ** 2).mean(), {"largest": jnp.abs(out).max()}, model_state


def trained(policy, steps=30, **options):
  step = mpjax.make_train_step(loss_fn, optax.adam(1e-2), policy, **options)
  state = step.init(VARIABLES["params"], model_state={"batch_stats": VARIABLES["batch_stats"]})
  metrics, losses = {}, []
  for _ in range(steps):
    state, metrics = step(state, BATCH)
    losses.append(float(metrics["loss"]))
  return step, state, metrics, losses


@pytest.mark.parametrize("base", ["bf16", "fp16"])
@pytest.mark.parametrize("accumulate", [1, 4])
def test_a_run_under_autocast_is_the_float32_run(base, accumulate):
  _, state, metrics, losses = trained({"base": base, "autocast": True}, accumulate=accumulate)
  _, exact, _, expected = trained("fp32", accumulate=accumulate)
  np.testing.assert_allclose(losses, expected, rtol=0.05, atol=0.02)
  assert {
    leaf.dtype.name for leaf in jax.tree.leaves((state.params, state.model_state, metrics["largest"]))
  } == {"float32"}
  mean = lambda state: state.model_state["batch_stats"]["norm"]["mean"]
  np.testing.assert_allclose(mean(state), mean(exact), atol=0.02)


@pytest.mark.slow
def test_gradients_are_nearer_to_float32_than_by_casting_parameters():
  def error(autocast):
    step, state, *_ = trained({"base": "bf16", "autocast": autocast}, steps=0)
    reference, start, *_ = trained("fp32", steps=0)
    ours, exact = step.gradients(state, BATCH)[1], reference.gradients(start, BATCH)[1]
    norm = lambda tree: float(optax.tree.norm(tree))
    return norm(jax.tree.map(jnp.subtract, ours, exact)) / norm(exact)

  assert error(True) <= error(False)


def trained_once(policy):
  step = mpjax.make_train_step(loss_fn, optax.sgd(0.1), policy)
  state = step.init(VARIABLES["params"], model_state={"batch_stats": VARIABLES["batch_stats"]})
  return step.jitted.lower(state, BATCH).as_text(), step.explain(state, BATCH)


def test_overrides_and_accumulation_dtype_are_honoured():
  text, explanation = trained_once({"base": "bf16", "overrides": {".*/head": "fp32"}})
  flops = explanation.matrix_flops()
  assert flops == {"bfloat16": 2 * 32 * 8 * 16, "float32": 2 * 32 * 16 * 4}
  assert {row.path for row in explanation.rows if row.flops and row.after == "float32"} == {"Net/head"}
  assert "tensor<32x16xf32>, tensor<16x4xf32>" in text
  wide, _ = trained_once({"base": "bf16", "accum_dtype": "float32"})
  assert "tensor<8x16xbf16>) -> tensor<32x16xf32>" in wide


def test_an_override_that_matches_nothing_lists_the_modules():
  with pytest.raises(ValueError, match=r"'heat' matches no module path.*Net/first.*Net/head"):
    trained_once({"base": "bf16", "overrides": {"heat": "fp32"}})


@pytest.mark.slow
def test_a_module_in_place_keeps_its_statistics_and_counts():
  class Module(nnx.Module):
    def __init__(self, rngs):
      self.first, self.norm = nnx.Linear(8, 16, rngs=rngs), nnx.BatchNorm(16, rngs=rngs)
      self.drop, self.head = nnx.Dropout(0.1, rngs=rngs), nnx.Linear(16, 4, rngs=rngs)

    def __call__(self, x):
      return self.head(self.drop(nnx.relu(self.norm(self.first(x)))))

  model = Module(nnx.Rngs(0))
  policy = {"base": "bf16", "overrides": {"Module/head": "fp32"}}
  step = mpjax.make_train_step(lambda m, b: ((m(b["x"]) - b["y"]) ** 2).mean(), optax.adam(1e-2), policy)
  optimizer = nnx.Optimizer(model, step.tx, wrt=nnx.Param)
  losses = [float(step(model, optimizer, BATCH)["loss"]) for _ in range(20)]
  assert losses[-1] < 0.5 * losses[0]
  assert type(model) is Module
  assert int(model.drop.rngs.count[...]) == 20
  assert model.norm.mean.dtype == "float32"
  assert float(jnp.abs(model.norm.mean[...]).max()) > 0


def test_autocast_is_true_or_false():
  with pytest.raises(ValueError, match=r"autocast='yes'.*true or false"):
    mpjax.get_policy({"base": "bf16", "autocast": "yes"})


@pytest.mark.parametrize("jitted", [False, True], ids=["grad", "jit of grad"])
@pytest.mark.parametrize("policy", ["bf16", "fp16"])
def test_an_optimiser_under_autocast_moves_the_parameters(policy, jitted):
  def steps(params):
    gradient = jax.grad(lambda params: loss_fn(params, BATCH, {"batch_stats": VARIABLES["batch_stats"]})[0])
    gradient = jax.jit(gradient) if jitted else gradient
    tx = optax.adam(1e-5)  # far below what bfloat16 resolves beside a weight
    state = tx.init(params)
    for _ in range(3):
      updates, state = tx.update(gradient(params), state)
      params = optax.apply_updates(params, updates)
    return params

  params = VARIABLES["params"]["head"]["kernel"] + 1
  params = {**VARIABLES["params"], "head": {**VARIABLES["params"]["head"], "kernel": params}}
  moved = jax.tree.map(jnp.subtract, jax.jit(mpjax.autocast(steps, policy))(params), params)
  exact = jax.tree.map(jnp.subtract, jax.jit(steps)(params), params)
  error = optax.tree.norm(jax.tree.map(jnp.subtract, moved, exact)) / optax.tree.norm(exact)
  assert float(error) < 0.3  # 1 where they stand still; Adam takes whole steps on gradients that are noise
