"""Values at the edge of float16 (masks, epsilons, large sums and squares) under autocast: nothing new overflows."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import mpjax
from tests.casting._conformance import leaf_failures, normal
from tests.casting._jaxprs import run_together

# About ten unit roundoffs.
TOLERANCE = {"bf16": 4e-2, "fp16": 6e-3}
SMALLEST = float(jnp.finfo(jnp.float32).min)
CAUSAL = np.tri(8, dtype=bool)
# The second row attends to nothing.
EMPTY_ROW = CAUSAL & (np.arange(8) != 1)[:, None]
W = normal(8, 8, seed=1, scale=0.35)
X = normal(4, 8, 8, seed=2)


def attention(mask):
  """Attention over the middle axis whose scores go through `mask`."""

  def fun(x, w):
    scores = jnp.einsum("bqd,bkd->bqk", x @ w, x) * 8**-0.5
    return jax.nn.softmax(mask(scores)) @ x

  return fun


def guarded(scores):
  """-inf, and rows without any score kept from being not a number."""
  scores = jnp.where(EMPTY_ROW, scores, -jnp.inf)
  largest = jax.lax.stop_gradient(scores.max(-1, keepdims=True))
  largest = jnp.where(jnp.isfinite(largest), largest, 0.0)
  e = jnp.exp(scores - largest)
  return jnp.log(jnp.maximum(e / jnp.maximum(e.sum(-1, keepdims=True), 1e-30), 1e-30))


def online(scores):
  """A softmax in one pass: the running maximum begins at a number that stands for -inf."""

  def step(carry, column):
    largest, total = carry
    new = jnp.maximum(largest, column)
    return (new, total * jnp.exp(largest - new) + jnp.exp(column - new)), None

  first = jnp.full(scores.shape[:-1], -1e30), jnp.zeros(scores.shape[:-1])
  (largest, total), _ = jax.lax.scan(step, first, jnp.moveaxis(scores, -1, 0))
  return jnp.exp(scores - largest[..., None]) / total[..., None]


bias = lambda mask, value: jnp.where(mask, 0.0, value)
MASKS = {
  "-1e9 added": attention(lambda s: s + bias(CAUSAL, -1e9)),
  "the smallest added, an empty row": attention(lambda s: s + bias(EMPTY_ROW, SMALLEST)),
  "-inf added": attention(lambda s: s + bias(CAUSAL, -np.inf)),
  "-1e9 scaled": attention(lambda s: s + (1.0 - jnp.asarray(CAUSAL, jnp.float32)) * -1e9),
  "-inf selected": attention(lambda s: jnp.where(CAUSAL, s, -np.inf)),
  # Below what even bfloat16 holds.
  "twice half of the smallest": attention(
    lambda s: s + bias(CAUSAL, SMALLEST / 2) + bias(np.arange(8) < 6, SMALLEST / 2)),
  "-inf and a guarded empty row": attention(guarded),
  "softmax(where=)": lambda x, w: jax.nn.softmax(x @ w, where=CAUSAL[3]) @ w,
  "max over -inf": lambda x, w: jnp.where(CAUSAL, x @ w, -jnp.inf).max(-1) @ w,
  "argmax over masked values": lambda x, w: (
    (x @ w) * jax.nn.one_hot(jnp.where(CAUSAL, x @ w, -1e9).argmax(-1), 8)),
  "top_k over masked values": lambda x, w: jax.lax.top_k(jnp.where(CAUSAL, x @ w, SMALLEST), 1)[0],
  "logsumexp": lambda x, w: jax.nn.logsumexp(jnp.where(CAUSAL, x @ w, -1e9), -1) @ w,
  "online softmax": lambda x, w: online(x @ w),
}  # fmt: skip


def silent(x):
  """Zeros that a product made: an activation that is dead."""
  return (x @ jnp.zeros((8, 8))).astype(x.dtype)


def standardized(x, epsilon):
  mean = x.mean(-1, keepdims=True)
  return (x - mean) / jnp.sqrt(((x - mean) ** 2).mean(-1, keepdims=True) + epsilon)


def two_moments(x):
  mean, square = x.mean(-1, keepdims=True), (x * x).mean(-1, keepdims=True)
  return (x - mean) * jax.lax.rsqrt(square - mean**2 + 1e-5)


EPSILONS = {
  "divided by a norm + 1e-8": lambda x, w: x @ w / (jnp.linalg.norm(x @ w, axis=-1, keepdims=True) + 1e-8),
  "zero divided by itself + 1e-8": lambda x, w: 1e-3 * silent(x) / (jnp.abs(silent(x)) + 1e-8) + x @ w,
  "log of zero + 1e-8": lambda x, w: jnp.log(silent(x) + 1e-8) * 0.1 + x @ w,
  "log of max(zero, 1e-12)": lambda x, w: jnp.log(jnp.maximum(jax.nn.relu(silent(x)), 1e-12)) + x @ w,
  "layer norm of a constant": lambda x, w: standardized(silent(x) + 3.0, 1e-12) @ w + x @ w,
  "cosine similarity with a dead vector": lambda x, w: optax.losses.cosine_similarity(silent(x), x @ w, epsilon=1e-8),
  "entropy by hand": lambda x, w: -((p := jax.nn.softmax(5 * (x @ w))) * jnp.log(p + 1e-9)).sum(-1),
  "clip to (1e-7, 1 - 1e-7)": lambda x, w: jnp.log(jnp.clip(jax.nn.sigmoid(2 * (x @ w)), 1e-7, 1 - 1e-7)),
  "1e-8 times 1e8": lambda x, w: ((x @ w) * 1e-8) * 1e8,
}  # fmt: skip
# Of ones: 70 000 of them have a sum that float16 has not.
LONG = np.ones((1, 70_000), np.float32)
LARGE = {
  "literal 65505": lambda x, w: jnp.minimum(x @ w, 65505.0) + (x @ w) * (65505.0 / 1e5),
  "literal 1e5 in a comparison": lambda x, w: jnp.where(x @ w < 1e5, x @ w, 1e5),
  "literal 1e6 and back": lambda x, w: (x @ w + 1e6) * 1e-6,
  "mean by sum": lambda x, w: jnp.sum(LONG.T @ jnp.abs(x[0, :1]), 0) / 70_000,
  "sum of squares": lambda x, w: 1e-4 * ((300 * (x @ w)) ** 2).sum(),
  "layer norm": lambda x, w: standardized(1000 * (x @ w), 1e-6) @ w,
  "group norm by two moments": lambda x, w: two_moments(300 * (x @ w)) @ w,
  "l2 loss of 300": lambda x, w: optax.losses.l2_loss(300 * x @ w, -300 * x).mean(),
  "squared norm": lambda x, w: 1e-4 * jnp.vdot(100 * (x @ w), 100 * (x @ w)),
  "global norm": lambda x, w: optax.tree.norm({"a": 300 * (x @ w), "b": [300 * (x @ w)]}),
  "exp of 12": lambda x, w: jnp.log1p(jnp.exp(6 * (x @ w) ** 2)) * 1e-3,
  "cosh": lambda x, w: jnp.log(jnp.cosh(4 * (x @ w))),
  "gelu by hand": lambda x, w: jax.nn.gelu(50 * (x @ w)) @ w,
  "position in a long sequence": lambda x, w: jnp.sin(jnp.arange(70_000, 70_008)[:, None] * 1e-3 + x @ w) @ w,
  "a counter among activations": lambda x, w: x @ w / (jnp.arange(100_000, 100_008) * 1e-5),
}  # fmt: skip


def value_and_gradients(fun):
  """The value, and gradients of its mean, of `fun` on activations that come in half precision."""

  def loss(x, w):
    value = fun(x, w)
    return jnp.mean(value), value

  def both(x, w):
    grads, value = jax.grad(loss, argnums=(0, 1), has_aux=True)(x, w)
    return {"value": value, "gradients": grads}

  return both


# What bfloat16 does not hold, either.
BOTH = ("smallest", "-inf", "1e-8 times", "literal 1e6")


@pytest.mark.parametrize("table", [MASKS, EPSILONS, LARGE], ids=["masks", "epsilons", "large"])
def test_nothing_is_infinite_or_undefined_that_is_finite_in_float32(table):
  functions = {name: value_and_gradients(fun) for name, fun in table.items()}
  for name, fun in table.items():
    for policy in TOLERANCE if any(part in name for part in BOTH) else ("fp16",):
      functions[f"{policy}: {name}"] = value_and_gradients(mpjax.autocast(fun, policy))
  results, lines = run_together(functions, X, W)[0], []
  for name, got in results.items():
    policy, _, plain = name.rpartition(": ")
    assert policy or np.isfinite(np.asarray(got["value"])).any(), name
    if policy:
      # As of a gradient: only what is finite in float32 is compared; that of what is flat is rounding.
      found = leaf_failures("gradient", got, results[plain], TOLERANCE[policy], 1e-3)
      lines += [f"{name}: {line}" for line in found]
  assert not lines, "\n" + "\n".join(lines)


def test_what_float16_has_not_is_met_in_float32():
  n = np.arange(100_000, 100_004)
  integers = lambda x, w: ((x @ w + n) - n) @ w
  literal = lambda x, w: jnp.sign(0 * (x @ w) + 1e-8) @ w
  carry = lambda x, w: jax.lax.scan(lambda c, _: ((c @ w) / 1e-2, None), x, None, length=3)[0]
  x, w = np.full((2, 4), 0.5, np.float32), np.eye(4, dtype=np.float32)
  fun = lambda x, w: {"integers": integers(x, w), "literal": literal(x, w), "divided carry": carry(x, w)}
  ours, wanted = jax.jit(lambda x, w: (mpjax.autocast(fun, "fp16")(x, w), fun(x, w)))(x, w)
  for name, want in wanted.items():
    np.testing.assert_allclose(ours[name], want, rtol=2e-2, err_msg=name)


MESH = jax.make_mesh((2,), ("rows",), axis_types=(jax.sharding.AxisType.Auto,))
# Around `fun(x, w)`: what is beyond float16 where a product reads it.
AROUND = {
  "as it is": lambda fun: fun,
  "scan": lambda fun: lambda x, w: jax.lax.scan(lambda _, x: (None, fun(x, w)), None, x[None])[1][0],
  "vmap": lambda fun: lambda x, w: jax.vmap(fun, (0, None))(x[None], w)[0],
  "jit and shard_map": lambda fun: jax.jit(
    jax.shard_map(fun, mesh=MESH, in_specs=(P("rows"), P()), out_specs=P("rows"))
  ),
}
BEYOND = {
  "an exponential": lambda x, w: jnp.exp(x @ w) @ (w * 1e-3),
  "what a small constant divides": lambda x, w: ((x @ w) / 1e-4) @ (w * 1e-3),
  "what a large constant multiplies": lambda x, w: ((x @ w) * 1e5) @ (w * 1e-3),
}
MASKED = {
  "where": lambda x, w: jnp.where(x > 1e3, x, -1e9) @ (w * 1e-3),
  "integers": lambda x, w: (x @ w + (1 - (x > 1e3).astype(int)) * -1e9) @ (w * 1e-3),
  "added": lambda x, w: (x @ w + jnp.where(x > 1e3, 0.0, -1e9)) @ (w * 1e-3),
}


def test_a_value_beyond_float16_is_infinite_where_a_product_reads_it_and_a_mask_saturates():
  x, w = np.full((4, 4), 3, np.float32), np.ones((4, 4), np.float32)
  run = lambda x, w: {
    place: {key: around(f)(x, w) for key, f in (BEYOND | MASKED).items()} for place, around in AROUND.items()
  }
  for place, found in jax.jit(mpjax.autocast(run, "fp16"))(x, w).items():
    assert {key for key, out in found.items() if np.isposinf(out).all()} == set(BEYOND), place
    for key in MASKED:
      np.testing.assert_allclose(found[key], -4 * 65504e-3, rtol=1e-2, err_msg=f"{place}, {key}")
