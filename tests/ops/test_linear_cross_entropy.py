"""`linear_cross_entropy` beside the loss of whole logits: values, gradients, dtypes, transformations, errors."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental import checkify

import mpjax
from tests.casting._jaxprs import equations, jit, multiplied, named

D, V = 24, 50
NORMAL = np.random.default_rng(0).normal
KERNEL = NORMAL(size=(D, V)).astype(np.float32) / 3
BIAS = NORMAL(size=V).astype(np.float32)
UP = NORMAL(size=(8, D)).astype(np.float32)
PROGRAMS = {  # both ways of autocast
  "gradient of autocast": lambda f, policy: jax.value_and_grad(mpjax.autocast(f, policy), (0, 1, 2)),
  "autocast of gradient": lambda f, policy: mpjax.autocast(jax.value_and_grad(f, (0, 1, 2)), policy),
}


def rows(*shape, seed=1):
  rng = np.random.default_rng(seed)
  x = rng.normal(size=(*shape, D)).astype(np.float32)
  return x, rng.integers(0, V, shape).astype(np.int32), rng.random(shape) < 0.7


def expected(x, kernel, bias, labels, where, smoothing=0.0, z_loss=0.0):
  """The loss and its gradients by x, kernel and bias, in float64."""
  x, kernel, bias = (np.asarray(a, np.float64) for a in (x, kernel, bias))
  flat, hit = x.reshape(-1, x.shape[-1]), np.eye(kernel.shape[1])[labels.ravel()]
  weight = where.ravel() / where.sum()
  logits = flat @ kernel + bias
  top = logits.max(-1, keepdims=True)
  log_sum = np.log(np.exp(logits - top).sum(-1, keepdims=True)) + top
  target = (1 - smoothing) * hit + smoothing / kernel.shape[1]
  losses = log_sum[:, 0] - (target * logits).sum(-1) + z_loss * log_sum[:, 0] ** 2
  slope = ((1 + 2 * z_loss * log_sum) * np.exp(logits - log_sum) - target) * weight[:, None]
  return losses @ weight, ((slope @ kernel.T).reshape(x.shape), flat.T @ slope, slope.sum(0))


def error(got, want):
  """The largest relative error of some arrays, by norm."""
  pairs = zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
  return max(np.linalg.norm(np.asarray(a, np.float64) - b) / np.linalg.norm(b) for a, b in pairs)


def plain(x, kernel, bias, labels, where):
  losses = optax.softmax_cross_entropy_with_integer_labels((x @ kernel + bias).astype(jnp.float32), labels)
  return jnp.where(where, losses, 0).sum() / where.sum()


def in_chunks(x, kernel, bias, labels, where, **options):
  return mpjax.linear_cross_entropy(x, kernel, labels, bias=bias, where=where, **{"rows": 16, **options})


@pytest.mark.parametrize(("smoothing", "z_loss"), [(0.0, 0.0), (0.1, 0.0), (0.0, 1e-2), (0.2, 1e-3)])
@pytest.mark.parametrize("shape", [(40,), (3, 21), (2, 2, 5)])
def test_value_and_gradients_are_those_of_float64(shape, smoothing, z_loss):
  x, labels, where = rows(*shape)
  options = {"label_smoothing": smoothing, "z_loss": z_loss}
  loss = lambda *args: in_chunks(*args, labels, where, **options)
  args = (x, KERNEL, BIAS)
  want = expected(*args, labels, where, smoothing, z_loss)
  got = jax.jit(jax.value_and_grad(loss, (0, 1, 2)))(*args)
  assert got[0].dtype == np.float32
  assert not got[0].shape
  assert error(got, want) < 1e-6
  assert abs(jax.jit(loss)(*args) - want[0]) < 1e-6 * want[0]


@settings(deadline=None, max_examples=12)
@given(count=st.integers(1, 70), most=st.integers(1, 80))
def test_any_number_of_rows_goes_into_chunks_of_any_size(count, most):
  x, labels, _ = rows(count)
  where = np.ones(count, bool)
  loss = lambda x, kernel: mpjax.linear_cross_entropy(x, kernel, labels, rows=most)
  value, gradients = jit(jax.value_and_grad(loss, (0, 1)))(x, KERNEL)
  want, of_arrays = expected(x, KERNEL, np.zeros(V), labels, where)
  assert error((value, gradients), (want, of_arrays[:2])) < 1e-6
  logits = [e.outvars[0].aval.shape for e in named("exp", loss, x, KERNEL)]
  assert logits
  assert all(shape[0] <= most for shape in logits)


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("policy", ["bf16", "fp16"])
def test_under_autocast_it_is_as_close_as_the_loss_of_whole_logits(policy, program):
  _x, labels, where = rows(64, seed=2)
  inputs = np.random.default_rng(3).normal(size=(64, 8)).astype(np.float32)
  args, scale = (UP, KERNEL, BIAS), 1024.0 if policy == "fp16" else 1.0

  def of(loss):
    return lambda up, kernel, bias: scale * loss(inputs @ up, kernel, bias, labels, where)

  exact = inputs.astype(np.float64) @ UP
  value, (of_x, *others) = expected(exact, KERNEL, BIAS, labels, where)
  want = jax.tree.map(lambda a: a * scale, (value, (inputs.T.astype(np.float64) @ of_x, *others)))
  run = lambda loss: jit(PROGRAMS[program](of(loss), policy))(*args)
  got, usual = run(in_chunks), run(plain)
  assert all(a.dtype == np.float32 for a in jax.tree.leaves(got))
  # The errors of the rows' losses cancel in their mean, by chance.
  assert max(error(got[0], want[0]), error(usual[0], want[0])) < {"bf16": 2**-9, "fp16": 2**-12}[policy]
  for a, b, exact in zip(got[1], usual[1], want[1], strict=True):
    assert error(a, exact) < 1.2 * error(b, exact)


@pytest.mark.parametrize(("policy", "most"), [("fp32", 1e-6), ("bf16", 2e-2), ("fp16", 4e-3)])
def test_an_average_is_the_sum_over_rows_that_count_and_adds_up_over_unequal_parts(policy, most):
  x, labels, _ = rows(60)
  where = np.arange(60) % 20 < np.repeat([2, 20, 0], 20)  # parts of 20 rows: 2, all and none count
  value, of_arrays = expected(x, KERNEL, BIAS, labels, where)

  def whole(x, kernel, bias):
    # As a step does: the gradient of a part's sum, divided by the count of all parts.
    parts = [
      in_chunks(x[at : at + 20], kernel, bias, labels[at : at + 20], where[at : at + 20], as_average=True)
      for at in (0, 20, 40)
    ]
    assert [part.count.dtype for part in parts] == [np.int32] * 3
    total, count = (sum(getattr(part, name) for part in parts) for name in ("total", "count"))
    return total / count, (parts[2].total, parts[2].count, count)

  run = jax.value_and_grad(mpjax.autocast(whole, policy), (0, 1, 2), has_aux=True)
  (got, (nothing, of_nothing, count)), gradients = jit(run)(x, KERNEL, BIAS)
  assert (float(nothing), int(of_nothing), int(count)) == (0.0, 0, 22)
  assert got.dtype == np.float32
  assert error((got, gradients), (value, of_arrays)) < most


def test_an_average_costs_the_mean_no_digits_in_float16():
  x, labels, where = rows(2000)
  run = lambda as_average: jit(
    jax.value_and_grad(
      mpjax.autocast(
        lambda x, k: jnp.asarray(in_chunks(x, k, BIAS, labels, where, as_average=as_average)), "fp16"
      ),
      (0, 1),
    )
  )(x, KERNEL)
  for a, b in zip(*map(jax.tree.leaves, (run(True), run(False))), strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-6 if a.dtype == np.float32 else 2**-10, atol=1e-12)


def test_float16_keeps_gradients_far_below_its_range():
  x, labels, where = rows(64)
  kernel = 4 * KERNEL
  _value, gradients = expected(x, kernel, np.zeros(V), labels, where)
  loss = lambda x, kernel: mpjax.linear_cross_entropy(x, kernel, labels, where=where, rows=16)
  of_kernel = jit(jax.grad(mpjax.autocast(lambda x, kernel: loss(x, kernel) * 1e-7, "fp16"), 1))(x, kernel)
  assert np.abs(gradients[1] * 1e-7).max() < 2**-24  # float16 has none of them
  assert error(of_kernel, gradients[1] * 1e-7) < 2e-3


@pytest.mark.parametrize(
  ("policy", "overrides", "operands"),
  [
    ("fp32", None, "f32 f32"),
    ("bf16", None, "bf16 bf16"),
    ("fp16", None, "f16 f16"),
    ("bf16", {"head": "fp32"}, "f32 f32"),
  ],
)
def test_products_are_in_the_compute_dtype_and_the_kernel_s_gradient_in_float32(policy, overrides, operands):
  x, labels, _where = rows(64)

  def loss(x, kernel):
    with jax.named_scope("other"):
      x = x @ jnp.eye(D)
    with jax.named_scope("head"):
      return mpjax.linear_cross_entropy(x, kernel, labels, rows=16)

  forward = mpjax.autocast(loss, policy, overrides=overrides) if policy != "fp32" else loss
  pairs = lambda fun: [multiplied(e) for e in named("dot_general", fun, x, KERNEL) if V in _sizes(e)]
  assert pairs(forward) == [operands]
  assert pairs(jax.grad(forward, 1)) == [operands] * 3
  of_kernel = [e for e in named("dot_general", jax.grad(forward, 1), x, KERNEL) if _out(e).shape == (D, V)]
  assert [_out(e).dtype for e in of_kernel] == [np.float32]


def test_explain_counts_its_products_and_a_recipe_may_name_its_module():
  x, labels, _ = rows(64)

  def loss(x, kernel):
    x = jnp.tanh(x @ jnp.eye(D))
    with jax.named_scope("head"):
      return mpjax.linear_cross_entropy(x, kernel, labels, rows=16)

  for policy in ("bf16", {"base": "fp8", "fp8": {"emulate": True, "exclude": ["head"]}}):
    explanation = mpjax.explain(loss, policy)(x, KERNEL)
    head = [row for row in explanation.rows if row.path == "head" and row.flops]
    assert [(row.after, row.flops) for row in head] == [("bfloat16", 2 * 64 * D * V)]
    assert "custom_vjp_call" not in str(explanation)


LAST = {"emulate": True, "last_layer": True, "min_dim": 16}


@pytest.mark.parametrize(
  ("fp8", "overrides", "count"),
  [
    ({}, None, 1),
    ({"recipe": "delayed"}, None, 1),
    ({"recipe": "block"}, None, 1),
    ({"last_layer": False}, None, 0),
    ({"exclude": ["head"]}, None, 0),
    ({"min_dim": 64}, None, 0),
    ({}, {"head": "bf16"}, 0),
    ({}, {"other": "bf16"}, 1),
  ],
)
def test_products_are_fp8_as_those_of_any_last_layer(fp8, overrides, count):
  random = np.random.default_rng(5)
  x, kernel = (random.normal(size=shape).astype(np.float32) for shape in ((64, 32), (32, 96)))
  labels, where = random.integers(0, 96, 64), random.random(64) < 0.7

  def loss(whole):
    def run(x, kernel):
      with jax.named_scope("other"):
        x = x @ jnp.eye(32)
      with jax.named_scope("head"):
        if whole:
          return plain(x, kernel, jnp.zeros(96), labels, where)
        return mpjax.linear_cross_entropy(x, kernel, labels, where=where, rows=32)

    return run

  policy = {"base": "fp8", "fp8": {**LAST, **fp8}}
  fun = jax.value_and_grad(mpjax.autocast(loss(False), policy, overrides=overrides), (0, 1))
  products = [e for e in named("fp8_dot_general", fun, x, kernel) if 96 in _sizes(e)]
  assert len(products) == 3 * count
  if fp8.get("recipe") == "delayed":  # whole logits would have a history
    policy = {"base": "fp8", "fp8": LAST}
  by_autocast = mpjax.autocast(loss(True), policy, overrides=overrides)
  want, usual = (jit(jax.value_and_grad(f, (0, 1)))(x, kernel) for f in (loss(True), by_autocast))
  got = jit(fun)(x, kernel)
  assert error(got[0], want[0]) < 2e-2
  for a, b, exact in zip(got[1], usual[1], want[1], strict=True):
    assert error(a, exact) < 1.2 * error(b, exact)


def fp8_head():
  """A function of a kernel whose products are FP8 under a policy, the policy, and the kernel."""
  random = np.random.default_rng(6)
  x, kernel = (random.normal(size=shape).astype(np.float32) for shape in ((64, 32), (32, 48)))
  labels, where = random.integers(0, 48, 64), np.arange(64) != 5

  def loss(kernel, x=x):
    with jax.named_scope("head"):
      return mpjax.linear_cross_entropy(x, kernel, labels, where=where, rows=32)

  return loss, {"base": "fp8", "fp8": LAST}, kernel, x


def test_second_derivatives_of_fp8_products_are_near_those_of_float32():
  loss, policy, kernel, _ = fp8_head()
  direction = NORMAL(size=kernel.shape).astype(np.float32)
  found, expected = (
    jit(jax.grad(lambda k: jnp.vdot(jax.grad(f)(k), direction)))(kernel)
    for f in (mpjax.autocast(loss, policy), loss)
  )
  assert error(found, expected) < 0.15


def test_what_stays_half_before_autocast_obeys_overrides():
  loss, policy, kernel, x = fp8_head()
  narrow = lambda kernel: loss(kernel, jnp.asarray(x, jnp.bfloat16))
  for overrides in ({"head": "bf16"}, {"head": "fp32"}):
    fun = mpjax.autocast(jax.grad(narrow), policy, overrides=overrides)
    assert not list(named("fp8_dot_general", fun, kernel))


def test_explain_says_that_the_products_are_fp8():
  loss, policy, kernel, _ = fp8_head()
  rows = [row for row in mpjax.explain(jax.grad(loss), policy)(kernel).rows if row.flops]
  assert {row.after for row in rows} == {"float8_e4m3fn", "float8_e5m2"}


def test_a_row_that_does_not_count_changes_no_scale():
  loss, policy, kernel, x = fp8_head()
  large = np.where(np.arange(64)[:, None] == 5, 1e20, x).astype(np.float32)
  under = jit(jax.value_and_grad(mpjax.autocast(loss, policy)))
  jax.tree.map(np.testing.assert_array_equal, under(kernel, large), under(kernel, x))


def _sizes(equation):
  return {n for v in (*equation.invars, *equation.outvars) for n in v.aval.shape}


def _out(equation):
  return equation.outvars[0].aval


def test_arrays_in_half_precision_need_no_autocast():
  x, labels, _ = rows(40)
  narrow = [jnp.asarray(a, jnp.bfloat16) for a in (x, KERNEL)]
  loss = lambda x, kernel: mpjax.linear_cross_entropy(x, kernel, labels, rows=16)
  value, gradients = jit(jax.value_and_grad(loss, (0, 1)))(*narrow)
  want, of_arrays = expected(*narrow, np.zeros(V), labels, np.ones(40, bool))
  assert value.dtype == np.float32
  assert [g.dtype for g in gradients] == [jnp.bfloat16] * 2
  assert error((value, gradients), (want, of_arrays[:2])) < 6e-3
  pairs = {multiplied(e) for e in named("dot_general", jax.grad(loss), *narrow)}
  assert pairs == {"bf16 bf16"}


def test_no_array_has_the_size_of_whole_logits():
  x, labels, _ = rows(256)
  kernel = np.ones((D, 400), np.float32)
  loss = mpjax.autocast(lambda x, kernel: mpjax.linear_cross_entropy(x, kernel, labels, rows=32), "bf16")
  made = equations(jax.value_and_grad(loss, (0, 1)), x, kernel)
  largest = max(math.prod(v.aval.shape) for e in made for v in e.outvars)
  assert largest == 32 * 400


TRANSFORMED = {
  "checkpoint": jax.checkpoint,
  "scan over batches": lambda f: functools.partial(_by_scan, f),
  "vmap over batches": lambda f: (
    lambda x, *rest: jax.vmap(f, (0, None, None, 0, 0))(*_halves(x, *rest)).mean()
  ),
  "a jit of its own": jax.jit,
}


def _halves(x, kernel, bias, labels, where):
  divided = lambda a: jnp.reshape(a, (2, -1, *a.shape[1:]))
  return divided(x), kernel, bias, divided(labels), divided(where)


def _by_scan(f, *args):
  x, kernel, bias, labels, where = _halves(*args)
  step = lambda total, part: (total + f(part[0], kernel, bias, *part[1:]), None)
  return jax.lax.scan(step, 0.0, (x, labels, where))[0] / 2


@pytest.mark.parametrize("name", TRANSFORMED)
def test_it_is_the_same_under_transformations(name):
  x, labels, _ = rows(64)
  labels, where = jnp.asarray(labels), jnp.ones(64, bool)
  want = expected(x, KERNEL, BIAS, np.asarray(labels), np.ones(64, bool))
  for policy, most in (("fp32", 1e-6), ("bf16", 1e-2), ("fp16", 2e-3)):
    loss = lambda *args: TRANSFORMED[name](in_chunks)(*args, labels, where)
    got = jit(jax.value_and_grad(mpjax.autocast(loss, policy), (0, 1, 2)))(x, KERNEL, BIAS)
    assert error(got, want) < most


def test_it_may_be_mapped_over_each_argument():
  x, labels, _ = rows(2, 24)
  kernels = np.stack([KERNEL, 2 * KERNEL])
  for axes in ((0, None), (None, 0), (0, 0)):
    loss = lambda x, kernel: mpjax.linear_cross_entropy(x, kernel, labels[0], rows=16)
    one = jax.grad(loss, (0, 1))
    args = (x if axes[0] == 0 else x[0], kernels if axes[1] == 0 else KERNEL)
    got = jit(jax.vmap(one, axes))(*args)
    for i in range(2):
      want = one(*(a[i] if axis == 0 else a for a, axis in zip(args, axes, strict=True)))
      assert error([g[i] for g in got], want) < 1e-6


def test_strict_promotion_and_checkify_find_nothing():
  x, labels, where = rows(40)
  loss = lambda x, kernel: in_chunks(x, kernel, BIAS, labels, where, label_smoothing=0.1, z_loss=1e-3)
  with jax.numpy_dtype_promotion("strict"):
    jax.make_jaxpr(jax.grad(mpjax.autocast(loss, "fp16"), (0, 1)))(x, KERNEL)
    checked = jit(checkify.checkify(jax.grad(loss, (0, 1)), errors=checkify.all_checks))
    assert checked(x, KERNEL)[0].get() is None


@pytest.mark.parametrize("label", [-1, V, V + 7])
def test_a_label_out_of_range_is_never_silent(label):
  x, labels, _ = rows(40)
  wrong = labels.copy()
  wrong[17] = label
  grad = jax.value_and_grad(lambda labels, where, kernel: in_chunks(x, kernel, None, labels, where), 2)
  for value in grad(jnp.asarray(labels), None, KERNEL)[0], jit(grad)(labels, np.ones(40, bool), KERNEL)[0]:
    assert np.isfinite(value)
  value, gradient = jit(grad)(wrong, np.ones(40, bool), KERNEL)
  assert np.isnan(value)
  assert np.isnan(gradient).any()
  with pytest.raises(ValueError, match=rf"^labels\[17\]={label}: expected 0 to {V - 1}, .*where=(\n|$)"):
    grad(wrong, None, KERNEL)


def test_a_row_that_does_not_count_may_have_any_label():
  x, labels, where = rows(40)
  marked = np.where(where, labels, -100)
  loss = lambda kernel, labels: in_chunks(x, kernel, BIAS, labels, where)
  for run in (jit, lambda f: f):
    got = run(jax.value_and_grad(loss))(KERNEL, marked)
    want = expected(x, KERNEL, BIAS, labels, where)
    assert error(got, (want[0], want[1][1])) < 1e-6


def test_the_loss_of_no_rows_is_zero():
  x, labels, where = rows(40)
  value, gradient = jit(jax.value_and_grad(lambda k: in_chunks(x, k, BIAS, labels, where & False)))(KERNEL)
  assert value == 0
  assert not gradient.any()


X, LABELS, WHERE = rows(6)
WRONG = {
  "x is integer": ({"x": LABELS}, TypeError, r"x=int32\[6\]: expected an array of floating numbers"),
  "x is a list": ({"x": [1.0]}, TypeError, r"x=\[1.0\] \(list\): expected an array of floating numbers"),
  "no rows": ({"x": X[:0]}, ValueError, r"x=float32\[0, 24\]: expected rows of \[..., D\], at least one"),
  "kernel turned": (
    {"kernel": KERNEL.T},
    ValueError,
    r"kernel=float32\[50, 24\]: expected \[24, V\], as x=.*",
  ),
  "kernel of one": ({"kernel": BIAS}, ValueError, r"kernel=float32\[50\]: expected \[24, V\], as x=.*"),
  "labels float": ({"labels": X[:, 0]}, TypeError, r"labels=float32\[6\]: expected an array of integers"),
  "labels too few": ({"labels": LABELS[:5]}, ValueError, r"labels=int32\[5\]: expected \[6\], as x=.*"),
  "bias of D": ({"bias": X[0]}, ValueError, r"bias=float32\[24\]: expected \[50\], as kernel=.*"),
  "where of weights": ({"where": X[:, 0]}, TypeError, r"where=float32\[6\]: expected an array of booleans"),
  "where too few": ({"where": WHERE[:5]}, ValueError, r"where=bool\[5\]: expected \[6\], as x=.*"),
  "rows 0": ({"rows": 0}, ValueError, "rows=0: expected a positive integer"),
  "rows half": ({"rows": 1.5}, TypeError, "rows=1.5: expected an integer"),
  "smoothing 1": ({"label_smoothing": 1.0}, ValueError, "label_smoothing=1.0: expected a number from 0 .*"),
  "smoothing below": ({"label_smoothing": -0.1}, ValueError, "label_smoothing=-0.1: expected a number .*"),
  "as_average 1": ({"as_average": 1}, TypeError, "as_average=1: expected True or False"),
  "z_loss below": ({"z_loss": -1e-4}, ValueError, "z_loss=-0.0001: expected a finite number .*"),
  "z_loss array": ({"z_loss": X}, TypeError, r"z_loss=(.|\n)*: expected a number"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_argument_is_an_error_that_names_it(name):
  changes, kind, message = WRONG[name]
  arguments = {"x": X, "kernel": KERNEL, "labels": LABELS, **changes}
  with pytest.raises(kind, match=rf"^{message}$"):
    mpjax.linear_cross_entropy(**arguments)
