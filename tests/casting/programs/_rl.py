"""Reinforcement learning, from pixels to preferences: ratios, advantages, rollouts, targets."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from tests.casting.programs._ideal import Out, program


def mlp(half, params, x):
  return half.dot(jnp.tanh(half.dot(x, params["in"])), params["out"])


def advantages(rewards, values, ends, discount=0.99, decay=0.95):
  """Generalised advantage estimation over [T, B], values [T + 1, B]."""

  def step(carry, now):
    reward, value, following, end = now
    delta = reward + discount * following * (1 - end) - value
    carry = delta + discount * decay * (1 - end) * carry
    return carry, carry

  xs = rewards, values[:-1], values[1:], ends
  return jax.lax.scan(step, jnp.zeros_like(rewards[0]), xs, reverse=True)[1]


@program(
  "control: PPO, log-probabilities by a one-hot einsum, GAE by a scan",
  {"in": (12, 32), "out": (32, 6), "critic_in": (12, 32), "critic": (32, 1)},
  lambda rng: {
    "x": rng.standard_normal((17, 8, 12)),
    "actions": rng.integers(0, 6, (16, 8)),
    "rewards": rng.standard_normal((16, 8)),
    "ends": (rng.random((16, 8)) < 0.1) * 1.0,
    "old": -1.8 + 0.1 * rng.standard_normal((16, 8)),
  },
)
def ppo(half, params, inputs):
  log_p = jax.nn.log_softmax(mlp(half, params, inputs["x"][:-1]))
  picked = jnp.einsum("tba,tba->tb", log_p, jax.nn.one_hot(inputs["actions"], 6))
  values = mlp(half, {"in": params["critic_in"], "out": params["critic"]}, inputs["x"])[..., 0]
  gain = advantages(inputs["rewards"], jax.lax.stop_gradient(values), inputs["ends"])
  scaled = (gain - gain.mean()) / (gain.std() + 1e-8)
  ratio = jnp.exp(picked - inputs["old"])
  surrogate = jnp.minimum(ratio * scaled, jnp.clip(ratio, 0.8, 1.2) * scaled)
  entropy = -jnp.sum(jnp.exp(log_p) * log_p, -1)
  error = values[:-1] - jax.lax.stop_gradient(gain + values[:-1])
  loss = -surrogate.mean() + 0.5 * jnp.mean(error**2) - 0.01 * entropy.mean()
  return Out(loss, {"ratio": ratio, "gain": gain, "entropy": entropy})


@program(
  "control: a sequence's ratio with itself, picked by a product with a one-hot and by a gather",
  {"turn": lambda rng: 2.0 * rng.permutation(np.eye(20))},
  lambda rng: {
    "x": rng.integers(-12, 12, (4, 50, 20))
    / 8,  # a product that is exact: log-probabilities may not be rounded
    "actions": rng.integers(0, 20, 50),
    "gain": rng.standard_normal(4),
  },
)
def sequence_ratio(half, params, inputs):
  log_p = jax.nn.log_softmax(half.dot(inputs["x"], params["turn"]))
  new = jnp.einsum("btv,tv->bt", log_p, jax.nn.one_hot(inputs["actions"], 20))
  old = jax.lax.stop_gradient(jnp.take_along_axis(log_p, inputs["actions"][None, :, None], -1)[..., 0])
  ratio = jnp.exp(jnp.sum(new - old, -1))
  return Out(-jnp.mean(ratio * inputs["gain"]), {"ratio": ratio, "picked": new})


@program(
  "preferences: DPO, sums of token log-probabilities against a reference",
  {"embed": (30, 16), "in": (16, 32), "out": (32, 30)},
  lambda rng: {
    "chosen": rng.integers(0, 30, (16, 13)),
    "rejected": rng.integers(0, 30, (16, 13)),
    "reference": -45 + rng.standard_normal((2, 16)),
  },
)
def dpo(half, params, inputs):
  def log_probability(tokens):
    log_p = jax.nn.log_softmax(mlp(half, params, 5 * params["embed"][tokens[:, :-1]]))
    mask = tokens[:, 1:] != 0
    return jnp.sum(jnp.take_along_axis(log_p, tokens[:, 1:, None], -1)[..., 0] * mask, -1)

  chosen, rejected = log_probability(inputs["chosen"]), log_probability(inputs["rejected"])
  margin = 0.5 * ((chosen - inputs["reference"][0]) - (rejected - inputs["reference"][1]))
  wins = jnp.sum(inputs["chosen"] != 0, -1)
  return Out(-jax.nn.log_sigmoid(margin).mean(), {"margin": margin, "chosen": chosen}, wins)


@program(
  "preferences: GRPO, advantages in a group, ratios and a KL of log-ratios",
  {"embed": (30, 16), "in": (16, 32), "out": (32, 30)},
  lambda rng: {
    "tokens": rng.integers(0, 30, (8, 17)),
    "old": -3.5 + 0.2 * rng.standard_normal((8, 16)),
    "rewards": rng.standard_normal((2, 4)),
  },
)
def grpo(half, params, inputs):
  log_p = jax.nn.log_softmax(mlp(half, params, 5 * params["embed"][inputs["tokens"][:, :-1]]))
  token = jnp.sum(log_p * jax.nn.one_hot(inputs["tokens"][:, 1:], 30), -1)
  rewards = inputs["rewards"]
  gain = (rewards - rewards.mean(1, keepdims=True)) / (rewards.std(1, keepdims=True) + 1e-6)
  ratio = jnp.exp(token - inputs["old"])
  gain = gain.reshape(8, 1)
  surrogate = jnp.minimum(ratio * gain, jnp.clip(ratio, 0.8, 1.28) * gain)
  away = inputs["old"] - token
  kl = jnp.exp(away) - away - 1
  return Out(jnp.mean(0.04 * kl - surrogate), {"kl": kl, "ratio": ratio})


@program(
  "control: a rollout of a pendulum in a scan, a policy inside, gradients through time",
  {"in": (3, 32), "out": (32, 1)},
  lambda rng: {"angle": rng.uniform(-1, 1, 16), "seed": rng.integers(0, 2**31)},
)
def pendulum_rollout(half, params, inputs):
  def step(state, key):
    angle, speed, steps = state
    seen = jnp.stack([jnp.cos(angle), jnp.sin(angle), speed], -1)
    torque = jnp.tanh(mlp(half, params, seen)[..., 0]) + 0.1 * jax.random.normal(key, angle.shape)
    speed = speed + 0.01 * (9.8 * jnp.sin(angle) + torque)
    state = angle + 0.01 * speed, speed, steps + 1
    return state, -(angle**2) - 0.1 * speed**2

  start = inputs["angle"], jnp.zeros(16), jnp.zeros(16, int)
  (angle, speed, steps), rewards = jax.lax.scan(
    step, start, jax.random.split(jax.random.key(inputs["seed"]), 100)
  )
  return Out(-rewards.mean(), {"angle": angle, "speed": speed, "rewards": rewards}, steps)


@program(
  "control: Q-learning with a replay drawn by priority, and a slowly moving target",
  {"in": (12, 32), "out": (32, 4)},
  lambda rng: {
    "x": rng.standard_normal((2, 500, 12)),
    "target": {"in": rng.standard_normal((12, 32)) / 12**0.5, "out": rng.standard_normal((32, 4)) / 32**0.5},
    "priority": rng.random(500),
    "rewards": rng.standard_normal(500),
    "actions": rng.integers(0, 4, 500),
    "seed": rng.integers(0, 2**31),
  },
)
def q_learning(half, params, inputs):
  sums = jnp.cumsum(inputs["priority"] ** 0.6)
  at = jnp.searchsorted(sums, jax.random.uniform(jax.random.key(inputs["seed"]), (64,)) * sums[-1])
  x, following = inputs["x"][0][at], inputs["x"][1][at]
  q = jnp.take_along_axis(mlp(half, params, x), inputs["actions"][at][:, None], -1)[:, 0]
  best = mlp(half, inputs["target"], following).max(-1)
  target = optax.incremental_update(params, inputs["target"], 0.005)
  error = q - inputs["rewards"][at] - 0.99 * jax.lax.stop_gradient(best)
  return Out(optax.huber_loss(error).mean(), {"error": error, "target": jax.lax.stop_gradient(target)}, at)


@program(
  "control: V-trace of an actor's stale policy",
  {"in": (12, 32), "out": (32, 4), "value": (32, 1)},
  lambda rng: {
    "x": rng.standard_normal((20, 4, 12)),
    "actions": rng.integers(0, 4, (20, 4)),
    "old": -1.4 + 0.1 * rng.standard_normal((20, 4)),
    "rewards": rng.standard_normal((20, 4)),
  },
)
def v_trace(half, params, inputs):
  hidden = jnp.tanh(half.dot(inputs["x"], params["in"]))
  log_p = jax.nn.log_softmax(half.dot(hidden, params["out"]))
  values = half.dot(hidden, params["value"])[..., 0]
  picked = jnp.take_along_axis(log_p, inputs["actions"][..., None], -1)[..., 0]
  weight = jnp.exp(picked - inputs["old"])
  clipped = jnp.minimum(1.0, weight)
  following = jnp.concatenate([values[1:], values[-1:]])
  deltas = clipped * (inputs["rewards"] + 0.99 * following - values)

  def step(carry, now):
    delta, c = now
    carry = delta + 0.99 * c * carry
    return carry, carry

  _, corrections = jax.lax.scan(step, jnp.zeros(4), (deltas, clipped), reverse=True)
  targets = jax.lax.stop_gradient(values + corrections)
  gain = jax.lax.stop_gradient(clipped * (inputs["rewards"] + 0.99 * jnp.roll(targets, -1, 0) - values))
  loss = jnp.mean((values - targets) ** 2) - jnp.mean(picked * gain)
  return Out(loss, {"targets": targets, "gain": gain})
