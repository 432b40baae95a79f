"""`linear_cross_entropy` beside the loss of whole logits: values, gradients, dtypes, transformations, errors."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

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


@pytest.mark.parametrize(
  ("shape", "count", "most", "smoothing", "z_loss"),
  [((3,), 21, 16, 0.2, 1e-3), ((), 70, 1, 0.0, 1e-2), ((2, 2), 5, 80, 0.2, 0.0)],
)
def test_value_and_gradients_are_those_of_float64_of_any_rows_in_chunks_of_any_size(
  shape, count, most, smoothing, z_loss
):
  x, labels, where = rows(*shape, count)
  where.flat[0] = True
  options = {"label_smoothing": smoothing, "z_loss": z_loss, "rows": most}
  loss = lambda *args: in_chunks(*args, labels, where, **options)
  args = (x, KERNEL, BIAS)
  want = expected(*args, labels, where, smoothing, z_loss)
  got, alone = jit(lambda *args: (jax.value_and_grad(loss, (0, 1, 2))(*args), loss(*args)))(*args)
  assert (got[0].dtype, got[0].shape) == (np.float32, ())
  assert error(got, want) < 1e-6
  assert error(alone, want[0]) < 1e-6
  logits = [e.outvars[0].aval.shape for e in named("exp", loss, *args)]
  assert logits
  assert all(shape[0] <= most for shape in logits)


@pytest.mark.parametrize(("policy", "program"), [*(("fp16", p) for p in PROGRAMS), ("bf16", [*PROGRAMS][1])])
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


@pytest.mark.parametrize(("policy", "most"), [("fp32", 1e-6), ("fp16", 4e-3)])
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


def test_float16_keeps_gradients_far_below_its_range():
  x, labels, where = rows(64)
  kernel = 4 * KERNEL
  _value, gradients = expected(x, kernel, np.zeros(V), labels, where)
  loss = lambda x, kernel: mpjax.linear_cross_entropy(x, kernel, labels, where=where, rows=16)
  of_kernel = jit(jax.grad(mpjax.autocast(lambda x, kernel: loss(x, kernel) * 1e-7, "fp16"), 1))(x, kernel)
  assert np.abs(gradients[1] * 1e-7).max() < 2**-24  # float16 has none of them
  assert error(of_kernel, gradients[1] * 1e-7) < 2e-3


def test_products_are_in_the_compute_dtype_and_the_kernel_s_gradient_in_float32_and_explain_counts_them():
  x, labels, _ = rows(64)

  def loss(x, kernel):
    with jax.named_scope("other"):
      x = x @ jnp.eye(D)
    with jax.named_scope("head"):
      return mpjax.linear_cross_entropy(x, kernel, labels, rows=16)

  pairs = lambda fun: [multiplied(e) for e in named("dot_general", fun, x, KERNEL) if V in _sizes(e)]
  for forward, operands in (
    (loss, "f32 f32"),
    (mpjax.autocast(loss, "bf16"), "bf16 bf16"),
    (mpjax.autocast(loss, "fp16"), "f16 f16"),
    (mpjax.autocast(loss, "bf16", overrides={"head": "fp32"}), "f32 f32"),
  ):
    assert pairs(forward) == [operands]
    assert pairs(jax.grad(forward, 1)) == [operands] * 3
    made = [e.outvars[0].aval for e in named("dot_general", jax.grad(forward, 1), x, KERNEL)]
    assert [out.dtype for out in made if out.shape == (D, V)] == [np.float32]
  explanation = mpjax.explain(loss, x, KERNEL, policy="bf16")
  head = [row for row in explanation.rows if row.path == "head" and row.flops]
  assert [(row.after, row.flops) for row in head] == [("bfloat16", 2 * 64 * D * V)]


def test_an_fp8_policy_leaves_its_products_in_the_compute_dtype():
  x, kernel, labels = np.ones((64, 32), np.float32), np.ones((32, 96), np.float32), rows(64)[1]
  fp8 = {"recipe": "current", "emulate": True, "last_layer": True, "first_layer": True, "min_dim": 16}
  loss = lambda x, kernel: mpjax.linear_cross_entropy(x, kernel, labels, rows=16)
  made = jax.value_and_grad(mpjax.autocast(loss, {"base": "fp8", "fp8": fp8}), (0, 1))
  assert named("fp8_dot_general", made, x, kernel) == []
  assert [multiplied(e) for e in named("dot_general", made, x, kernel)] == ["bf16 bf16"] * 3


def test_a_row_that_does_not_count_may_be_nan():
  x, labels, where = rows(40)
  wild = np.where(where[:, None], x, np.nan).astype(np.float32)
  loss = lambda x, kernel: in_chunks(x, kernel, BIAS, labels, where)
  under = jit(jax.value_and_grad(mpjax.autocast(loss, "bf16"), 1))
  jax.tree.map(np.testing.assert_array_equal, under(wild, KERNEL), under(x, KERNEL))


def _sizes(equation):
  return {n for v in (*equation.invars, *equation.outvars) for n in v.aval.shape}


def test_no_array_has_the_size_of_whole_logits():
  x, labels, _ = rows(256)
  loss = mpjax.autocast(lambda x, kernel: mpjax.linear_cross_entropy(x, kernel, labels, rows=32), "bf16")
  made = equations(jax.value_and_grad(loss, (0, 1)), x, np.ones((D, 400), np.float32))
  assert max(math.prod(v.aval.shape) for e in made for v in e.outvars) == 32 * 400


def test_a_label_out_of_range_is_never_silent_but_where_its_row_does_not_count():
  x, labels, where = rows(40)
  loss = lambda labels, where, kernel: in_chunks(x, kernel, BIAS, labels, where)
  run = jit(jax.value_and_grad(loss, 2))
  marked = np.where(where, labels, -100)
  want = expected(x, KERNEL, BIAS, labels, where)
  assert error(run(marked, where, KERNEL), (want[0], want[1][1])) < 1e-6
  for label in (-1, V, V + 7):
    wrong = labels.copy()
    wrong[17] = label
    value, gradient = run(wrong, np.ones(40, bool), KERNEL)
    assert np.isnan(value), label
    assert np.isnan(gradient).any(), label


X, LABELS, WHERE = rows(6)
WRONG = [
  ({"x": LABELS}, TypeError, r"x=int32\[6\]: expected an array of floating numbers"),
  ({"x": X[:0]}, ValueError, r"x=float32\[0, 24\]: expected rows of \[..., D\], at least one"),
  ({"kernel": KERNEL.T}, ValueError, r"kernel=float32\[50, 24\]: expected \[24, V\], as x=.*"),
  ({"labels": LABELS[:5]}, ValueError, r"labels=int32\[5\]: expected \[6\], as x=.*"),
  ({"bias": X[0]}, ValueError, r"bias=float32\[24\]: expected \[50\], as kernel=.*"),
  ({"where": X[:, 0]}, TypeError, r"where=float32\[6\]: expected an array of booleans"),
  ({"rows": 0}, ValueError, "rows=0, .*: expected at least 1 row, .*"),
  ({"label_smoothing": 1.0}, ValueError, ".*label_smoothing=1.0, .*"),
  ({"z_loss": -1e-4}, ValueError, ".*z_loss=-0.0001: .*"),
  ({"z_loss": math.nan}, ValueError, ".*z_loss=nan: .*"),
]


@pytest.mark.parametrize(("changes", "kind", "message"), WRONG)
def test_a_wrong_argument_is_an_error_that_names_it(changes, kind, message):
  with pytest.raises(kind, match=rf"^{message}$"):
    mpjax.linear_cross_entropy(**{"x": X, "kernel": KERNEL, "labels": LABELS, **changes})
