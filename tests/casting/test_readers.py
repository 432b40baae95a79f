"""Where a product's operands come from, and who reads its result, decide what it multiplies and what it gives."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import mpjax
from tests.casting._jaxprs import PRODUCTS, dtypes, jit, multiplied, walk

RNG = np.random.default_rng(0)
X = RNG.standard_normal((64, 8), np.float32)
# Arrays of JAX, which may be weights: those of NumPy that a function closes over are constants.
W, HEAD = (jnp.asarray(RNG.standard_normal(shape, np.float32)) for shape in ((8, 8), (8, 2)))
FILTER = np.abs(RNG.standard_normal((8, 8), np.float32))
LABELS = np.arange(64) % 8
BF16 = mpjax.autocast(policy="bf16")


def products(fun, *args):
  """What each product of the program multiplies, and what it gives: `bf16 bf16 > f32`."""
  found = walk(jax.make_jaxpr(fun)(*args).jaxpr)
  return [f"{multiplied(e)} > {dtypes(e.outvars)}" for e in found if e.primitive.name in PRODUCTS]


HALF, WIDE, EXACT = "bf16 bf16 > bf16", "bf16 bf16 > f32", "f32 f32 > f32"
positions = lambda: jnp.arange(64.0)
hot = lambda labels: jax.nn.one_hot(labels, 8)
rotated = lambda x, angle: x * jnp.cos(angle) + jnp.roll(x, 1, -1) * jnp.sin(angle)
PROGRAMS = {
  # From no float input and no parameter.
  "counts": (lambda x, labels: jnp.tril(jnp.ones((64, 64))) @ hot(labels), [EXACT]),
  "a confusion matrix": (lambda x, labels: hot(labels).T @ hot(labels), [EXACT]),
  "counts of what a product chose": (lambda x, _: jnp.ones(64) @ hot(jnp.argmax(x @ W, -1)), [HALF, EXACT]),
  # Nothing contracted.
  "angles by einsum": (lambda x, _: rotated(x @ W, jnp.einsum("i,j->ij", positions(), jnp.arange(8.0))), [HALF, EXACT]),
  "angles by matmul": (lambda x, _: rotated(x @ W, positions()[:, None] @ jnp.arange(8.0)[None]), [HALF, EXACT]),
  "an outer product of activations": (lambda x, _: jnp.einsum("bi,bj->bij", x @ W, x @ W), [HALF, HALF, EXACT]),
  # A filter: a constant before the first layer.
  "a filter": (lambda x, _: jnp.log((x * x) @ FILTER) @ W, [EXACT, HALF]),
  "a filter of a layer's results": (lambda x, _: jax.nn.relu((x @ W) @ FILTER) @ W, [HALF, HALF, HALF]),
  "data that a program closes over": (lambda x, _: jax.nn.relu(FILTER @ W) @ W, [HALF, HALF]),
  "a convolution of one element": (
    lambda x, _: jax.lax.conv(x[:, None, :, None], HEAD[:1, :1, None, None], (1, 1), "SAME"), [EXACT]),
  # Read by float32, integers or linear algebra alone.
  "a selection": (lambda x, labels: jnp.einsum("bi,i->b", jax.nn.log_softmax(x @ W), hot(labels)[0]), [HALF, EXACT]),
  "ids by a one-hot": (lambda x, labels: (hot(labels) @ x[:8, 0]).astype(int), [EXACT]),
  "a selection that layers read": (lambda x, labels: (hot(labels) @ (x[:8] @ W)) @ W, [HALF, HALF, HALF]),
  "a covariance": (
    lambda x, _: jnp.linalg.cholesky((z := x @ W).T @ z + jnp.eye(8)), [WIDE, EXACT]),
  "a right-hand side": (lambda x, _: jnp.linalg.cholesky(x[:8] @ W), [WIDE]),
  "a small head": (lambda x, _: jax.nn.log_softmax(jnp.tanh(x @ W) @ HEAD).sum(), [HALF, WIDE]),
  "a head as large as what it reads": (lambda x, _: jax.nn.log_softmax(jnp.tanh(x @ W) @ W).sum(), [HALF, HALF]),
}  # fmt: skip


def test_an_integer_is_made_of_float32_sums():
  code = lambda x: jnp.floor((x @ W + W[0]) * 16 + 64).astype(int)
  after = {row.primitive: row.after for row in mpjax.explain(code, X, policy="bf16").rows}
  assert (after["add"], after["mul"], after["floor"]) == ("float32", "float32", "float32")


# Boxes that a loss and a layer read, and what else a program does with its arguments, in several orders.
def boxes(params, batch):
  found = batch["boxes"] + jnp.tanh(batch["x"] @ params["w"]) @ params["v"] + params["b"]
  return jnp.mean((found - 1) ** 2) + jnp.mean((found @ params["w"]) ** 2)


MATRIX = RNG.standard_normal((64, 64), np.float32)
BESIDE = {
  "nothing": lambda params, batch: 0.0,
  "data by itself": lambda params, batch: jnp.mean(batch["x"] @ batch["x"].T),
  "data that mixes rows": lambda params, batch: jnp.mean(batch["a"] @ jnp.tanh(batch["x"] @ params["w"])),
  "a constant on the left": lambda params, batch: jnp.mean(MATRIX @ batch["x"]),
}


def test_a_sum_of_data_is_float32_for_its_loss_whatever_else_reads_the_data():
  params = {"w": W, "v": W, "b": W[0]}
  batch = {"x": X, "boxes": 1000 + X, "a": MATRIX}
  for name, beside in BESIDE.items():
    fun = lambda params, batch, beside=beside: boxes(params, batch) + beside(params, batch)
    rows = mpjax.explain(fun, params, batch, policy="bf16").rows
    assert {(row.primitive, row.after) for row in rows if row.code.name == "MEETS_DATA"} == {
      ("add", "float32")
    }, name
  # The argument of parameters has no data beside it: a bias follows the activation.
  assert mpjax.explain(boxes, params, batch, policy="bf16").matrix_flops().keys() == {"bfloat16"}


def test_operands_and_results():
  for name, (fun, want) in PROGRAMS.items():
    assert products(BF16(fun), X, LABELS) == want, name


# Around `fun(x, y)` of two arrays, of which it returns one.
sharded = lambda fun: jax.shard_map(
  fun,
  mesh=jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,)),
  in_specs=(P("data"), P("data")),
  out_specs=P("data"),
)


def with_rule(fun):
  own = jax.custom_jvp(fun)
  own.defjvp(lambda primals, tangents: jax.jvp(fun, primals, tangents))
  return own


AROUND = {
  "jit": jax.jit,
  "checkpoint": jax.checkpoint,
  "scan": lambda fun: lambda x, y: jax.lax.scan(lambda c, _: (c, fun(x, y)), 0, length=2)[1][0],
  "while": lambda fun: (
    lambda x, y: jax.lax.while_loop(
      lambda c: c[0] < 2, lambda c: (c[0] + 1, fun(x, y)), (0, jnp.zeros(jax.eval_shape(fun, x, y).shape))
    )[1]
  ),
  "cond": lambda fun: lambda x, y: jax.lax.cond(x[0, 0] > 9, lambda x, y: 2 * fun(x, y), fun, x, y),
  "custom_jvp": with_rule,
  "vmap": lambda fun: lambda x, y: jax.vmap(fun, (None, None), axis_size=1)(x, y)[0],
  "shard_map": sharded,
}


def in_call(wrap):
  """An island's value for float32 readers; positions and selections; a layer that reads the island."""
  probabilities = wrap(lambda x, y: jax.nn.softmax(x + 0 * y).reshape(-1, 2, 4).reshape(x.shape))
  angles = wrap(lambda x, y: jnp.einsum("i,j->ij", jnp.arange(x.shape[0]) * 1.0, jnp.arange(8.0)) + 0 * x)
  selected = wrap(lambda x, y: jnp.einsum("ij,j->i", jax.nn.log_softmax(x + 0 * y), hot(3))[:, None] + 0 * x)

  def fun(x, w):
    p = probabilities(x, x)
    return p @ w, -jnp.sum(p * jnp.log(p), -1), angles(x, x), selected(x, x)

  return fun


def test_values_stay_exact_through_calls_loops_and_devices():
  run = lambda x, w: {
    place: (BF16(fun)(x, w), jax.jvp(BF16(fun), (x, w), (x, w))[0], fun(x, w))  # by rules, if it has any
    for place, fun in ((place, in_call(wrap)) for place, wrap in AROUND.items())
  }
  for place, (got, derived, want) in jit(run)(X / 2, W).items():
    for a, b, c in zip(got[1:], want[1:], derived[1:], strict=True):
      np.testing.assert_allclose(a, b, rtol=1e-6, err_msg=place)
      np.testing.assert_allclose(c, b, rtol=1e-6, err_msg=place)
    assert 1e-4 < np.abs(got[0] - want[0]).max() < 0.1, place  # the product itself is half precision


def test_gradients_of_what_is_exact():
  def loss(w, x):
    log_p = jax.nn.log_softmax(x @ w)
    chosen = jnp.einsum("bi,bi->b", log_p, hot(LABELS))
    p = jnp.exp(log_p).reshape(8, 8, 8).reshape(64, 8)
    return -chosen.mean() - 0.1 * (p * jnp.log(p)).sum(-1).mean()

  cast = mpjax.autocast(policy="fp16")
  *found, want = jit(
    lambda *args: [f(*args) for f in (jax.grad(cast(loss)), cast(jax.grad(loss)), jax.grad(loss))]
  )(W, X)
  for got in found:
    assert np.linalg.norm(got - want) < 3e-3 * np.linalg.norm(want)


def test_a_value_is_rounded_for_half_precision_readers_alone():
  norm = lambda h: h / jnp.sqrt(jnp.square(h).mean(-1, keepdims=True) + 1e-6)

  def heads(x, w):
    h = norm(x @ w)[:, None].reshape(64, 8)
    return mpjax.full_precision(lambda h: h @ w)(h), h @ w, jnp.sum(h, -1)

  wide, half, total = jit(BF16(heads))(X, W)
  h = norm(np.asarray(jnp.asarray(X, jnp.bfloat16) @ jnp.asarray(W, jnp.bfloat16), np.float32))
  np.testing.assert_allclose(wide, h @ W, atol=2e-5)
  np.testing.assert_allclose(total, h.sum(-1), atol=2e-5)
  assert np.abs(half - h @ W).max() > 1e-3


SMALL = W / 20


def fixed_point(w, x, multiply=jnp.matmul):
  return jax.lax.while_loop(
    lambda c: (c[1] > 1e-6) & (c[2] < 200),
    lambda c: ((new := jnp.tanh(multiply(c[0], w) + x)), jnp.abs(new - c[0]).max(), c[2] + 1),
    (jnp.zeros_like(x), jnp.inf, 0),
  )


def test_a_solver_takes_float32s_steps_and_can_be_told_otherwise():
  steps = lambda fun: int(jit(fun)(SMALL, X)[2])
  explained = mpjax.explain(fixed_point, SMALL, X, policy="bf16")
  assert steps(BF16(fixed_point)) == steps(fixed_point) < 20
  assert [row.why for row in explained.rows if row.flops] == [
    "the loop ends by a float that its products make: a solver"
  ]
  own = {"overrides": {"carry_0": {"loop_carry": "half"}}}
  region = lambda w, x: fixed_point(w, x, mpjax.half_precision(jnp.matmul))
  for cast in (BF16(region), mpjax.autocast(fixed_point, "bf16", **own)):
    assert products(cast, SMALL, X)[0].startswith("bf16 bf16"), cast
  cast = mpjax.autocast(LOOPS["a filter"][0], "bf16", **own)
  assert any(found.startswith("bf16 bf16") for found in products(cast, SMALL, X))


LOOPS = {
  # What ends by the number of steps or by a token is no solver.
  "steps": (lambda w, x: jax.lax.fori_loop(0, x.astype(int)[0, 0] + 3, lambda i, c: jnp.tanh(c @ w), x), "bf16 bf16"),
  "tokens": (
    lambda w, x: jax.lax.while_loop(
      lambda c: (c[0] != 1).any(), lambda c: (jnp.argmax(c[1] @ w, -1), jnp.tanh(c[1] @ w)), (jnp.zeros(64, int), x)
    ),
    "bf16 bf16",
  ),
  "a filter": (
    lambda w, x: jax.lax.scan(lambda p, u: (jnp.linalg.solve(w @ p @ w.T + 9 * jnp.eye(8), p + u),) * 2, jnp.eye(8), x[:4]),
    "f32 f32",
  ),
  "a short linear recurrence": (lambda w, x: jax.lax.scan(lambda c, u: (c @ w + u, c), x[0], x[:8]), "bf16 bf16"),
  "a long linear recurrence": (lambda w, x: jax.lax.scan(lambda c, u: (c @ w + u, c), x[0], x), "f32 f32"),
  "a recurrent network": (lambda w, x: jax.lax.scan(lambda c, u: (jnp.tanh(c @ w + u), c), x[0], x), "bf16 bf16"),
}  # fmt: skip


def test_products_of_loops():
  for name, (fun, want) in LOOPS.items():
    assert {found.split(" >")[0] for found in products(BF16(fun), SMALL, X)} == {want}, name


def attend(cache, token):
  memory, written = cache
  memory = memory + jnp.einsum("i,j->ij", token, token)
  written = jnp.roll(written, 1, 0).at[0].set(token @ W)
  return (memory, written), (token @ memory, written @ token)


def integrated(nested):
  field = nested(lambda t, y, w: jnp.cos(t) * jnp.tanh(y @ w))
  step = lambda c, _: ((c[0] + 1e-3 * field(c[1], c[0], W), c[1] + 1e-3), None)
  return lambda x: jax.lax.scan(step, (x, jnp.zeros(())), None, length=500)[0][0]


CARRIES = {
  "sums and a cache": (
    lambda x: jax.lax.scan(attend, (jnp.zeros((8, 8)), jnp.zeros((16, 8))), x), ["float32", "bfloat16"]),
  "the state of an integration": (integrated(lambda f: f), ["float32"] * 2),
  "by a jitted field": (integrated(jax.jit), ["float32"] * 2),
  "by a checkpointed field": (integrated(jax.checkpoint), ["float32"] * 2),
}  # fmt: skip


def test_carries_of_sums_and_states_are_float32():
  for name, (loop, want) in CARRIES.items():
    assert [one.dtype for one in mpjax.explain(loop, X, policy="bf16").carries] == want, name


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_product_of_the_users_half_precision_is_one_of_the_policys(dtype):
  x = jnp.asarray(X, dtype)
  loss = lambda w, x: jnp.sum(jnp.tanh(x @ w) ** 2)
  assert products(BF16(loss), W, x)[0].startswith("bf16 bf16")
  value, grads = jit(jax.value_and_grad(BF16(loss), (0, 1)))(W, x)
  plain, expected = jax.value_and_grad(loss, (0, 1))(W, x.astype(jnp.float32))
  np.testing.assert_allclose(value, plain, rtol=0.01)
  assert [g.dtype for g in grads] == ["float32", dtype]
  for g, want in zip(grads, expected, strict=True):
    assert np.linalg.norm(g.astype(np.float32) - want) < 0.02 * np.linalg.norm(want)


def network(ws, x):
  for w in ws[:-1]:
    x = x + jax.nn.gelu(x @ w)
  return jnp.mean((x @ ws[-1]) ** 2)


STACK = [W, 2 * W, 3 * W]
stepped = lambda ws, x, loss=network: jax.tree.map(lambda w, g: w - 0.1 * g, ws, jax.grad(loss)(ws, x))
normal = lambda x: x / jnp.sqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-6)


def decoded(ws, x):
  """Accepts a number of drafted rows by comparing products, until there are enough."""

  def step(carry):
    count, x = carry
    accepted = (x @ ws[0])[:, 0] < (x @ ws[1])[:, 0]
    return count + 1 + jnp.argmin(accepted), normal(jnp.tanh(x @ ws[2]))

  return jax.lax.while_loop(lambda c: c[0] < 50, step, (0, x))[1]


def recurrent(ws, x):
  step = lambda h, u: (jax.nn.sigmoid(h @ ws[0] + u) * jnp.tanh(h @ ws[1] + u), None)
  return jnp.mean(jax.lax.scan(step, x[0], x)[0] ** 2)


ORDINARY = {
  "adversarial inputs": lambda ws, x: network(ws, x + 0.1 * jnp.sign(jax.grad(network, 1)(ws, x))),
  "an inner step": lambda ws, x: network(stepped(ws, x), x),
  "training steps": lambda ws, x: jax.lax.scan(lambda ws, _: (stepped(ws, x), None), ws, None, length=2)[0],
  "orthogonal layers": lambda ws, x: jnp.mean(
    normal(jax.nn.gelu(normal(x @ jnp.linalg.qr(ws[0])[0])) @ ws[1]) ** 2
  ),
  "speculative decoding": decoded,
  "a gradient of a recurrent network": jax.grad(recurrent),
  "relative positions by a one-hot": lambda ws, x: jnp.sum(
    jax.nn.softmax(x @ ws[0] + jax.nn.one_hot(LABELS, 8) @ ws[1]) @ ws[2]
  ),
}


def whitened(ws, x):
  z = jnp.tanh(x @ ws[0]) @ ws[1].T
  return -jnp.log(jnp.diag(jnp.linalg.cholesky(z.T @ z + jnp.eye(8)))).sum() + jnp.mean(z**2)


def test_layers_are_half_precision_beside_gradients_algebra_and_loops():
  ws = [w / 20 for w in STACK]
  for name, fun in ORDINARY.items():
    assert {found.split(" >")[0] for found in products(BF16(fun), ws, X)} == {"bf16 bf16"}, name
  steps = lambda ws, x: jax.lax.scan(lambda ws, _: (stepped(ws, x, whitened), None), ws, None, length=2)[0]
  found = products(BF16(steps), ws[:2], X)
  exact = [one for one in found if one.startswith("f32 f32")]
  assert 1 <= len(exact) <= 3 < len(found) - len(exact)  # the Gram matrix and its derivative
