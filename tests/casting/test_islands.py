"""What the backward pass keeps of float32 islands, makes again, and reads through an optimisation barrier."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax

import mpjax
from tests.casting._jaxprs import jit

D, V = 32, 1031  # no other dimension is as large as the vocabulary's
ROWS, TOKENS = 4, 8
X = np.cos(np.arange(ROWS * TOKENS * D, dtype=np.float32)).reshape(ROWS, TOKENS, D)
PARAMS = {
  "up": np.full((D, D), 0.1, np.float32),
  "head": np.sin(np.arange(D * V, dtype=np.float32)).reshape(D, V),
}
LABELS = np.arange(ROWS * TOKENS).reshape(ROWS, TOKENS) * 31 % V
BF16 = mpjax.autocast(policy="bf16")


def z_loss(logits, labels):
  total = jax.nn.logsumexp(logits, axis=-1)
  return (total - jnp.take_along_axis(logits, labels[..., None], -1)[..., 0] + 1e-4 * total**2).mean()


def chosen_by_iota(logits, labels):
  hit = jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1) == labels[..., None]
  return -jnp.where(hit, jax.nn.log_softmax(logits), 0).sum(-1).mean()


integer_labels = lambda y, labels: optax.softmax_cross_entropy_with_integer_labels(y, labels).mean()
one_hot = lambda y, labels: optax.softmax_cross_entropy(y, jax.nn.one_hot(labels, V)).mean()
LOSSES = {
  "integer labels": integer_labels,
  "z loss": z_loss,
  "soft capped": lambda y, labels: integer_labels(30 * jnp.tanh(y / 30), labels),
  "one hot": one_hot,
  "chosen by iota": chosen_by_iota,
}


def norm(x):
  return x * jax.lax.rsqrt((x**2).mean(-1, keepdims=True) + 1e-6)


def model(loss):
  return lambda p, x, labels: loss(norm(jax.nn.gelu(x @ p["up"])) @ p["head"], labels)


def over_rows(f):
  step = lambda p: lambda total, row: (total + f(p, row[0][None], row[1][None]), None)
  return lambda p, x, y: jax.lax.scan(step(p), jnp.float32(0), (x, y))[0] / len(x)


PLACES = {
  "jit": jax.jit,
  "checkpoint": jax.checkpoint,
  "cond": lambda f: lambda *xs: jax.lax.cond(xs[1][0, 0, 0] > 0, f, lambda *xs: 2 * f(*xs), *xs),
  "scan over rows": over_rows,
  "vmap": lambda f: lambda p, x, y: jax.vmap(f, (None, 0, 0))(p, x[:, None], y[:, None]).mean(),
  "two heads": lambda f: lambda p, x, y: f(p, x, y) + 0.5 * f(p | {"head": p["head"] * 2}, x, (y + 1) % V),
}


def barriers(f, *args):
  """The types of what goes through an optimisation barrier, each once, in the lowered program."""
  text = jax.jit(f).lower(*args).as_text()
  lines = re.findall(r"stablehlo\.optimization_barrier .* : (.*)", text)
  return sorted({kind for line in lines for kind in re.findall(r"tensor<([^>]*)>", line)})


def of_head(f, policy="bf16", **options):
  """The types of a vocabulary's size behind a barrier in the gradients of `f`, other than a parameter's."""
  kinds = barriers(jax.value_and_grad(mpjax.autocast(f, policy), **options), PARAMS, X, LABELS)
  return [kind for kind in kinds if f"x{V}x" in f"x{kind}" and not kind.startswith(f"{D}x{V}x")]


def test_nothing_of_a_loss_is_behind_a_barrier_and_its_logits_and_statistics_are_kept():
  for name, loss in LOSSES.items():
    assert not of_head(model(loss)), name
    last = mpjax.explain(model(loss), PARAMS, X, LABELS, policy="bf16").islands[-1]
    logits = ROWS * TOKENS * V * 2
    assert last.fenced_bytes == 0, name
    assert logits <= last.kept_bytes <= 1.05 * logits, name


def test_so_it_is_in_float16_and_fp8_and_wherever_the_loss_stands():
  assert not of_head(model(integer_labels), "fp16")
  for name, place in PLACES.items():
    assert not of_head(place(model(one_hot))), name
  beside = lambda p, x, y: (model(one_hot)(p, x, y), {"norm": norm(x @ p["up"])})
  assert not of_head(beside, {"base": "fp8", "fp8": {"emulate": True}}, has_aux=True)


def test_a_one_hot_and_a_mask_are_made_where_they_are_read():
  def masked(x):
    scores = jnp.einsum("btd,bsd->bts", x, x)
    weights = jax.nn.softmax(jnp.where(jnp.tri(TOKENS, dtype=bool), scores, -jnp.inf))
    return jnp.einsum("bts,bsd->btd", weights, x).sum()

  (island,) = mpjax.explain(masked, X, policy="bf16").islands
  assert {"iota", "ge"} <= set(island.operations)
  assert not [kind for kind in barriers(jax.grad(BF16(masked)), X) if kind.endswith("i1")]
  last = mpjax.explain(model(one_hot), PARAMS, X, LABELS, policy="bf16").islands[-1]
  assert any("one_hot" in name for name in last.operations)


def test_an_island_between_products_is_fenced():
  island, loss = mpjax.explain(model(integer_labels), PARAMS, X, LABELS, policy="bf16").islands[-2:]
  assert island.fenced_bytes == ROWS * TOKENS * D * 2
  assert loss.fenced_bytes == 0
  kinds = barriers(jax.grad(BF16(model(integer_labels))), PARAMS, X, LABELS)
  assert f"{ROWS}x{TOKENS}x{D}xbf16" in kinds


def test_on_a_gpu_a_derivative_is_computed_apart_from_what_a_product_reads():
  times = lambda f, platform: (
    jax.jit(jax.grad(BF16(f)))
    .trace(PARAMS["up"], X)
    .lower(lowering_platforms=(platform,))
    .as_text()
    .count("_barrier")
  )
  between = lambda w, x: jnp.sum(jnp.tanh(x @ w) @ w @ w)
  assert times(between, "cuda") == times(between, "tpu") + 1
  alone = lambda w, x: jnp.sum(jnp.tanh(x @ w))
  assert times(alone, "cuda") == times(alone, "tpu")


def test_a_norm_before_the_first_product_is_an_island_however_wide_the_product():
  def f(table, w, tokens):
    x = table[tokens]
    return ((x + jax.nn.gelu(norm(x) @ w) @ w.T) ** 2).sum()

  args = (PARAMS["head"].T[:8], np.full((D, 4 * D), 0.1, np.float32), LABELS % 8)
  first = mpjax.explain(f, *args, policy="bf16").islands[0]
  assert "rsqrt" in first.operations
  same_with_islands(f, *args)


def test_in_a_loop_nothing_is_fenced_unless_it_is_unrolled():
  """Its backward pass is a loop of its own: nothing in it can be found equal to the forward pass's."""
  params = np.stack([PARAMS["up"]] * 4)
  for unroll, barrier in ((1, False), (2, False), (True, True)):

    def f(params, x, unroll=unroll):
      layer = lambda x, w: (jax.nn.gelu(x @ w) @ w, None)
      return (jax.lax.scan(layer, x, params, unroll=unroll)[0] ** 2).sum()

    (island,) = (i for i in mpjax.explain(f, params, X, policy="bf16").islands if "tanh" in i.operations)
    assert (island.fenced_bytes > 0) == barrier, unroll
    assert bool(barriers(jax.grad(BF16(f)), params, X)) == barrier, unroll


def test_all_are_fenced_in_a_function_that_returns_no_loss():
  """What comes after it, and after its array beside an auxiliary result, is not known: it may be the next layer."""
  (island,) = mpjax.explain(lambda w, x: jax.nn.softmax(x @ w), PARAMS["up"], X, policy="bf16").islands
  assert island.fenced_bytes > 0
  for aux in (lambda h: (h**2).sum(), lambda h: h):
    block = lambda w, x: jax.nn.gelu(jax.nn.gelu(x @ w) @ w)
    both = lambda w, x, aux=aux: (lambda h: (h, aux(h)))(block(w, x))
    islands = [
      i for i in mpjax.explain(both, PARAMS["up"], X, policy="bf16").islands if "tanh" in i.operations
    ]
    assert islands
    assert all(island.fenced_bytes for island in islands)


def same_with_islands(f, *args, name=""):
  """Compares `f` with itself without islands: `recompute="nothing"` keeps everything."""
  both = [jax.value_and_grad(mpjax.autocast(f, "bf16", recompute=how)) for how in ("islands", "nothing")]
  (value, grads), (value_too, grads_too) = jit(lambda *args: [run(*args) for run in both])(*args)
  assert value == value_too, name
  for got, want in zip(jax.tree.leaves(grads), jax.tree.leaves(grads_too), strict=True):
    np.testing.assert_allclose(got, want, rtol=0, atol=2**-8 * np.abs(want).max(), err_msg=name)


def test_a_long_chain_of_sums_takes_no_longer_than_its_length():
  chain = lambda x: functools.reduce(lambda y, _: y + y * y, range(60), x @ PARAMS["up"])
  assert mpjax.explain(lambda x: jax.nn.softmax(chain(x)), X, policy="bf16").islands


def test_values_are_those_without_islands():
  for name, loss in LOSSES.items():
    same_with_islands(model(loss), PARAMS, X, LABELS, name=name)


clip_gradient = jax.custom_vjp(lambda x: x * 1.0)
clip_gradient.defvjp(lambda x: (x * 1.0, None), lambda _, g: (jnp.clip(g, -1e-3, 1e-3),))


def test_an_activation_behind_an_exponential_is_no_statistic():
  run = BF16(lambda p, x: (jnp.exp(x @ p["up"]) + x @ p["up"]) @ p["up"])
  assert re.search(r"bf16\[\S+\] = add", str(jax.make_jaxpr(run)(PARAMS, X)))
