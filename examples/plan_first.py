"""A plan before the launch: what a step needs on an H100, and which policy makes it fit. No GPU is needed.

Run it: python examples/plan_first.py [TARGET]; h100 by default; h200, v5e, l4, t4, a100 are others

Nothing is allocated: parameters and batch are shapes. With the packages of the extra plan-cuda or plan-tpu
plan(..., compile="auto") asks the target's own compiler, too.
"""

import sys

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

import mpjax

DIM, LAYERS, VOCAB, TOKENS = 3072, 28, 32768, 2048


class Block(nn.Module):
  @nn.compact
  def __call__(self, x, _):
    h = nn.LayerNorm(name="norm1")(x)
    q, k, v = jnp.split(nn.Dense(3 * DIM, use_bias=False, name="qkv")(h), 3, axis=-1)
    heads = lambda t: t.reshape(*t.shape[:-1], DIM // 128, 128)
    h = jax.nn.dot_product_attention(heads(q), heads(k), heads(v), is_causal=True).reshape(x.shape)
    x = x + nn.Dense(DIM, use_bias=False, name="out")(h)
    h = nn.gelu(nn.Dense(4 * DIM, use_bias=False, name="up")(nn.LayerNorm(name="norm2")(x)))
    return x + nn.Dense(DIM, use_bias=False, name="down")(h), None


class GPT(nn.Module):
  @nn.compact
  def __call__(self, tokens):
    embed = nn.Embed(VOCAB, DIM, name="embed")
    layers = nn.scan(nn.remat(Block), {"params": 0}, split_rngs={"params": True}, length=LAYERS)
    x, _ = layers(name="blocks")(embed(tokens), None)
    return embed.attend(nn.LayerNorm(name="norm")(x))


MODEL = GPT()


def loss_fn(params, batch):
  logits = MODEL.apply({"params": params}, batch["tokens"][:, :-1])
  return optax.softmax_cross_entropy_with_integer_labels(logits, batch["tokens"][:, 1:]).mean()


def main(target="h100", policies=("fp32", "bf16", "bf16_lean"), batch=8):
  rows = {"tokens": jax.ShapeDtypeStruct((batch, TOKENS + 1), jnp.int32)}
  tokens = jax.ShapeDtypeStruct((1, TOKENS), jnp.int32)
  params = jax.eval_shape(MODEL.init, jax.random.key(0), tokens)["params"]
  plans = {}
  for policy in policies:
    step = mpjax.make_train_step(loss_fn, optax.adamw(3e-4, b2=0.95), policy)
    state = jax.eval_shape(step.init, params)
    plans[policy] = mpjax.plan(step, state, rows, target=target, compile=False)
  count = next(iter(plans.values())).parameters
  print(f"{count / 1e9:.2f} billion parameters, {batch} x {TOKENS} tokens, on {target}")
  for policy, plan in plans.items():
    fits = "fits" if plan.peak <= plan.room else "does not fit"
    time = f", about {1e3 * plan.time.seconds:.0f} ms a step" if plan.time else ""
    print(f"{policy:>9}: {plan.peak / 1e9:5.1f} of {plan.room / 1e9:.1f} GB, {fits}{time}")
  print()
  print(plans[policies[-1]])
  return plans


if __name__ == "__main__":
  main(*sys.argv[1:2])
