"""Layer-wise adaptive loss scaling, in a chain of tanh layers whose gradient falls by 2^-6 in each."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from scipy import special

import mpjax
from tests.step._problems import mesh

HALF = jnp.float16
DEPTH, WIDTH, ROWS = 8, 16, 32
RNG = np.random.default_rng(0)
LAYERS = {
  "w": np.float32(RNG.normal(size=(DEPTH, WIDTH, WIDTH)) * 1.4 / math.sqrt(WIDTH)),
  "b": np.zeros((DEPTH, WIDTH), np.float32),
}
FIRST = {name: leaf[0] for name, leaf in LAYERS.items()}
X, Y = (np.float32(RNG.normal(size=(ROWS, WIDTH))) for _ in range(2))
made = mpjax.loss_scale.layerwise_loss_scale
SCALING = made()
BY = np.float32(2.0**-6)
start = functools.partial(SCALING.start, X)
# As accelerators round: XLA for CPU would keep float32 between two half-precision operations.
jit = functools.partial(jax.jit, compiler_options={"xla_allow_excess_precision": False})


def dense(p, x):
  return x @ p["w"] + p["b"]


def attenuate(h, by=BY):
  """The identity, whose gradient is `by` times what comes in."""
  by = jnp.asarray(by, h.dtype)
  return jax.lax.stop_gradient(h - h * by) + h * by


def plain_loss(layers, x, dtype, by=BY):
  def body(h, p):
    return attenuate(jnp.tanh(dense(jax.tree.map(lambda a: a.astype(dtype), p), h)), by), None

  h, _ = jax.lax.scan(body, x.astype(dtype), layers)
  return jnp.mean((h.astype(jnp.promote_types(dtype, np.float32)) - Y) ** 2)


def scaled_loss(layers, x, dtype, by=BY, target=Y):
  def body(h, p):
    return SCALING.apply(lambda v: attenuate(jnp.tanh(v), by), SCALING.layer(dense, p, h)), None

  h, _ = jax.lax.scan(body, SCALING.start(x, dtype), layers)
  return jnp.mean((SCALING.finish(h) - target) ** 2)


@functools.cache
def exact_gradients():
  """Gradients of the layers and of the input, in float64."""
  with jax.enable_x64(True):
    layers, x = jax.tree.map(np.float64, (LAYERS, X))
    return jax.tree.map(np.asarray, jax.grad(plain_loss, argnums=(0, 1))(layers, x, np.float64))


def error(grads, expected):
  """The norm of the difference from what is expected, as a part of the norm of that."""
  grads, expected = (
    np.concatenate([np.float64(leaf).ravel() for leaf in jax.tree.leaves(tree)]) for tree in (grads, expected)
  )
  return np.linalg.norm(grads - expected) / np.linalg.norm(expected)


def layer_of(layers, i):
  return jax.tree.map(lambda leaf: leaf[i], layers)


def worst(grads, expected):
  """The largest `error` of a layer."""
  return max(error(layer_of(grads, i), layer_of(expected, i)) for i in range(len(expected["w"])))


@functools.cache
def compiled(loss, dtype):
  """(attenuation, factor) -> the loss times the factor, and its gradients of the layers and of the input."""
  of = lambda layers, x, by, factor: loss(layers, x, dtype, by) * factor
  run = jit(jax.value_and_grad(of, argnums=(0, 1)))
  return lambda by=BY, factor=1.0: run(LAYERS, X, by, np.float32(factor))


def test_every_layer_of_a_chain_that_no_single_scale_can_train_gets_its_gradient():
  expected, of_input = exact_gradients()
  loss, (grads, of_x) = compiled(scaled_loss, HALF)()
  assert worst(grads, expected) < 0.05
  assert error(of_x, of_input) < 0.05  # unscaled, too
  assert {g.dtype for g in jax.tree.leaves((grads, of_x))} == {np.dtype("float32")}
  assert loss == compiled(plain_loss, HALF)()[0]
  for exponent in range(0, 40, 4):
    single = compiled(plain_loss, HALF)(factor=2.0**exponent)[1][0]
    assert not single["w"][0].any() or not np.isfinite(single["w"]).all(), exponent


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_where_nothing_underflows_it_changes_no_bit(dtype):
  ours, theirs = (compiled(loss, dtype)(by=np.float32(1)) for loss in (scaled_loss, plain_loss))
  jax.tree.map(np.testing.assert_array_equal, ours, theirs)


def test_a_factor_of_the_loss_is_one_of_the_gradients():
  grads = lambda factor: compiled(scaled_loss, HALF)(factor=factor)[1][0]
  assert not any(g.any() for g in jax.tree.leaves(grads(0.0)))
  assert not any(mpjax.all_finite(grads(value)) for value in (np.inf, np.nan))
  # With a dynamic loss scale round it the layers adapt.
  assert worst(jax.tree.map(lambda g: g / 2.0**10, grads(2.0**10)), exact_gradients()[0]) < 0.05


def papers_scale(g, w, passed, underflow):
  """The formula of the paper, in float64, with the bounds beyond it; 1 for no gradient."""
  g, w = np.float64(g), np.float64(w)
  sigma = math.sqrt((g.var() + g.mean() ** 2) * (w.var() + w.mean() ** 2))
  if sigma == 0:
    return 1
  wanted = max(2.0**-24 / (math.sqrt(2) * special.erfinv(underflow) * sigma), 1)
  top, terms = abs(g).max(), w.size // w.shape[-2]
  return min(wanted, 65504 / terms / (top * abs(w).max()), 65504 / top, 2.0**64 / passed, 2.0**9)


def test_a_scale_is_the_papers_formula():
  rng = np.random.default_rng(1)
  seen = set()
  for underflow, shape in ((1e-4, (7, 3)), (1e-3, (1, 9)), (1e-2, (3, 4, 1))):
    measure = jit(made(underflow=underflow, max_scale=2.0**64, max_layer_scale=2.0**9).measure)
    for _ in range(100):
      size, width, passed = rng.integers([-26, -36, -10], [13, 9, 61])
      g = np.float16(rng.normal(size=(5, shape[-1])) * 2.0**size)
      w = np.float32(rng.normal(size=shape) * 2.0**width)
      scale = float(measure(g, w, np.float32(2.0**passed)))
      expected = papers_scale(g, w, 2.0**passed, underflow)
      seen.add(math.floor(math.log2(expected)))
      assert math.frexp(scale)[0] == 0.5
      # Between powers of two the rounding of float32 may decide.
      assert expected / 2 * (1 - 1e-5) <= scale <= expected * (1 + 1e-5), (size, width, passed)
  assert seen >= {0, 3, 9}
  for g in (np.full([5, 3], np.inf, HALF), np.zeros([5, 3], HALF), np.ones([0, 3], HALF), np.ones([5, 3])):
    assert measure(g, np.float32(rng.normal(size=(7, 3))), np.float32(1)) == 1


def test_sums_neither_overflow_nor_vanish():
  product = lambda w, rows: SCALING.layer(lambda w, v: v @ w, w, SCALING.start(rows, HALF))
  times = lambda factor, rows: SCALING.apply(lambda v: v * factor.astype(HALF), SCALING.start(rows, HALF))
  full = lambda value, *shape: np.full(shape, value, np.float32)
  # The gradient of the weighted sum of what a function of learnt values and rows returns, and its error.
  for fun, learnt, rows, weight, expected, rtol in (
    (product, full(0.01, 8, 4), full(50, 4096, 8), 1 / 4096, 50, 0.01),
    # Float16 sums of a CPU round more than those of an accelerator.
    (times, full(1), full(1, 512, 512), 1, 512 * 512, 0.05),
    # In half precision, the gradient of what a function closes over would be 0.
    (times, full(1, WIDTH).astype(HALF), full(1, ROWS, WIDTH), 1e-9, np.nan, 0),
  ):
    loss = lambda learnt, rows, weight, fun=fun: jnp.sum(SCALING.finish(fun(learnt, rows)) * weight)
    found = jit(jax.grad(loss))(learnt, rows, full(weight, len(rows), 1))
    np.testing.assert_allclose(found, np.full(learnt.shape, expected), rtol=rtol)


wide = functools.partial(jnp.dot, preferred_element_type=jnp.float32)
MASK = np.ones((WIDTH, WIDTH), np.int32)  # an integer array is no kernel
ENDS = {
  "float16": lambda p, h: SCALING.layer(lambda p, v: v @ (p["w"] * p["m"]) + p["b"], {**p, "m": MASK}, h),
  "product": lambda p, h: SCALING.layer(lambda p, v: wide(v, p["w"]) + p["b"], p, h),
  "apply": lambda p, h: SCALING.apply(lambda v: v.astype(jnp.float32), SCALING.layer(dense, p, h)),
  "bfloat16": lambda p, h: SCALING.layer(lambda p, v: dense(p, v).astype(jnp.bfloat16), p, h),
}


def test_a_gradient_is_scaled_where_it_enters_half_precision():
  loss = lambda p, end, x: jnp.mean(SCALING.finish(end(p, SCALING.start(x, HALF))) ** 2) * 1e-7
  found = jit(lambda p: {name: jax.grad(loss)(p, end, X) for name, end in ENDS.items()})(FIRST)
  g = 2e-7 * np.float64(X @ FIRST["w"]) / X.size
  for name, grads in found.items():
    assert error(grads, {"w": X.T @ g, "b": g.sum(0)}) < 0.01, name


ROW, COLUMN, WHOLE = PartitionSpec("d"), PartitionSpec(None, "d"), PartitionSpec()


def mapped(fun, in_specs, out_specs, check_vma=True):
  return jax.shard_map(fun, mesh=mesh(d=8), in_specs=in_specs, out_specs=out_specs, check_vma=check_vma)


@pytest.mark.parametrize("check_vma", [False, True])
def test_every_shard_has_its_own_scales_and_their_gradients_add_up(check_vma):
  def gradients(layers, x, y):
    grads = jax.grad(scaled_loss)(layers, x, HALF, target=y)
    # With varying axes tracked, JAX itself sums the gradient of what all shards share.
    return grads if check_vma else jax.lax.psum(grads, "d")

  found = jit(mapped(gradients, (WHOLE, ROW, ROW), WHOLE, check_vma))(LAYERS, X, Y)
  # A shard has four rows, so each of its sums rounds more than the whole one.
  assert worst(jax.tree.map(lambda g: g / 8, found), exact_gradients()[0]) < 0.08


@pytest.mark.parametrize("wrap", [jax.jit, jax.checkpoint, lambda f: lambda h: f(jax.tree.map(jnp.copy, h))])
def test_an_activation_that_is_used_twice_where_nobody_can_see_it_makes_nan(wrap):
  """Through a transform of JAX it looks like another one: the gradient is NaN, not wrong."""

  def loss(p):
    h = SCALING.layer(dense, p, start(HALF))
    block = wrap(lambda h: SCALING.layer(dense, layer_of(LAYERS, 1), h))
    return jnp.mean(SCALING.finish(SCALING.apply(jnp.add, h, block(h))))

  assert np.isnan(jit(jax.grad(loss))(FIRST)["w"]).all()


TWO = {"up": LAYERS["w"][0], "down": LAYERS["w"][1]}
both = lambda p, x: x @ p["up"] @ p["down"]
mean = lambda x: SCALING.finish(SCALING.apply(lambda v: jax.lax.pmean(v, "d"), SCALING.start(x)))
product = lambda w, x: SCALING.finish(SCALING.layer(lambda w, v: v @ w, w, SCALING.start(x)))
# What is done, and the error's text.
MISUSES = [
  (lambda: [SCALING.apply(jnp.tanh, h) for h in [start()] * 2], r"used before.*fork"),
  (lambda: mapped(mean, ROW, WHOLE, False)(X), r"communicates along \['d'\]"),
  (lambda: mapped(product, (COLUMN, WHOLE), COLUMN)(FIRST["w"], X), r"differ along the mesh axes \['d'\]"),
  (lambda: SCALING.apply(lambda v: v.argmax(), start()), "one floating array"),
  (lambda: SCALING.finish(jax.vmap(SCALING.start)(jnp.ones((32, 4)))), r"stack of \(32,\) activations.*vmap"),
  (lambda: start("int8"), "floating dtype, not int8"),
  (lambda: SCALING.layer(dense, FIRST, start(), kernel=lambda p: p["b"]), "fan_in"),
  (lambda: SCALING.layer(dense, FIRST, X), r"scaling\.start"),
  (lambda: SCALING.layer(dense, mpjax.cast_floating(FIRST, HALF), start()), r"\['b'\] is float16.*master"),
  (lambda: SCALING.layer(both, TWO, start()), r"several.*'down'.*'up'.*kernel="),
  *((functools.partial(made, underflow=value), "underflow") for value in (0.0, 1.0, -1.0, math.nan)),
  *((functools.partial(made, init_scale=value), "init_scale") for value in (0.0, -1.0, math.inf, 2.0**101)),
  *((functools.partial(made, max_layer_scale=value), "max_layer_scale") for value in (0.5, math.inf, "x")),
  *((functools.partial(made, max_scale=value), "max_scale") for value in (0.5, 2.0**127)),
]


@pytest.mark.parametrize(("act", "message"), MISUSES)
def test_each_way_to_get_wrong_numbers_is_an_error_with_the_way_out(act, message):
  with pytest.raises((TypeError, ValueError), match=message):
    jax.eval_shape(lambda: (act(), ())[1])
