"""Training runs in the manner of public code bases, written anew and small: each takes a policy, `None` for plain JAX.

The models and their losses know nothing of mpjax. A loop has the lines that a user of mpjax writes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import equinox as eqx
import equinox.internal as eqxi
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import mpjax


class Run(NamedTuple):
  """What a training run gave.

  Attributes:
    losses: of each step.
    skipped: how many steps the loss scale skipped.
    result: what a program has besides, by name.
  """

  losses: np.ndarray
  skipped: int
  result: dict[str, Any]


def _autocast(fun: Callable[..., Any], policy: str | None) -> Callable[..., Any]:
  return fun if policy is None else mpjax.autocast(fun, policy)


def _scaled(tx: optax.GradientTransformation, policy: str | None) -> optax.GradientTransformation:
  return tx if policy is None else mpjax.with_loss_scaling(tx, policy)


def _run(
  loss_fn: Callable[..., Any],
  params: Any,
  tx: optax.GradientTransformation,
  policy: str | None,
  batches: Iterable[Any],
) -> tuple[Any, np.ndarray, int]:
  """Trains in a loop of one's own; returns parameters, losses and the number of skipped steps."""
  tx = _scaled(tx, policy)
  opt_state = tx.init(params)

  @jax.jit
  def step(params: Any, opt_state: Any, batch: Any) -> tuple[Any, Any, jax.Array]:
    loss, grads = mpjax.value_and_grad(_autocast(loss_fn, policy), opt_state)(params, batch)
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss

  losses = []
  for batch in batches:
    params, opt_state, loss = step(params, opt_state, batch)
    losses.append(loss)
  metrics = mpjax.loss_scale.loss_scale_metrics(opt_state)
  return params, np.asarray(losses), int(metrics.get("skipped_steps", 0))


def _train(
  loss_fn: Callable[..., Any],
  model: Any,
  tx: optax.GradientTransformation,
  policy: str | None,
  batches: Iterable[Any],
  **options: Any,
) -> tuple[Any, np.ndarray, int]:
  """Trains by `make_train_step`; returns the last state, losses and the number of skipped steps.

  Its plain float32 step is the same step without autocast.
  """
  plain = {"base": "fp32", "autocast": False}
  step = mpjax.make_train_step(loss_fn, tx, plain if policy is None else policy, **options)
  state, losses, skipped = step.init(model), [], 0
  for batch in batches:
    state, metrics = step(state, batch)
    losses.append(metrics["loss"])
    skipped = int(metrics.get("skipped_steps", 0))
  return state, np.asarray(losses), skipped


# big_vision: a ViT in linen, its positions by einsum, dropout, a sigmoid loss, a schedule


def _positions(height: int, width: int, dim: int) -> jax.Array:
  y, x = jnp.mgrid[:height, :width]
  frequencies = 1.0 / 10_000 ** (jnp.arange(dim // 4) / (dim // 4 - 1))
  y, x = (jnp.einsum("m,d->md", each.flatten(), frequencies) for each in (y, x))
  return jnp.concatenate([jnp.sin(x), jnp.cos(x), jnp.sin(y), jnp.cos(y)], axis=1)[None]


class _Encoder(nn.Module):
  heads: int = 4

  @nn.compact
  def __call__(self, x: jax.Array, is_deterministic: bool) -> jax.Array:
    init = {"kernel_init": nn.initializers.xavier_uniform(), "deterministic": is_deterministic}
    y = nn.LayerNorm()(x)
    x = x + nn.MultiHeadDotProductAttention(num_heads=self.heads, **init)(y, y)
    y = nn.gelu(nn.Dense(4 * x.shape[-1])(nn.LayerNorm()(x)))
    return x + nn.Dense(x.shape[-1])(nn.Dropout(0.1, deterministic=is_deterministic)(y))


class _ViT(nn.Module):
  classes: int
  width: int = 32

  @nn.compact
  def __call__(self, image: jax.Array, train: bool = False) -> jax.Array:
    x = nn.Conv(self.width, (4, 4), strides=(4, 4), padding="VALID", name="embedding")(image)
    rows, height, width, dim = x.shape
    x = x.reshape(rows, height * width, dim) + _positions(height, width, dim)
    for i in range(2):
      x = _Encoder(name=f"encoderblock_{i}")(x, not train)
    x = nn.LayerNorm(name="encoder_norm")(x)
    probe = self.param("probe", nn.initializers.xavier_uniform(), (1, 1, dim))
    x = nn.MultiHeadDotProductAttention(num_heads=4)(jnp.tile(probe, (rows, 1, 1)), x)
    x = jnp.tanh(nn.Dense(dim, name="pre_logits")(x[:, 0]))
    return nn.Dense(self.classes, kernel_init=nn.initializers.zeros, name="head")(x)


def big_vision(policy: str | None) -> Run:
  """A ViT on images that are noise around the mean of their class."""
  rng, classes = np.random.default_rng(0), 10
  means = rng.standard_normal((classes, 16, 16, 3)).astype(np.float32)

  def batch(i: int) -> dict[str, Any]:
    labels = rng.integers(0, classes, 32)
    image = means[labels] + rng.standard_normal((32, 16, 16, 3)).astype(np.float32)
    return {"image": image, "labels": np.eye(classes, dtype=np.float32)[labels], "rng": jax.random.key(i)}

  model = _ViT(classes)
  params = jax.jit(model.init)(jax.random.key(0), jnp.zeros((1, 16, 16, 3)))["params"]

  def loss_fn(params: Any, batch: dict[str, Any]) -> jax.Array:
    logits = model.apply({"params": params}, batch["image"], train=True, rngs={"dropout": batch["rng"]})
    log_p, log_not_p = jax.nn.log_sigmoid(logits), jax.nn.log_sigmoid(-logits)
    labels = batch["labels"]
    return -jnp.mean(jnp.sum(labels * log_p + (1 - labels) * log_not_p, axis=-1))

  schedule = optax.warmup_cosine_decay_schedule(0.0, 3e-3, 3, 20)
  tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.95, weight_decay=1e-4))
  _, losses, skipped = _run(loss_fn, params, tx, policy, map(batch, range(12)))
  return Run(losses, skipped, {})


# purejaxrl: PPO, the whole run one program under jit, and seeds under vmap


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
  tx = _scaled(optax.chain(optax.clip_by_global_norm(0.5), optax.adam(2.5e-3, eps=1e-5)), policy)

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
          loss, grads = mpjax.value_and_grad(_autocast(loss_fn, policy), opt_state)(params, *part)
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


# jaxpi: a network for Burgers' equation, whose residual has second derivatives


class _Net(nn.Module):
  @nn.compact
  def __call__(self, t: jax.Array, x: jax.Array) -> jax.Array:
    y = jnp.stack([t, jnp.cos(jnp.pi * x), jnp.sin(jnp.pi * x)])
    for _ in range(3):
      y = jnp.tanh(nn.Dense(32, kernel_init=nn.initializers.glorot_normal())(y))
    return nn.Dense(1)(y)[0]


def jaxpi(policy: str | None) -> Run:
  """A PINN of Burgers' equation."""
  net = _Net()
  params = net.init(jax.random.key(0), jnp.zeros(()), jnp.zeros(()))
  x0 = np.linspace(-1, 1, 33, dtype=np.float32)

  def loss_fn(params: Any, points: jax.Array) -> jax.Array:
    u = lambda t, x: net.apply(params, t, x)

    def residual(t: jax.Array, x: jax.Array) -> jax.Array:
      u_t, u_x = jax.grad(u, (0, 1))(t, x)
      u_xx = jax.grad(jax.grad(u, 1), 1)(t, x)
      return u_t + u(t, x) * u_x - 0.01 / jnp.pi * u_xx

    of_start = jax.vmap(u, (None, 0))(0.0, x0) + jnp.sin(jnp.pi * x0)
    return jnp.mean(of_start**2) + jnp.mean(jax.vmap(residual)(*points) ** 2)

  rng = np.random.default_rng(0)
  points = [np.float32([rng.uniform(0, 1, 128), rng.uniform(-1, 1, 128)]) for _ in range(15)]
  tx = optax.adam(optax.exponential_decay(3e-3, 100, 0.9))
  _, losses, skipped = _run(loss_fn, params, tx, policy, points)
  return Run(losses, skipped, {})


# tunix: LoRA on a decoder in nnx


def _rotate(x: jax.Array) -> jax.Array:
  """Rotary embedding of [rows, time, heads, dim]."""
  dim = x.shape[-1]
  timescale = 10_000 ** (2 * jnp.arange(dim // 2) / dim)
  angle = jnp.arange(x.shape[1])[:, None] / timescale
  sin, cos = jnp.sin(angle)[:, None], jnp.cos(angle)[:, None]
  first, second = jnp.split(x, 2, axis=-1)
  return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


class _DecoderLayer(nnx.Module):
  def __init__(self, dim: int, heads: int, rngs: nnx.Rngs):
    self.heads = heads
    lora = functools.partial(nnx.LoRALinear, lora_rank=4, use_bias=False, rngs=rngs)
    linear = functools.partial(nnx.Linear, use_bias=False, rngs=rngs)
    self.q, self.k, self.v = lora(dim, dim), linear(dim, dim // 2), lora(dim, dim // 2)
    self.out, self.gate, self.up, self.down = (
      linear(dim, dim), linear(dim, 2 * dim), linear(dim, 2 * dim), linear(2 * dim, dim)
    )  # fmt: skip
    self.before, self.after = nnx.RMSNorm(dim, rngs=rngs), nnx.RMSNorm(dim, rngs=rngs)

  def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
    rows, time, dim = x.shape
    y = self.before(x)
    split = lambda z: z.reshape(rows, time, -1, dim // self.heads)
    q, k, v = _rotate(split(self.q(y))), _rotate(split(self.k(y))), split(self.v(y))
    q = q.reshape(rows, time, k.shape[2], -1, q.shape[-1]) * q.shape[-1] ** -0.5
    logits = jnp.einsum("btkgd,bskd->bkgts", q, k)
    weights = jax.nn.softmax(jnp.where(mask[:, None, None], logits, -2.3819763e38), axis=-1)
    x = x + self.out(jnp.einsum("bkgts,bskd->btkgd", weights, v).reshape(rows, time, dim))
    y = self.after(x)
    return x + self.down(nnx.gelu(self.gate(y)) * self.up(y))


class _Decoder(nnx.Module):
  def __init__(self, rngs: nnx.Rngs, vocab: int = 64, dim: int = 32):
    self.embed = nnx.Embed(vocab, dim, rngs=rngs)
    self.layers = nnx.List([_DecoderLayer(dim, 4, rngs) for _ in range(2)])
    self.norm = nnx.RMSNorm(dim, rngs=rngs)

  def __call__(self, tokens: jax.Array, mask: jax.Array) -> jax.Array:
    x = self.embed(tokens) * tokens.shape[-1] ** 0.5
    for layer in self.layers:
      x = layer(x, mask)
    return self.embed.attend(self.norm(x))


def tunix(policy: str | None) -> Run:
  """LoRA on the answers of prompts, whose lengths differ."""
  rng = np.random.default_rng(0)

  def batch(_: int) -> dict[str, np.ndarray]:
    lengths = rng.integers(8, 17, (8, 1))
    tokens = (rng.integers(0, 64, (8, 1)) + rng.integers(1, 4, (8, 1)) * np.arange(16)) % 64
    is_real = np.arange(16) < lengths
    attends = is_real[:, None] & np.tril(np.ones((16, 16), bool))
    return {"tokens": tokens, "mask": (is_real & (np.arange(16) >= 4)).astype(np.float32), "attends": attends}

  def loss_fn(model: _Decoder, batch: dict[str, jax.Array]) -> mpjax.Average:
    logits = model(batch["tokens"][:, :-1], batch["attends"][:, :-1, :-1])
    one_hot = jax.nn.one_hot(batch["tokens"][:, 1:], logits.shape[-1]) * batch["mask"][:, 1:, None]
    return mpjax.Average(-jnp.sum(jax.nn.log_softmax(logits) * one_hot), batch["mask"][:, 1:].sum())

  model, batches = _Decoder(nnx.Rngs(0)), list(map(batch, range(12)))
  base = np.asarray(model.layers[0].q.kernel[...])
  state, losses, skipped = _train(loss_fn, model, optax.adamw(1e-2), policy, batches, wrt=nnx.LoRAParam)
  kept = np.array_equal(base, state.model.layers[0].q.kernel[...])
  return Run(losses, skipped, {"base is kept": kept})


# mamba-jax: a selective state space by associative_scan, in Equinox


class _Mixer(eqx.Module):
  into: eqx.nn.Linear
  conv: eqx.nn.Conv1d
  project: eqx.nn.Linear
  step: eqx.nn.Linear
  log_a: jax.Array
  d: jax.Array
  out: eqx.nn.Linear
  states: int = eqx.field(static=True)

  def __init__(self, dim: int, states: int, key: jax.Array):
    keys, inner = jax.random.split(key, 5), 2 * dim
    self.into = eqx.nn.Linear(dim, 2 * inner, use_bias=False, key=keys[0])
    self.conv = eqx.nn.Conv1d(inner, inner, 4, padding=[(3, 0)], groups=inner, key=keys[1])
    self.project = eqx.nn.Linear(inner, 4 + 2 * states, use_bias=False, key=keys[2])
    self.step = eqx.nn.Linear(4, inner, key=keys[3])
    self.out = eqx.nn.Linear(inner, dim, use_bias=False, key=keys[4])
    self.log_a = jnp.log(jnp.tile(jnp.arange(1.0, states + 1), (inner, 1)))
    self.d, self.states = jnp.ones(inner), states

  def __call__(self, x: jax.Array) -> jax.Array:
    x, gate = jnp.split(jax.vmap(self.into)(x), 2, axis=-1)
    x = jax.nn.silu(self.conv(x.T).T)
    delta, b, c = jnp.split(jax.vmap(self.project)(x), [4, 4 + self.states], axis=-1)
    delta = jax.nn.softplus(jax.vmap(self.step)(delta))
    a = jnp.exp(jnp.einsum("ld,dn->ldn", delta, -jnp.exp(self.log_a)))
    bx = jnp.einsum("ld,ln,ld->ldn", delta, b, x)
    compose = lambda first, second: (second[0] * first[0], second[0] * first[1] + second[1])
    _, h = jax.lax.associative_scan(compose, (a, bx))
    y = jnp.einsum("ldn,ln->ld", h, c) + x * self.d
    return jax.vmap(self.out)(y * jax.nn.silu(gate))


class _Mamba(eqx.Module):
  embed: eqx.nn.Embedding
  norms: list[eqx.nn.RMSNorm]
  mixers: list[_Mixer]
  last: eqx.nn.RMSNorm

  def __init__(self, key: jax.Array, vocab: int = 64, dim: int = 32):
    keys = jax.random.split(key, 3)
    self.embed = eqx.nn.Embedding(weight=0.1 * jax.random.normal(keys[0], (vocab, dim)))
    self.norms = [eqx.nn.RMSNorm(dim) for _ in keys[1:]]
    self.mixers = [_Mixer(dim, 8, k) for k in keys[1:]]
    self.last = eqx.nn.RMSNorm(dim)

  def __call__(self, tokens: jax.Array) -> jax.Array:
    x = jax.vmap(self.embed)(tokens)
    for norm, mixer in zip(self.norms, self.mixers, strict=True):
      x = x + mixer(jax.vmap(norm)(x))
    return jax.vmap(self.last)(x) @ self.embed.weight.T


def mamba(policy: str | None) -> Run:
  """A small Mamba on tokens that count upwards; the module itself is what the step trains."""
  rng = np.random.default_rng(0)
  rows = lambda _: (rng.integers(0, 64, (8, 1)) + rng.integers(1, 4, (8, 1)) * np.arange(25)) % 64

  def loss_fn(model: _Mamba, tokens: jax.Array) -> jax.Array:
    logits = jax.vmap(model)(tokens[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

  model = _Mamba(jax.random.key(0))
  _, losses, skipped = _train(loss_fn, model, optax.adamw(3e-3), policy, map(rows, range(12)))
  return Run(losses, skipped, {})


# diffrax: a neural ODE, solved with an adaptive step in a checkpointed loop, whose residuals have Python values


def _solve(field: Callable[..., Any], y0: jax.Array, times: jax.Array, tolerance: float = 1e-3) -> Any:
  """Integrates from the first time to the last by Heun's method with an adaptive step.

  Returns:
    Times and solution at the times that were asked for, the number of steps, and whether it came to the end.
  """
  loop = functools.partial(eqxi.while_loop, kind="checkpointed")

  def step(carry: Any) -> Any:
    t, dt, y, index, saved, steps = carry
    end = jnp.minimum(t + dt, times[-1])
    h = jnp.where(t < end, end - t, 1)  # of a row that waits for others
    k1 = field(t, y)
    k2 = field(end, y + h * k1)
    new, error = y + h * (k1 + k2) / 2, h * (k2 - k1) / 2
    size = tolerance + tolerance * jnp.maximum(jnp.abs(y), jnp.abs(new))
    scaled = jnp.sqrt(jnp.mean(jax.lax.stop_gradient(error / size) ** 2))
    is_kept = scaled < 1
    factor = jnp.clip(0.9 * jax.lax.rsqrt(jnp.maximum(scaled, 1e-3)), 0.2, 5.0)

    def save(carry: Any) -> Any:
      index, (saved_t, saved_y) = carry
      at = times[index]
      theta = (at - t) / h
      between = y + theta * h * (k1 + theta * (k2 - k1) / 2)
      return index + 1, (saved_t.at[index].set(at), saved_y.at[index].set(between))

    is_here = lambda carry: (
      is_kept & (times[jnp.minimum(carry[0], len(times) - 1)] <= end) & (carry[0] < len(times))
    )
    index, saved = loop(is_here, save, (index, saved), max_steps=len(times))
    t, y = jnp.where(is_kept, end, t), jnp.where(is_kept, new, y)
    return t, h * factor, y, index, saved, steps + 1

  saved = (jnp.full(times.shape, times[0]), jnp.zeros((len(times), *y0.shape)).at[0].set(y0))
  first = (times[0], times[1] - times[0], y0, 1, saved, 0)
  goes_on = lambda carry: carry[0] < times[-1]
  t, *_, saved, steps = loop(goes_on, step, first, max_steps=256, checkpoints=16)
  return *saved, steps, t >= times[-1]


class Ode(NamedTuple):
  """A neural ODE that learns a spiral.

  Attributes:
    solution: (params, batch) -> what `_solve` returns, for each row.
    loss: (params, batch) -> float32[].
    params: arrays of the field.
    batch: first values, times, and the solution at them.
  """

  solution: Callable[..., Any]
  loss: Callable[..., jax.Array]
  params: Any
  batch: tuple[np.ndarray, np.ndarray, np.ndarray]


def ode() -> Ode:
  """Returns a neural ODE, the loss of which holds the solver and all."""
  rng = np.random.default_rng(0)
  times = np.linspace(0, 1.5, 12, dtype=np.float32)
  turn = np.array([[-0.1, 2.0], [-2.0, -0.1]])
  y0 = rng.uniform(-1, 1, (16, 2)).astype(np.float32)
  flows = [np.linalg.matrix_power(np.eye(2) + turn * 1e-3, round(1000 * float(t))) for t in times]
  wanted = np.stack([y0 @ flow.T for flow in flows], axis=1).astype(np.float32)
  model = eqx.nn.MLP(2, 2, 32, 2, activation=jax.nn.softplus, key=jax.random.key(0))
  params, static = eqx.partition(model, eqx.is_inexact_array)

  def solution(params: Any, batch: Any) -> Any:
    model = eqx.combine(params, static)
    return jax.vmap(lambda y0: _solve(lambda t, y: model(y), y0, batch[1]))(batch[0])

  def loss(params: Any, batch: Any) -> jax.Array:
    return jnp.mean((solution(params, batch)[1] - batch[2]) ** 2)

  return Ode(solution, loss, params, (y0, times, wanted))


def diffrax(policy: str | None) -> Run:
  """A neural ODE in training: the whole loss is under autocast, solver and all."""
  at = ode()
  _, losses, skipped = _run(at.loss, at.params, optax.adabelief(3e-3), policy, [at.batch] * 12)
  return Run(losses, skipped, {})


RUNS = {f.__name__: f for f in (big_vision, purejaxrl, jaxpi, tunix, mamba, diffrax)}
