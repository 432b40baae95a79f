"""What the backward pass keeps of float32 islands, makes again, and reads through an optimisation barrier."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import mpjax

D, V = 32, 1031  # no other dimension is as large as the vocabulary's
ROWS, TOKENS = 4, 8
PARAMS = {"up": jnp.full((D, D), 0.1), "head": jnp.sin(jnp.arange(D * V, dtype=jnp.float32)).reshape(D, V)}
X = jnp.cos(jnp.arange(ROWS * TOKENS * D, dtype=jnp.float32)).reshape(ROWS, TOKENS, D)
LABELS = jnp.arange(ROWS * TOKENS).reshape(ROWS, TOKENS) * 31 % V


def integer_labels(logits, labels):
  return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def gathered(logits, labels):
  return -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], -1).mean()


def z_loss(logits, labels):
  total = jax.nn.logsumexp(logits, axis=-1)
  right = jnp.take_along_axis(logits, labels[..., None], -1)[..., 0]
  return (total - right + 1e-4 * total**2).mean()


def soft_capped(logits, labels):
  return integer_labels(30 * jnp.tanh(logits / 30), labels)


def one_hot(logits, labels):
  return optax.softmax_cross_entropy(logits, jax.nn.one_hot(labels, V)).mean()


def smoothed(logits, labels):
  return optax.softmax_cross_entropy(logits, optax.smooth_labels(jax.nn.one_hot(labels, V), 0.1)).mean()


def chosen_by_iota(logits, labels):
  hit = jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1) == labels[..., None]
  return -jnp.where(hit, jax.nn.log_softmax(logits), 0).sum(-1).mean()


LOSSES = [integer_labels, gathered, z_loss, soft_capped, one_hot, smoothed, chosen_by_iota]


def norm(x):
  return x * jax.lax.rsqrt((x**2).mean(-1, keepdims=True) + 1e-6)


def model(loss):
  def f(params, x, labels):
    return loss(norm(jax.nn.gelu(x @ params["up"])) @ params["head"], labels)

  return f


def in_cond(f):
  return lambda p, x, y: jax.lax.cond(x[0, 0, 0] > 0, f, lambda *args: 2 * f(*args), p, x, y)


def over_rows(f):
  def body(p, x, y):
    step = lambda total, row: (total + f(p, row[0][None], row[1][None]), None)
    return jax.lax.scan(step, jnp.float32(0), (x, y))[0] / len(x)

  return body


def two_heads(f):
  return lambda p, x, y: f(p, x, y) + 0.5 * f(p | {"head": p["head"] * 2}, x, (y + 1) % V)


PLACES = {
  "top": lambda f: f,
  "jit": jax.jit,
  "checkpoint": jax.checkpoint,
  "cond": in_cond,
  "scan over rows": over_rows,
  "vmap": lambda f: lambda p, x, y: jax.vmap(f, (None, 0, 0))(p, x[:, None], y[:, None]).mean(),
  "two heads": two_heads,
}


def barriers(f, *args):
  """The types of what goes through an optimisation barrier, each once, in the lowered program."""
  text = jax.jit(f).lower(*args).as_text()
  lines = re.findall(r"stablehlo\.optimization_barrier .* : (.*)", text)
  return sorted({kind for line in lines for kind in re.findall(r"tensor<([^>]*)>", line)})


def of_vocabulary(kinds):
  """Those that have the vocabulary's size, other than a parameter."""
  return [kind for kind in kinds if f"x{V}x" in f"x{kind}" and not kind.startswith(f"{D}x{V}x")]


@pytest.mark.parametrize("loss", LOSSES, ids=lambda f: f.__name__)
@pytest.mark.parametrize("policy", ["bf16", "fp16"])
def test_nothing_of_a_loss_is_behind_a_barrier(loss, policy):
  found = barriers(jax.grad(mpjax.autocast(model(loss), policy)), PARAMS, X, LABELS)
  assert found, "the norm before the head is an island of its own"
  assert not of_vocabulary(found)


@pytest.mark.parametrize("place", PLACES)
def test_so_it_is_wherever_the_loss_stands(place):
  f = mpjax.autocast(PLACES[place](model(one_hot)), "bf16")
  assert not of_vocabulary(barriers(jax.grad(f), PARAMS, X, LABELS))


def test_so_it_is_beside_an_auxiliary_result_and_in_fp8():
  f = lambda p, x, y: (model(one_hot)(p, x, y), {"norm": norm(x @ p["up"])})
  grads = jax.value_and_grad(mpjax.autocast(f, {"base": "fp8", "fp8": {"emulate": True}}), has_aux=True)
  assert not of_vocabulary(barriers(grads, PARAMS, X, LABELS))


@pytest.mark.parametrize("around", [lambda f: f, jax.jit, jax.checkpoint], ids=["top", "jit", "checkpoint"])
def test_so_it_is_beside_the_logits(around):
  """No product follows the head's, though what returns its result does not know what comes after."""

  @around
  def f(p, x, y):
    logits = norm(jax.nn.gelu(x @ p["up"])) @ p["head"]
    return one_hot(logits, y), logits

  grads = jax.value_and_grad(mpjax.autocast(f, "bf16"), has_aux=True)
  assert not of_vocabulary(barriers(grads, PARAMS, X, LABELS))


@pytest.mark.parametrize("loss", LOSSES, ids=lambda f: f.__name__)
def test_a_loss_keeps_its_logits_and_its_statistics(loss):
  last = mpjax.explain(model(loss), "bf16")(PARAMS, X, LABELS).islands[-1]
  logits = ROWS * TOKENS * V * 2
  assert last.fenced_bytes == 0
  assert logits <= last.kept_bytes <= 1.05 * logits


def test_a_one_hot_and_a_mask_are_made_where_they_are_read():
  def masked(x):
    scores = jnp.einsum("btd,bsd->bts", x, x)
    weights = jax.nn.softmax(jnp.where(jnp.tri(TOKENS, dtype=bool), scores, -jnp.inf))
    return jnp.einsum("bts,bsd->btd", weights, x).sum()

  (island,) = mpjax.explain(masked, "bf16")(X).islands
  assert {"iota", "ge"} <= set(island.copied)
  assert not [kind for kind in barriers(jax.grad(mpjax.autocast(masked, "bf16")), X) if kind.endswith("i1")]
  last = mpjax.explain(model(one_hot), "bf16")(PARAMS, X, LABELS).islands[-1]
  assert any("one_hot" in name for name in (*last.copied, *last.operations))


def test_an_island_between_products_is_fenced():
  island, loss = mpjax.explain(model(integer_labels), "bf16")(PARAMS, X, LABELS).islands[-2:]
  assert island.fenced_bytes == ROWS * TOKENS * D * 2
  assert loss.fenced_bytes == 0
  kinds = barriers(jax.grad(mpjax.autocast(model(integer_labels), "bf16")), PARAMS, X, LABELS)
  assert f"{ROWS}x{TOKENS}x{D}xbf16" in kinds


@pytest.mark.parametrize(("unroll", "barrier"), [(1, False), (2, False), (True, True)])
def test_in_a_loop_nothing_is_fenced_unless_it_is_unrolled(unroll, barrier):
  """Its backward pass is a loop of its own: nothing in it can be found equal to the forward pass's."""

  def f(params, x):
    layer = lambda x, w: (jax.nn.gelu(x @ w) @ w, None)
    return (jax.lax.scan(layer, x, params, unroll=unroll)[0] ** 2).sum()

  params = jnp.stack([PARAMS["up"]] * 4)
  (island,) = (i for i in mpjax.explain(f, "bf16")(params, X).islands if "tanh" in i.operations)
  assert (island.fenced_bytes > 0) == barrier
  assert bool(barriers(jax.grad(mpjax.autocast(f, "bf16")), params, X)) == barrier


def test_all_are_fenced_in_a_function_that_returns_no_loss():
  """What comes after it is not known: it may be the next layer."""
  layer = lambda p, x: jax.nn.softmax(x @ p["up"])
  (island,) = mpjax.explain(layer, "bf16")(PARAMS, X).islands
  assert island.fenced_bytes > 0


def test_statistics_of_rows_are_computed_once():
  """The backward pass of a softmax or a norm reads its rows, and neither their maximum nor their sums again."""

  def f(w, x):
    return (jax.nn.softmax(norm(x @ w) @ w) @ w).sum()

  def reductions(policy):
    text = jax.jit(jax.grad(mpjax.autocast(f, policy))).lower(PARAMS["up"], X).as_text()
    return len(re.findall(r"applies stablehlo\.maximum", text))

  assert reductions("bf16") == reductions("fp32") == 1


@pytest.mark.parametrize("loss", LOSSES, ids=lambda f: f.__name__)
def test_values_are_those_without_islands(loss):
  """Whatever the backward pass keeps or makes again: `recompute="nothing"` keeps everything."""
  with_islands, without = (
    jax.value_and_grad(mpjax.autocast(model(loss), "bf16", recompute=how)) for how in ("islands", "nothing")
  )
  both = jax.jit(lambda *args: (with_islands(*args), without(*args)))
  (value, grads), (value_too, grads_too) = both(PARAMS, X, LABELS)
  assert value == value_too
  for name, got in grads.items():
    scale = np.abs(np.asarray(grads_too[name])).max()
    np.testing.assert_allclose(got, grads_too[name], rtol=0, atol=2**-8 * scale, err_msg=name)


B, T = 4, 8
WEIGHTS = [jnp.sin(jnp.arange(D * D, dtype=jnp.float32) * (i + 2)).reshape(D, D) * 0.2 for i in range(3)]


def readers(make, value, x):
  """Three islands that read what is cheaply made of a smaller value."""
  with jax.named_scope("maker"):
    e = make(jnp.broadcast_to(value, (B, T, D)))
  h = jax.nn.softmax(x @ WEIGHTS[0] + e) @ WEIGHTS[1]
  h = jax.nn.softmax(h + e) @ WEIGHTS[2]
  return (jnp.tanh(h + e) ** 2).sum()


@jax.custom_vjp
def clip_gradient(x):
  return x * 1.0


clip_gradient.defvjp(lambda x: (x * 1.0, None), lambda _, g: (jnp.clip(g, -1e-3, 1e-3),))


def test_a_custom_derivative_rule_runs_once_for_all_readers():
  """It need not be linear: of its share each, copies would make another gradient."""
  value, x = (
    jnp.cos(jnp.arange(D, dtype=jnp.float32)),
    jnp.cos(jnp.arange(B * T * D, dtype=jnp.float32)).reshape(B, T, D),
  )
  f = lambda value, x: readers(clip_gradient, value, x)
  found, expected = (
    jax.grad(mpjax.autocast(f, "bf16", recompute=how))(value, x) for how in ("islands", "nothing")
  )
  np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4)


@pytest.mark.slow
def test_what_is_looked_at_is_looked_at_where_it_is_made():
  value, x = jnp.cos(jnp.arange(T * D, dtype=jnp.float32)).reshape(T, D), jnp.ones((B, T, D))
  f = lambda value, x: readers(lambda e: e + 1.5, value, x)
  report = mpjax.inspect_numerics(f, value, x, "bf16", advise=False)
  made = [row for row in report.tensors if row.module == "maker"]
  assert made
  assert all(row.error is not None for row in made)


@pytest.mark.parametrize("aux", [lambda h: (h**2).sum(), lambda h: h], ids=["scalar", "array"])
def test_a_block_with_an_auxiliary_result_is_fenced(aux):
  """What its array is made of goes on into the next block, whatever else it returns."""

  def block(w, x):
    h = jax.nn.gelu(jax.nn.gelu(x @ w) @ w)
    return h, aux(h)

  islands = [i for i in mpjax.explain(block, "bf16")(PARAMS["up"], X).islands if "tanh" in i.operations]
  assert islands
  assert all(island.fenced_bytes for island in islands)
