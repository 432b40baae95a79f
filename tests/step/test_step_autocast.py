"""A training step under a policy with autocast, beside the same policy that casts parameters and batch."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import mpjax

X = np.random.default_rng(0).normal(size=(32, 8)).astype(np.float32)
BATCH = {"x": X, "y": X[:, :3] @ np.ones((3, 4), np.float32)}


class Net(nn.Module):
  @nn.compact
  def __call__(self, x):
    x = nn.Dense(16, use_bias=False, name="first")(x)
    return nn.Dense(4, name="head")(nn.relu(nn.BatchNorm(use_running_average=False, name="norm")(x)))


@functools.cache
def variables():
  found = jax.jit(Net().init)(jax.random.key(0), X)
  return found["params"], {"batch_stats": found["batch_stats"]}


def loss_fn(params, batch, model_state):
  out, model_state = Net().apply({"params": params, **model_state}, batch["x"], mutable=["batch_stats"])
  return ((out - batch["y"]) ** 2).mean(), {"largest": jnp.abs(out).max()}, model_state


def make(policy, **options):
  step = mpjax.make_train_step(loss_fn, optax.adam(1e-2), policy, **options)
  params, statistics = variables()
  return step, step.init(params, model_state=statistics)


@functools.cache
def trained(base):
  step, state = make({"base": base, "autocast": True}, accumulate=4)
  losses = []
  for _ in range(30):
    state, metrics = step(state, BATCH)
    losses.append(float(metrics["loss"]))
  return state, metrics, losses


@pytest.mark.parametrize("base", ["bf16", "fp16"])
def test_a_run_under_autocast_is_the_float32_run(base):
  (state, metrics, losses), (exact, _, expected) = trained(base), trained("fp32")
  np.testing.assert_allclose(losses, expected, rtol=0.05, atol=0.02)
  kept = jax.tree.leaves((state.params, state.model_state, metrics["largest"]))
  assert {leaf.dtype.name for leaf in kept} == {"float32"}
  mean = lambda state: state.model_state["batch_stats"]["norm"]["mean"]
  np.testing.assert_allclose(mean(state), mean(exact), atol=0.02)


def test_gradients_are_nearer_to_float32_than_by_casting_parameters():
  flat = lambda policy: [np.asarray(g) for g in jax.tree.leaves(gradients(*make(policy)))]
  gradients = lambda step, state: step.gradients(state, BATCH)[1]
  exact = flat("fp32")
  error = lambda autocast: sum(
    ((a - b) ** 2).sum() for a, b in zip(flat({"base": "bf16", "autocast": autocast}), exact, strict=True)
  )
  assert error(True) <= error(False)


def lowered(policy):
  step, state = make(policy)
  return step.jitted.lower(state, BATCH).as_text(), step.explain(state, BATCH)


def test_overrides_and_accumulation_dtype_are_honoured():
  text, explanation = lowered({"base": "bf16", "overrides": {".*/head": "fp32"}})
  assert explanation.matrix_flops() == {"bfloat16": 2 * 32 * 8 * 16, "float32": 2 * 32 * 16 * 4}
  assert {row.path for row in explanation.rows if row.flops and row.after == "float32"} == {"Net/head"}
  assert "tensor<32x16xf32>, tensor<16x4xf32>" in text
  wide, _ = lowered({"base": "bf16", "accum_dtype": "float32"})
  assert "tensor<8x16xbf16>) -> tensor<32x16xf32>" in wide
  with pytest.raises(ValueError, match=r"'heat' matches no module path.*Net/first.*Net/head"):
    lowered({"base": "bf16", "overrides": {"heat": "fp32"}})
  with pytest.raises(ValueError, match=r"autocast='yes'.*true or false"):
    mpjax.get_policy({"base": "bf16", "autocast": "yes"})


@pytest.mark.parametrize(
  ("policy", "wrap"), [("bf16", lambda f: f), ("fp16", jax.jit)], ids=["bf16", "fp16, jit"]
)
def test_an_optimiser_under_autocast_moves_the_parameters(policy, wrap):
  params, statistics = variables()

  def steps(params):
    gradient = wrap(jax.grad(lambda params: loss_fn(params, BATCH, statistics)[0]))
    tx = optax.adam(1e-5)  # far below what bfloat16 resolves beside a weight
    state = tx.init(params)
    for _ in range(3):
      updates, state = tx.update(gradient(params), state)
      params = optax.apply_updates(params, updates)
    return params

  leaves = lambda tree: [np.asarray(x) for x in jax.tree.leaves(tree)]
  head = {**params["head"], "kernel": np.asarray(params["head"]["kernel"]) + 1}
  params = {**params, "head": head}
  ways = jax.jit(lambda p: [mpjax.autocast(steps, policy)(p), steps(p)])(params)
  moved, exact = ([x - y for x, y in zip(leaves(way), leaves(params), strict=True)] for way in ways)
  norm = lambda leaves: np.sqrt(sum((x**2).sum() for x in leaves))
  # 1 where they stand still; Adam takes whole steps on gradients that are noise.
  assert norm([a - b for a, b in zip(moved, exact, strict=True)]) < 0.3 * norm(exact)
