"""purejaxrl: PPO, the whole run one program under jit, and seeds under vmap."""

from __future__ import annotations

from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

import mpjax
from tests.models.code_bases._loops import Run, autocast, scaled


class _ActorCritic(nn.Module):
  actions: int = 2

  @nn.compact
  def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    def tower(out: int, gain: float) -> jax.Array:
      y = x
      for _ in range(2):
        y = nn.tanh(nn.Dense(32, kernel_init=nn.initializers.orthogonal(np.sqrt(2)))(y))
      return nn.Dense(out, kernel_init=nn.initializers.orthogonal(gain))(y)

    return tower(self.actions, 0.01), jnp.squeeze(tower(1, 1.0), -1)


class _Transition(NamedTuple):
  done: jax.Array
  action: jax.Array
  value: jax.Array
  reward: jax.Array
  log_prob: jax.Array
  observation: jax.Array


def _pole(state: jax.Array, action: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
  """A cart with a pole: the next state, the reward, and whether the pole fell and it begins again."""
  _, x_dot, theta, theta_dot = state
  force = jnp.where(action == 1, 10.0, -10.0)
  push = (force + 0.05 * theta_dot**2 * jnp.sin(theta)) / 1.1
  turn = (9.8 * jnp.sin(theta) - jnp.cos(theta) * push) / (0.5 * (4 / 3 - 0.1 * jnp.cos(theta) ** 2 / 1.1))
  move = push - 0.05 * turn * jnp.cos(theta) / 1.1
  state = state + 0.02 * jnp.array([x_dot, move, theta_dot, turn])
  done = (jnp.abs(state[0]) > 2.4) | (jnp.abs(state[2]) > 0.21)
  first = jax.random.uniform(key, (4,), minval=-0.05, maxval=0.05)
  return jnp.where(done, first, state), jnp.float32(1), done


def purejaxrl(policy: str | None, envs: int = 4, steps: int = 32, updates: int = 4, epochs: int = 2) -> Run:
  """PPO for four seeds; the loss is under autocast, and what acts in the environment is not."""
  network = _ActorCritic()
  tx = scaled(optax.chain(optax.clip_by_global_norm(0.5), optax.adam(2.5e-3, eps=1e-5)), policy)

  def loss_fn(params: Any, part: _Transition, advantages: jax.Array, targets: jax.Array) -> jax.Array:
    logits, value = network.apply(params, part.observation)
    log_probs = jax.nn.log_softmax(logits)
    log_prob = jnp.take_along_axis(log_probs, part.action[:, None], axis=-1)[:, 0]
    clipped = part.value + jnp.clip(value - part.value, -0.2, 0.2)
    value_loss = 0.5 * jnp.maximum((value - targets) ** 2, (clipped - targets) ** 2).mean()
    ratio = jnp.exp(log_prob - part.log_prob)
    advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
    actor_loss = -jnp.minimum(ratio * advantages, jnp.clip(ratio, 0.8, 1.2) * advantages).mean()
    entropy = -jnp.sum(jnp.exp(log_probs) * log_probs, axis=-1).mean()
    return actor_loss + 0.5 * value_loss - 0.01 * entropy

  def run(key: jax.Array) -> tuple[jax.Array, jax.Array]:
    key, of_params, of_env = jax.random.split(key, 3)
    params = network.init(of_params, jnp.zeros(4))
    states = jax.random.uniform(of_env, (envs, 4), minval=-0.05, maxval=0.05)

    def update(runner: Any, _: None) -> tuple[Any, jax.Array]:
      def act(carry: Any, _: None) -> tuple[Any, _Transition]:
        params, states, key = carry
        key, of_action, of_reset = jax.random.split(key, 3)
        logits, value = network.apply(params, states)
        action = jax.random.categorical(of_action, logits)
        log_prob = jnp.take_along_axis(jax.nn.log_softmax(logits), action[:, None], axis=-1)[:, 0]
        new, reward, done = jax.vmap(_pole)(states, action, jax.random.split(of_reset, envs))
        return (params, new, key), _Transition(done, action, value, reward, log_prob, states)

      params, opt_state, states, key = runner
      (_, states, key), batch = jax.lax.scan(act, (params, states, key), None, steps)
      _, last = network.apply(params, states)

      def gae(carry: Any, t: _Transition) -> tuple[Any, jax.Array]:
        advantage, next_value = carry
        delta = t.reward + 0.99 * next_value * (1 - t.done) - t.value
        advantage = delta + 0.99 * 0.95 * (1 - t.done) * advantage
        return (advantage, t.value), advantage

      _, advantages = jax.lax.scan(gae, (jnp.zeros_like(last), last), batch, reverse=True)
      everything = (batch, advantages, advantages + batch.value)

      def epoch(carry: Any, _: None) -> tuple[Any, jax.Array]:
        params, opt_state, key = carry
        key, of_order = jax.random.split(key)
        order = jax.random.permutation(of_order, envs * steps)
        parts = jax.tree.map(
          lambda x: x.reshape(envs * steps, *x.shape[2:])[order].reshape(4, -1, *x.shape[2:]), everything
        )

        def minibatch(carry: Any, part: Any) -> tuple[Any, jax.Array]:
          params, opt_state = carry
          loss, grads = mpjax.value_and_grad(autocast(loss_fn, policy), opt_state)(params, *part)
          changes, opt_state = tx.update(grads, opt_state, params)
          return (optax.apply_updates(params, changes), opt_state), loss

        (params, opt_state), losses = jax.lax.scan(minibatch, (params, opt_state), parts)
        return (params, opt_state, key), losses

      (params, opt_state, key), losses = jax.lax.scan(epoch, (params, opt_state, key), None, epochs)
      return (params, opt_state, states, key), losses.mean()

    (_, opt_state, _, _), losses = jax.lax.scan(update, (params, tx.init(params), states, key), None, updates)
    skipped = mpjax.loss_scale.loss_scale_metrics(opt_state).get("skipped_steps", jnp.int32(0))
    return losses, skipped

  losses, skipped = jax.jit(jax.vmap(run))(jax.random.split(jax.random.key(0), 4))
  return Run(np.asarray(losses), int(skipped.sum()), {})
