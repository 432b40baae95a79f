"""Delayed scaling: the "gradient" with respect to the state is the next state, whatever the program is wrapped in.

Weights are permutations times powers of two and inputs small integers, so that FP8 with scales that are powers of
two is exact, and amaxes can be computed by hand.
"""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from casting.jaxprs import jit, named
from flax import nnx

import mpjax

P = jax.sharding.PartitionSpec
AUTO = jax.sharding.AxisType.Auto
D, ROWS, LENGTH = 32, 64, 4
NAMES = ("lhs", "rhs", "gradient")


def delayed(base="fp8", **options):
  recipe = {
    "recipe": "delayed",
    "emulate": True,
    "min_dim": 16,
    "amax_history_len": LENGTH,
    "pow2_scales": True,
  }
  return {"base": base, "fp8": {**recipe, **options}, "autocast": True}


def exact_weight(seed, factor=1.0):
  rng = np.random.default_rng(seed)
  return (np.eye(D)[rng.permutation(D)] * rng.choice([-1, 1], D) * factor).astype(np.float32)


def exact_batch(seed, largest=3, rows=ROWS):
  """Inputs and cotangents; the largest of each is in one row only."""
  rng = np.random.default_rng(seed)
  x, c = (rng.integers(-1, 2, (rows, D)).astype(np.float32) for _ in range(2))
  x[rng.integers(rows), rng.integers(D)] = largest
  c[rng.integers(rows), rng.integers(D)] = -largest
  return x, c


W = [exact_weight(i, factor) for i, factor in enumerate([1, 2, 0.5, 4, 1])]
X, C = exact_batch(0)


def act(x):
  return jnp.where(x > 0, x, 0.5 * x)


def net(w, x):
  for layer in w[:-1]:
    x = act(x @ layer)
  return x @ w[-1]


def loss(w, x, c):
  """Its gradient with respect to the network's outputs is c."""
  return jnp.sum(net(w, x) * c)


def amaxes(w, x, c):
  """By hand: of each layer's input, weight and the gradient of its output, [layers, 3]."""
  inputs, slopes = [np.asarray(x, np.float64)], []
  for layer in w[:-1]:
    out = inputs[-1] @ layer
    slopes.append(np.where(out > 0, 1, 0.5))
    inputs.append(out * slopes[-1])
  gradients = [np.asarray(c, np.float64)]
  for layer, slope in zip(w[:0:-1], slopes[::-1], strict=True):
    gradients.append((gradients[-1] @ layer.T) * slope)
  rows = zip(inputs, w, gradients[::-1], strict=True)
  return np.array([[np.abs(a).max() for a in row] for row in rows])


def next_state(fun, state, *args, policy=None, **options):
  """The state after this one."""
  of = lambda state: mpjax.autocast(fun, policy or delayed(), fp8_state=state, **options)(*args)
  return jax.grad(of)(state)


def following(fun, state, *args, **options):
  """The same, compiled."""
  return jit(lambda state, args: next_state(fun, state, *args, **options))(state, args)


def first_state(fun, *args, policy=None):
  return mpjax.init_fp8_state(fun, policy or delayed())(*args)


def newest(state):
  """The amaxes of the last step, by site: lhs, rhs, gradient."""
  return {site: [float(of[name][0]) for name in NAMES] for site, of in state["amax"].items()}


def same(a, b):
  jax.tree.map(np.testing.assert_array_equal, a, b)


INNER = {f":{i}": list(row) for i, row in enumerate(amaxes(W, X, C)) if 0 < i < 4}


# The state


def test_the_first_state():
  state = first_state(loss, W, X, C)
  assert set(state) == {"amax", "uses"}
  assert set(state["amax"]) == {":1", ":2", ":3"}
  assert {a.shape for a in jax.tree.leaves(state["amax"])} == {(LENGTH,)}
  assert not any(np.asarray(a).any() for a in jax.tree.leaves(state["amax"]))
  shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (W, X, C))
  same(state, first_state(loss, *shapes))
  same(first_state(loss, W, X, C, policy="bf16")["amax"], {})
  assert set(first_state(loss, W, X, C, policy=delayed(first_layer=True, last_layer=True))["amax"]) == {
    ":0",
    ":1",
    ":2",
    ":3",
    ":4",
  }


def test_amaxes_by_hand():
  state = following(loss, first_state(loss, W, X, C), W, X, C)
  assert newest(state) == INNER
  assert float(state["uses"]) == 1


@pytest.mark.parametrize("compute", ["max", "most_recent"])
def test_histories_roll(compute):
  policy = delayed(amax_compute=compute, margin=3)  # so that amaxes may grow without saturation
  state = first_state(loss, W, X, C, policy=policy)
  step = jit(lambda state, x, c: next_state(loss, state, W, x, c, policy=policy))
  expected = np.zeros((LENGTH, 5, 3))
  for i in range(LENGTH + 2):
    batch = exact_batch(i, largest=2 ** (i % 3))
    state = step(state, *batch)
    expected = np.concatenate([amaxes(W, *batch)[None], expected[:-1]])
    for site in range(1, 4):
      for j, name in enumerate(NAMES):
        np.testing.assert_array_equal(state["amax"][f":{site}"][name], expected[:, site, j])


@pytest.mark.parametrize(
  ("compute", "history", "largest"),
  [("max", [1, 4, 2, 0], 4), ("most_recent", [1, 4, 2, 0], 1), ("max", [0, 0, 0, 0.5], 0.5)],
)
@pytest.mark.parametrize("operand", ["lhs", "rhs", "gradient"])
def test_scales_come_from_the_history_and_saturate(compute, history, largest, operand):
  fun = lambda w, x: x @ w[0] @ w[1] @ w[2]
  policy = delayed(amax_compute=compute, pow2_scales=False)
  w = [np.eye(D, dtype=np.float32) * np.float32(16 if i == 1 and operand == "rhs" else 1) for i in range(3)]
  x = np.full((ROWS, D), 16 if operand == "lhs" else 1, np.float32)
  state = first_state(fun, w, x, policy=policy)
  state["amax"][":1"][operand] = jnp.array(history, jnp.float32)
  out, back = jax.vjp(lambda w, x: mpjax.autocast(fun, policy, fp8_state=state)(w, x), w, x)
  if operand == "gradient":
    np.testing.assert_allclose(back(np.full_like(out, 16))[1], largest, rtol=1e-2)
  else:
    np.testing.assert_allclose(out, largest, rtol=1e-2)


def test_without_a_history_the_scale_is_1():
  fun = lambda w, x: x @ w[0] @ w[1] @ w[2]
  w, x = [np.eye(D, dtype=np.float32)] * 3, np.full((ROWS, D), 1000, np.float32)
  out = mpjax.autocast(fun, delayed(), fp8_state=first_state(fun, w, x))(w, x)
  np.testing.assert_array_equal(out, 448)


# Where products are


def parts(batch, n):
  return batch.reshape(n, -1, D)


def per_layer(wrap):
  def fun(w, x, c):
    layer = wrap(lambda x, w: act(x @ w))
    for own in w[:-1]:
      x = layer(x, own)
    return jnp.sum(x @ w[-1] * c)

  return fun


def over_devices(check_vma):
  def fun(w, x, c):
    mesh = jax.make_mesh((4,), ("d",), axis_types=(AUTO,))
    local = lambda w, x, c: jax.lax.psum(loss(w, x, c), "d")
    specs = (P(), P("d"), P("d"))
    return jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=check_vma)(w, x, c)

  return fun


def in_scan(step):
  def fun(w, x, c):
    x, _ = jax.lax.scan(step, act(x @ w[0]), jnp.stack(w[1:-1]))
    return jnp.sum(x @ w[-1] * c)

  return fun


def layer_step(x, w):
  return act(x @ w), None


def in_cond(w, x, c):
  x = act(x @ w[0])
  good, bad = (lambda x: act(act(act(x @ w[1]) @ w[2]) @ w[3])), (lambda x: x @ (64 * w[1]))
  return jnp.sum(jax.lax.cond(x[0, 0] > -1e9, good, bad, x) @ w[-1] * c)


def micro_batches(w, x, c):
  step = lambda total, xc: (total + loss(w, *xc), None)
  return jax.lax.scan(step, 0.0, (parts(x, 4), parts(c, 4)))[0]


def unrolled_twice(w, x, c):
  """Each half of the batch through the same weights."""
  return loss(w, x[: ROWS // 2], c[: ROWS // 2]) + loss(w, x[ROWS // 2 :], c[ROWS // 2 :])


ONE_SITE = [[max(column) for column in zip(*INNER.values(), strict=True)]]
EACH_SITE = sorted(INNER.values())
PROGRAMS = {
  "plain": (loss, EACH_SITE),
  "jit": (jax.jit(loss), EACH_SITE),
  "jit of layers": (per_layer(jax.jit), EACH_SITE),
  "remat": (jax.checkpoint(loss), EACH_SITE),
  "remat of layers": (per_layer(jax.checkpoint), EACH_SITE),
  "remat that keeps products": (
    jax.checkpoint(loss, policy=jax.checkpoint_policies.dots_saveable),
    EACH_SITE,
  ),
  "jit of remat of jit": (jax.jit(jax.checkpoint(jax.jit(loss))), EACH_SITE),
  "scan": (in_scan(layer_step), ONE_SITE),
  "scan of remat": (in_scan(jax.checkpoint(layer_step)), ONE_SITE),
  "scan of jit": (in_scan(jax.jit(layer_step)), ONE_SITE),
  "micro-batches in a scan": (micro_batches, EACH_SITE),
  "map": (lambda w, x, c: jax.lax.map(lambda xc: loss(w, *xc), (parts(x, 2), parts(c, 2))).sum(), EACH_SITE),
  "vmap": (lambda w, x, c: jax.vmap(loss, (None, 0, 0))(w, parts(x, 2), parts(c, 2)).sum(), EACH_SITE),
  "vmap in scan": (
    lambda w, x, c: jax.lax.map(
      lambda xc: jax.vmap(loss, (None, 0, 0))(w, parts(xc[0], 2), parts(xc[1], 2)).sum(),
      (parts(x, 2), parts(c, 2)),
    ).sum(),
    EACH_SITE,
  ),
  "twice": (unrolled_twice, EACH_SITE),
  "shard_map": (over_devices(True), EACH_SITE),
  "shard_map unchecked": (over_devices(False), EACH_SITE),
  "jit of shard_map": (jax.jit(over_devices(True)), EACH_SITE),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_amaxes_are_the_largest_of_all_uses(name):
  fun, expected = PROGRAMS[name]
  state = first_state(fun, W, X, C)
  new = jit(lambda state: next_state(fun, state, W, X, C))(state)
  assert sorted(newest(new).values()) == expected
  again = jit(lambda state: next_state(fun, state, W, X, C))(new)
  assert sorted(newest(again).values()) == expected
  assert {tuple(np.asarray(h)[2:]) for h in jax.tree.leaves(again["amax"])} == {(0.0, 0.0)}


def test_cond_counts_the_branch_that_is_taken():
  new = following(in_cond, first_state(in_cond, W, X, C), W, X, C)
  assert sorted(row for row in newest(new).values() if any(row)) == EACH_SITE


@pytest.mark.parametrize("recompute", ["islands", "dots", "nothing"])
@pytest.mark.parametrize("saved", ["compute", "fp8"])
def test_whatever_is_kept_for_the_backward_pass(recompute, saved):
  policy = delayed(saved_activations=saved)
  state = first_state(loss, W, X, C, policy=policy)
  assert newest(following(loss, state, W, X, C, policy=policy, recompute=recompute)) == INNER


def test_autocast_in_other_transforms():
  state = first_state(loss, W, parts(X, 2)[0], parts(C, 2)[0])
  one = lambda state, x, c: mpjax.autocast(loss, delayed(), fp8_state=state)(W, x, c)
  wrapped = {
    "vmap": lambda s: jax.vmap(one, (None, 0, 0))(s, parts(X, 2), parts(C, 2)).sum(),
    "scan": lambda s: jax.lax.map(lambda xc: one(s, *xc), (parts(X, 2), parts(C, 2))).sum() / 1,
    "remat": lambda s: jax.checkpoint(one)(s, X, C),
    "cond": lambda s: jax.lax.cond(True, one, lambda s, x, c: 0.0, s, X, C),
  }
  for name, fun in wrapped.items():
    new = jit(jax.grad(fun))(state)
    n = float(new["uses"])
    if name == "scan":  # two calls, whose gradients are added
      assert n == 2
      assert all(a <= 2 * b for site in INNER for a, b in zip(newest(new)[site], INNER[site], strict=True))
    else:
      assert n == 1
      assert newest(new) == INNER


@pytest.mark.slow
def test_vmap_over_states():
  batches = [exact_batch(i, largest=2**i) for i in range(2)]
  x, c = (np.stack(arrays) for arrays in zip(*batches, strict=True))
  w = [[layer * 2.0**i for layer in W] for i in range(2)]
  stacked = jax.tree.map(lambda *layers: np.stack(layers), *w)
  state = following(loss, first_state(loss, W, X, C), W, X, C)
  states = jax.tree.map(lambda a: np.stack([a, 2 * a]), state)
  states["uses"] = np.ones(2, np.float32)
  step = lambda state, w, x, c: next_state(loss, state, w, x, c)
  alone = jit(step)
  of_each = jit(jax.vmap(step))(states, stacked, x, c)
  shared = jit(jax.vmap(step, (None, 0, 0, 0)))(state, stacked, x, c)
  for i in range(2):
    member = lambda tree, i=i: jax.tree.map(lambda a: a[i], tree)
    same(member(of_each), alone(member(states), w[i], x[i], c[i]))
    same(member(shared), alone(state, w[i], x[i], c[i]))


def mesh_of(*shape):
  return jax.make_mesh(shape, ("d", "m")[: len(shape)], axis_types=(AUTO,) * len(shape))


@pytest.mark.parametrize(
  ("shape", "of_w", "of_x"),
  [((4,), P(), P("d")), ((8,), P("d"), P()), ((2, 2), P(None, "m"), P("d")), ((2, 2), P("m"), P("d", "m"))],
  ids=["data", "weights", "both", "contracted"],
)
def test_sharded_data_give_the_state_of_one_device(shape, of_w, of_x):
  mesh = mesh_of(*shape)
  put = lambda x, spec: jax.device_put(x, jax.NamedSharding(mesh, spec))
  state = put(first_state(loss, W, X, C), P())
  step = jit(lambda state, w, x, c: next_state(loss, state, w, x, c))
  new = step(state, [put(w, of_w) for w in W], put(X, of_x), put(C, of_x))
  assert newest(new) == INNER


@pytest.mark.parametrize("check_vma", [True, False])
def test_gradients_within_shard_map(check_vma):
  mesh = mesh_of(4)
  state = first_state(loss, W, X[: ROWS // 4], C[: ROWS // 4])

  def local(state, x, c):
    new = next_state(loss, state, W, x, c)
    return new if check_vma else jax.tree.map(lambda a: jax.lax.pmax(a, "d"), new)

  run = jax.shard_map(local, mesh=mesh, in_specs=(P(), P("d"), P("d")), out_specs=P(), check_vma=check_vma)
  assert newest(jax.jit(run)(state, X, C)) == INNER


# What is shared, what is not used, what is wrong


def test_batches_of_other_sizes_share_a_state():
  state = first_state(loss, W, X, C)
  for rows in (ROWS, 32):
    x, c = exact_batch(1, rows=rows)
    state = following(loss, state, W, x, c)
    assert newest(state) == {f":{i}": list(amaxes(W, x, c)[i]) for i in range(1, 4)}


def test_a_batch_without_fp8_products_leaves_the_state_alone():
  state = following(loss, first_state(loss, W, X, C), W, X, C)
  same(following(loss, state, W, X[:17], C[:17]), state)
  same(next_state(loss, state, W, X[:17], C[:17]), state)


def test_a_state_is_not_lost_where_its_products_do_not_reach_the_loss():
  state = following(loss, first_state(loss, W, X, C), W, X, C)
  frozen = lambda w, x, c: jax.lax.stop_gradient(loss(w, x, c)) + w[0].sum()
  new = following(frozen, state, W, X, C)
  assert float(new["uses"]) == 1
  for site, of in new["amax"].items():
    for name, history in of.items():
      assert max(history) == max(state["amax"][site][name])


def test_a_state_of_a_smaller_batch_has_no_histories_for_a_larger_one():
  state = first_state(loss, W, X[:17], C[:17])
  assert state["amax"] == {}
  out = jit(mpjax.autocast(loss, delayed(), fp8_state=state))(W, X, C)
  np.testing.assert_allclose(out, loss(W, X, C), rtol=0.1)


def test_two_calls_that_share_a_state_do_not_blow_up():
  one = lambda state, x, c: mpjax.autocast(loss, delayed(), fp8_state=state)(W, x, c)
  step = jit(jax.grad(lambda state, x, c: one(state, x, c) + one(state, x, c)))
  state = first_state(loss, W, X, C)
  for _ in range(3 * LENGTH):
    state = step(state, X, C)
  assert float(state["uses"]) == 2
  for site, of in state["amax"].items():
    for i, name in enumerate(NAMES):
      assert float(of[name][0]) <= 2 * INNER[site][i]
      history = np.asarray(of[name][1:]) / 2
      assert (history <= 2 * INNER[site][i]).all()
      assert (history >= INNER[site][i] / 2).all()


def test_a_shared_layer_has_one_history():
  fun = lambda w, x, c: jnp.sum(act(act(act(x @ w[0]) @ w[1]) @ w[1]) @ w[2] * c)
  w = [W[0], W[1], W[4]]
  state = following(fun, first_state(fun, w, X, C), w, X, C)
  by_hand = amaxes([W[0], W[1], W[1], W[4]], X, C)
  assert newest(state) == {":1": list(by_hand[1:3].max(0))}


def test_amaxes_that_are_not_finite_are_not_remembered():
  state = following(loss, first_state(loss, W, X, C), W, X, C)
  for bad in (np.nan, np.inf):
    x = X.copy()
    x[0, 0] = bad
    new = following(loss, state, W, x, C)
    leaves = jax.tree.leaves(new)
    assert np.isfinite(np.concatenate([np.ravel(a) for a in leaves])).all()
    for site, of in new["amax"].items():
      assert float(of["lhs"][0]) == 0
      assert float(of["lhs"][1]) == INNER[site][0]
      assert float(of["rhs"][0]) == INNER[site][1]
    value = jit(mpjax.autocast(loss, delayed(), fp8_state=state))(W, x, C)
    assert not np.isfinite(value)


WRONG = {
  "none": (lambda: None, "recipe 'delayed'.*fp8_state=state"),
  "of another function": (
    lambda: first_state(lambda w, x: jax.named_scope("other")(net)(w, x), W, X),
    "of another function.*other:1.*:1, :2, :3.*init_fp8_state",
  ),
  "of another length": (
    lambda: first_state(loss, W, X, C, policy=delayed(amax_history_len=7)),
    r"history .* of :\d has shape \(7,\).*amax_history_len is 4",
  ),
  "no state": (lambda: {"params": 1}, "fp8_state of type dict"),
  "a list": (lambda: [1], "fp8_state of type list"),
}


@pytest.mark.parametrize("name", WRONG)
def test_states_that_are_wrong(name):
  make, message = WRONG[name]
  with pytest.raises(ValueError, match=message):
    mpjax.autocast(loss, delayed(), fp8_state=make())(W, X, C)


def test_other_recipes_need_no_state():
  policy = delayed()
  policy["fp8"] = {"recipe": "current", "emulate": True, "min_dim": 16}
  assert first_state(loss, W, X, C, policy=policy)["amax"] == {}
  state = first_state(loss, W, X, C)
  for fun in (
    mpjax.autocast(loss, policy),
    mpjax.autocast(loss, mpjax.get_policy(delayed()).without_histories()),
    mpjax.autocast(loss, policy, fp8_state=state),
  ):
    assert len(named("fp8_dot_general", fun, W, X, C)) == 3


# Derivatives


def test_gradients_beside_the_state_are_exact():
  state = first_state(loss, W, X, C)
  of = lambda w, state: mpjax.autocast(loss, delayed(), fp8_state=state)(w, X, C)
  step, exact = jit(jax.grad(of, (0, 1))), jit(jax.grad(loss))(W, X, C)
  for _ in range(3):
    grads, state = step(W, state)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-2), grads, exact)


@pytest.mark.parametrize("fun", [loss, in_scan(layer_step)], ids=["layers", "scan"])
def test_forward_mode_with_respect_to_parameters(fun):
  state = following(fun, first_state(fun, W, X, C), W, X, C)
  ours = lambda w: mpjax.autocast(fun, delayed(), fp8_state=state)(w, X, C)
  tangent = [exact_weight(i + 10) for i in range(5)]
  along = jit(lambda: jax.jvp(ours, (W,), (tangent,))[1])()
  exact = jax.jvp(jax.jit(lambda w: fun(w, X, C)), (W,), (tangent,))[1]
  np.testing.assert_allclose(along, exact, rtol=0.05, atol=4)
  inside_jit = jax.jvp(jax.jit(ours), (W,), (tangent,))[1]
  np.testing.assert_allclose(inside_jit, along, rtol=1e-3, atol=1e-3)


def test_a_while_loop_can_be_run():
  def fun(w, x):
    body = lambda c: (c[0] + 1, act(c[1] @ w[1]))
    return jax.lax.while_loop(lambda c: c[0] < 3, body, (0, x @ w[0]))[1] @ w[2]

  state = first_state(fun, W, X)
  assert set(state["amax"]) == {":1"}
  np.testing.assert_array_equal(mpjax.autocast(fun, delayed(), fp8_state=state)(W, X), fun(W, X))


def test_gradients_of_gradients_are_near():
  fun = lambda w: (net(w, X) ** 2).mean()
  norm = lambda f: lambda w: sum(jnp.sum(g**2) for g in jax.grad(f)(w))
  ours = lambda state, w: norm(mpjax.autocast(fun, delayed(), fp8_state=state))(w)
  state = first_state(fun, W)
  step = jit(jax.grad(ours, (0, 1)))
  for _ in range(2):
    state, grads = step(state, W)
  for a, b in zip(grads, jit(jax.grad(norm(fun)))(W), strict=True):
    assert np.linalg.norm(a - b) < 0.1 * np.linalg.norm(b)


def test_autocast_of_a_gradient_does_not_scale_gradients_by_activations():
  large = lambda w, x, c: 2.0**14 * loss(w, x, c)
  state = following(large, first_state(large, W, X, C), W, X, C)
  grads = jit(mpjax.autocast(jax.grad(large), delayed(), fp8_state=state))(W, X, C)
  for ours, reference in zip(grads, jit(jax.grad(large))(W, X, C), strict=True):
    np.testing.assert_allclose(ours, reference, rtol=0.1)


# Frameworks


class Layer(nn.Module):
  @nn.compact
  def __call__(self, x, _):
    return nn.relu(nn.Dense(D, name="dense")(x)), None


class Net(nn.Module):
  @nn.compact
  def __call__(self, x):
    x = nn.Dense(D, name="first")(x)
    shared = nn.Dense(D, name="shared")
    x = nn.relu(shared(nn.relu(shared(x))))
    scan = nn.scan(Layer, variable_axes={"params": 0}, split_rngs={"params": True}, length=2)
    x, _ = scan(name="layers")(x, None)
    return nn.Dense(D, name="head")(x)


def test_names_of_linen_modules():
  model = Net()
  variables = model.init(jax.random.key(0), X)
  fun = lambda variables, x: (model.apply(variables, x) ** 2).mean()
  assert set(first_state(fun, variables, X)["amax"]) == {"Net/shared", "Net/layers/dense"}


class Nnx(nnx.Module):
  def __init__(self):
    rngs = nnx.Rngs(0)
    self.layers = nnx.List([nnx.Linear(D, D, rngs=rngs) for _ in range(4)])
    self.norm = nnx.BatchNorm(D, rngs=rngs)

  def __call__(self, x):
    for layer in self.layers:
      x = nnx.relu(self.norm(layer(x)))
    return x


def test_nnx():
  model, x, c = Nnx(), X, C
  fun = lambda model, x, c: jnp.sum(model(x) * c)
  state = mpjax.init_fp8_state(fun, delayed())(model, x, c)
  assert set(state["amax"]) == {"Nnx/layers/1", "Nnx/layers/2"}
  of = lambda model, state: mpjax.autocast(fun, delayed(), fp8_state=state)(model, x, c)
  grads, new = nnx.jit(nnx.grad(of, argnums=(0, 1)))(model, state)
  assert all(all(row) for row in newest(new).values())
  assert newest(new)["Nnx/layers/1"][1] == np.abs(model.layers[1].kernel[...]).max()
  assert grads["layers"][1]["kernel"][...].shape == (D, D)
  assert float(new["uses"]) == 1


def test_plain_trees_through_a_loss_scale():
  tx = mpjax.dynamic_loss_scale(optax.adam(1e-3), init_scale=2.0**4)
  tree = {"params": W, "_overwrite_with_gradient": first_state(loss, W, X, C)}
  opt_state = tx.init(tree)

  def scaled(tree, opt_state, x):
    own = mpjax.autocast(loss, delayed(), fp8_state=tree["_overwrite_with_gradient"])
    return mpjax.scale_loss(own(tree["params"], x, C), opt_state)

  @jax.jit
  def step(tree, opt_state, x):
    grads = jax.grad(scaled)(tree, opt_state, x)
    updates, opt_state = tx.update(grads, opt_state, tree)
    return mpjax.apply_updates(tree, updates), opt_state

  new, opt_state = step(tree, opt_state, X)
  by_hand = amaxes(W, X, C) * [1, 1, 2.0**4]
  assert newest(new["_overwrite_with_gradient"]) == {f":{i}": list(by_hand[i]) for i in (1, 2, 3)}
  assert float(np.abs(new["params"][1] - W[1]).max()) > 0
  bad = X.copy()
  bad[0] = np.inf
  after, opt_state = step(new, opt_state, bad)
  same(after, new)
  assert float(opt_state.scale) == 2.0**3


# Steps


def as_dict(w):
  return {f"w{i}": layer for i, layer in enumerate(w)}


def loss_fn(params, batch):
  return loss([params[f"w{i}"] for i in range(5)], batch["x"], batch["c"])


BATCH = {"x": X, "c": C}


def started(policy=None, batch=BATCH, tx=None, **options):
  step = mpjax.make_train_step(loss_fn, tx or optax.sgd(0.0), policy or delayed(), donate=False, **options)
  return step, step.init(as_dict(W), batch=batch)


@pytest.mark.parametrize("accumulate", [1, 2, 4])
def test_a_step_keeps_the_state(accumulate):
  step, state = started(accumulate=accumulate)
  assert set(state.fp8_state["amax"]) == {":1", ":2", ":3"}
  for i in range(3):
    state, _ = step(state, BATCH)
    assert newest(state.fp8_state) == INNER
    history = np.asarray(state.fp8_state["amax"][":2"]["lhs"])
    assert np.count_nonzero(history) == i + 1
  assert float(state.fp8_state["uses"]) == 1


def test_a_step_whose_batch_has_no_fp8_products_leaves_the_state_alone():
  step, state = started()
  state, _ = step(state, BATCH)
  after, _ = step(state, {"x": X[:17], "c": C[:17]})
  same(after.fp8_state, state.fp8_state)


@pytest.mark.parametrize("scale", [1.0, 2.0**10])
def test_a_loss_scale_is_not_taken_from_the_state(scale):
  policy = {**delayed(), "compute_dtype": "float16", "loss_scaling": {"init_scale": scale}}
  step, state = started(policy)
  state, metrics = step(state, BATCH)
  assert bool(metrics["grads_finite"])
  by_hand = amaxes(W, X, C) * [1, 1, scale]
  assert newest(state.fp8_state) == {f":{i}": list(by_hand[i]) for i in (1, 2, 3)}


@pytest.mark.parametrize(("accumulate", "dtype"), [(1, "float16"), (2, "bfloat16")])
def test_a_skipped_step_rolls_the_state_back(accumulate, dtype):
  policy = {**delayed(), "loss_scaling": {"init_scale": 2.0**4}, "compute_dtype": dtype}
  step, state = started(policy, accumulate=accumulate, tx=optax.adam(1e-3))
  state, _ = step(state, BATCH)
  bad = X.copy()
  bad[-1, -1] = np.nan
  after, metrics = step(state, {"x": bad, "c": C})
  assert not bool(metrics["grads_finite"])
  same(after.fp8_state, state.fp8_state)
  same(after.params, state.params)
  after, metrics = step(after, BATCH)
  assert bool(metrics["grads_finite"])


def test_a_step_without_a_loss_scale_forgets_what_is_not_finite():
  step, state = started()
  state, _ = step(state, BATCH)
  bad = X.copy()
  bad[-1, -1] = np.inf
  after, _ = step(state, {"x": bad, "c": C})
  assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(after.fp8_state))
  guarded, state = started(skip_nonfinite=True)
  state, _ = guarded(state, BATCH)
  after, _ = guarded(state, {"x": bad, "c": C})
  same(after.fp8_state, state.fp8_state)


@pytest.mark.slow
def test_a_step_over_devices_is_the_step_of_one():
  mesh = mesh_of(4)
  step, state = started(tx=optax.sgd(1e-4))
  alone, _ = step(state, BATCH)
  placed = jax.device_put(state, jax.NamedSharding(mesh, P()))
  spread, _ = step(placed, jax.device_put(BATCH, jax.NamedSharding(mesh, P("d"))))
  same(spread.fp8_state, alone.fp8_state)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), spread.params, alone.params)


@pytest.mark.slow
def test_a_step_resumed_from_a_copy_is_the_same():
  step, state = started(tx=optax.adam(1e-3))
  for _ in range(2):
    state, _ = step(state, BATCH)
  leaves, structure = jax.tree.flatten(state)
  copy = jax.tree.unflatten(structure, [jnp.asarray(np.asarray(leaf).copy()) for leaf in leaves])
  for _ in range(2):
    state, copy = step(state, BATCH)[0], step(copy, BATCH)[0]
  same(copy, state)


def test_a_step_of_modules_keeps_the_state():
  fun = lambda model, batch: ((model(batch["x"]) - batch["c"]) ** 2).mean()
  step = mpjax.make_train_step(fun, optax.adam(1e-3), delayed())
  state = step.init(Nnx(), batch=BATCH)
  assert set(state.fp8_state["amax"]) == {"Nnx/layers/1", "Nnx/layers/2"}
  for _ in range(2):
    state, _ = step(state, BATCH)
  assert np.count_nonzero(state.fp8_state["amax"]["Nnx/layers/1"]["gradient"]) == 2
  assert jax.eval_shape(step.gradients, state, BATCH)[0].shape == ()
  assert "float8_e4m3fn" in step.explain(state, BATCH).matrix_flops()


def test_a_step_says_what_it_lacks():
  step = mpjax.make_train_step(loss_fn, optax.sgd(0.1), delayed())
  with pytest.raises(ValueError, match=r"keeps a history of each product.*batch=batch"):
    step.init(as_dict(W))
  with pytest.raises(ValueError, match="fp8_state"):
    step(mpjax.make_train_step(loss_fn, optax.sgd(0.1), "bf16").init(as_dict(W)), BATCH)
  model = Nnx()
  step = mpjax.make_train_step(lambda m, b: (m(b["x"]) ** 2).mean(), optax.sgd(0.1), delayed())
  with pytest.raises(ValueError, match=r"histories in a TrainState.*step\.init"):
    step(model, nnx.Optimizer(model, step.tx, wrt=nnx.Param), BATCH)
  shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), BATCH)
  same(step.init(model, batch=shapes).fp8_state, step.init(model, batch=BATCH).fp8_state)


def test_scales_are_operands_under_delayed_scaling_alone():
  state = first_state(loss, W, X, C)
  fun = mpjax.autocast(loss, delayed(), fp8_state=state)
  specs = [e.params["spec"] for e in named("fp8_dot_general", jax.grad(fun), W, X, C)]
  assert len(specs) == 9
  assert all(spec.given[:2] == (True, True) for spec in specs)
