"""`check_loss_scaling` of steps and losses: a scale that nobody applies, and backward rules that are not linear."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState

import mpjax
from mpjax.loss_scale import check_loss_scaling

RNG = np.random.default_rng(0)
PARAMS = {"w": jnp.asarray(RNG.normal(size=(8, 8)) / 3, jnp.float32), "v": jnp.ones((8, 2)) / 3}
BATCH = {"x": jnp.asarray(RNG.normal(size=(16, 8)), jnp.float32), "y": jnp.ones((16, 2))}


def loss_fn(params, batch):
  return jnp.mean((jnp.tanh(batch["x"] @ params["w"]) @ params["v"] - batch["y"]) ** 2)


@jax.custom_vjp
def clipped(x):
  """The identity, whose cotangent is clipped: scaled cotangents are cut, where those of the loss would not be."""
  return x


clipped.defvjp(lambda x: (x, None), lambda _, g: (jnp.clip(g, -0.1, 0.1),))


def clipping_loss(params, batch):
  hidden = clipped(jnp.tanh(batch["x"] @ params["w"]))
  return jnp.mean((hidden @ params["v"] - batch["y"]) ** 2)


def own_step(tx, differentiate, fun=loss_fn, policy="fp16", **jit):
  """A step of one's own whose gradients are `differentiate(fun, opt_state)(params, batch)`."""
  run = mpjax.autocast(fun, policy)

  @functools.partial(jax.jit, **jit)
  def step(params, opt_state, batch):
    loss, grads = differentiate(run, opt_state)(params, batch)
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss

  return step


def by_scale_loss(fun, opt_state):
  return jax.value_and_grad(lambda *args: mpjax.scale_loss(fun(*args), opt_state))


def unscaled_twice(fun, opt_state):
  def of(*args):
    loss, grads = mpjax.value_and_grad(fun, opt_state)(*args)
    return loss, jax.tree.map(lambda g: g / mpjax.get_loss_scale(opt_state).scale, grads)

  return of


OPTIMISERS = {
  "sgd": lambda: optax.sgd(0.1),
  "adam": lambda: optax.adam(1e-3),
  "a chain": lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1, momentum=0.9)),
}
BYPASSED = r"not those of the scaled loss.*mpjax\.value_and_grad\(loss_fn, opt_state\)\(params, batch\)"


@pytest.mark.parametrize("name", OPTIMISERS)
def test_a_step_that_differentiates_the_plain_loss_is_told_the_line_to_write(name):
  tx = mpjax.with_loss_scaling(OPTIMISERS[name](), "fp16")
  state = tx.init(PARAMS)
  plain = own_step(tx, lambda fun, _: jax.value_and_grad(fun))
  with pytest.raises(ValueError, match=BYPASSED):
    check_loss_scaling(plain, PARAMS, state, BATCH)
  for right in (mpjax.value_and_grad, by_scale_loss):
    check_loss_scaling(own_step(tx, right), PARAMS, state, BATCH)


def test_the_parameters_of_such_a_step_stand_still():
  tx = mpjax.with_loss_scaling(optax.sgd(0.1), "fp16")
  losses = {}
  for name, differentiate in (
    ("plain", lambda fun, _: jax.value_and_grad(fun)),
    ("scaled", mpjax.value_and_grad),
  ):
    step, params, state = own_step(tx, differentiate), PARAMS, tx.init(PARAMS)
    for _ in range(100):
      params, state, loss = step(params, state, BATCH)
    losses[name] = float(loss)
  first = float(loss_fn(PARAMS, BATCH))
  assert losses["plain"] == pytest.approx(first, rel=1e-3)
  assert losses["scaled"] < 0.9 * first


@pytest.mark.parametrize(
  ("differentiate", "fun"), [(unscaled_twice, loss_fn), (mpjax.value_and_grad, clipping_loss)]
)
@pytest.mark.parametrize("name", OPTIMISERS)
def test_a_step_whose_result_depends_on_the_scale_is_told_what_to_look_at(name, differentiate, fun):
  tx = mpjax.with_loss_scaling(OPTIMISERS[name](), "fp16")
  with pytest.raises(ValueError, match=r"of argument \d depends on the loss scale") as error:
    check_loss_scaling(own_step(tx, differentiate, fun), PARAMS, tx.init(PARAMS), BATCH)
  assert "check_loss_scaling(tx, params)" in str(error.value)
  assert "check_loss_scaling(loss_fn, params, batch)" in str(error.value)


def test_a_clip_outside_the_scale_is_found_in_a_step_too():
  tx = optax.chain(optax.clip_by_global_norm(1.0), mpjax.dynamic_loss_scale(optax.sgd(0.1)))
  with pytest.raises(ValueError, match="depends on the loss scale"):
    check_loss_scaling(own_step(tx, mpjax.value_and_grad), PARAMS, tx.init(PARAMS), BATCH)


def test_arguments_are_neither_changed_nor_donated():
  tx = mpjax.with_loss_scaling(optax.adam(1e-3), "fp16")
  state = tx.init(PARAMS)
  before = jax.tree.map(np.array, (PARAMS, state))
  check_loss_scaling(own_step(tx, mpjax.value_and_grad, donate_argnums=(0, 1)), PARAMS, state, batch=BATCH)
  jax.tree.map(np.testing.assert_array_equal, (PARAMS, state), before)


@pytest.mark.parametrize("right", [True, False])
def test_a_flax_train_state(right):
  state = TrainState.create(
    apply_fn=None, params=PARAMS, tx=mpjax.with_loss_scaling(optax.adam(1e-3), "fp16")
  )
  run = mpjax.autocast(loss_fn, "fp16")

  @jax.jit
  def step(state, batch):
    of = mpjax.value_and_grad(run, state.opt_state) if right else jax.value_and_grad(run)
    loss, grads = of(state.params, batch)
    return state.apply_gradients(grads=grads), loss

  if right:
    check_loss_scaling(step, state, BATCH)
  else:
    with pytest.raises(ValueError, match=BYPASSED):
      check_loss_scaling(step, state, BATCH)


class Net(nnx.Module):
  """A module with BatchNorm and dropout, which change in a step."""

  def __init__(self):
    self.linear = nnx.Linear(8, 2, rngs=nnx.Rngs(0))
    self.norm = nnx.BatchNorm(2, rngs=nnx.Rngs(0))
    self.dropout = nnx.Dropout(0.1, rngs=nnx.Rngs(1))

  def __call__(self, x):
    return self.dropout(self.norm(self.linear(x)))


def nnx_loss(model, batch):
  return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)


@pytest.mark.parametrize("right", [True, False])
def test_an_nnx_optimizer_that_changes_in_place(right):
  model = Net()
  optimizer = nnx.Optimizer(model, mpjax.with_loss_scaling(optax.adam(1e-3), "fp16"), wrt=nnx.Param)
  run = mpjax.autocast(nnx_loss, "fp16")

  @nnx.jit
  def step(model, optimizer, batch):
    of = mpjax.value_and_grad(run, optimizer) if right else nnx.value_and_grad(run)
    loss, grads = of(model, batch)
    optimizer.update(model, grads)
    return loss

  before = jax.tree.map(np.array, nnx.to_pure_dict(nnx.state(model, (nnx.Param, nnx.BatchStat))))
  if right:
    check_loss_scaling(step, model, optimizer, BATCH)
  else:
    with pytest.raises(ValueError, match=r"mpjax\.value_and_grad\(loss_fn, optimizer\)\(model, batch\)"):
      check_loss_scaling(step, model, optimizer, BATCH)
  after = nnx.to_pure_dict(nnx.state(model, (nnx.Param, nnx.BatchStat)))
  jax.tree.map(np.testing.assert_array_equal, before, after)
  assert float(mpjax.get_loss_scale(optimizer).scale) == 2.0**16


@pytest.mark.parametrize("policy", ["fp16", {"base": "fp16", "loss_scaling": 128}], ids=str)
def test_a_step_that_make_train_step_made(policy):
  step = mpjax.make_train_step(loss_fn, optax.adam(1e-3), policy)
  state = step.init(PARAMS)
  check_loss_scaling(step, state, BATCH)
  step(state, BATCH)  # which was not donated
  clipping = mpjax.make_train_step(clipping_loss, optax.adam(1e-3), policy)
  with pytest.raises(ValueError, match=r"gradient of w depends on the loss scale: unscaled, its norm is"):
    check_loss_scaling(clipping, clipping.init(PARAMS), BATCH)


def test_a_made_step_whose_optimiser_has_its_own_scale_in_the_wrong_place():
  tx = optax.chain(optax.clip_by_global_norm(1e-3), mpjax.dynamic_loss_scale(optax.sgd(0.1)))
  step = mpjax.make_train_step(loss_fn, tx, "bf16")
  with pytest.raises(ValueError, match="depends on the loss scale: something outside"):
    check_loss_scaling(step, step.init(PARAMS), BATCH)


def test_a_made_step_in_place():
  step = mpjax.make_train_step(nnx_loss, optax.sgd(0.1), "fp16")
  model = Net()
  check_loss_scaling(step, model, nnx.Optimizer(model, step.tx, wrt=nnx.Param), BATCH)


@pytest.mark.parametrize("policy", ["fp32", "bf16", "fp16"])
def test_a_loss_function_whose_backward_rule_clips(policy):
  check_loss_scaling(mpjax.autocast(loss_fn, policy), PARAMS, BATCH)
  with pytest.raises(ValueError, match="gradient of w depends on the loss scale") as error:
    check_loss_scaling(mpjax.autocast(clipping_loss, policy), PARAMS, BATCH)
  for word in ("custom_vjp", "full_precision does not change that", "divide by the scale inside", "'bf16'"):
    assert word in str(error.value)
  # As the message says: it does not help.
  whole = mpjax.full_precision(clipping_loss)
  with pytest.raises(ValueError, match="gradient of w"):
    check_loss_scaling(mpjax.autocast(whole, policy), PARAMS, BATCH)


def test_a_rule_that_divides_by_the_scale_inside_is_right():
  @jax.custom_vjp
  def clipped_unscaled(x, scale):
    return x

  clipped_unscaled.defvjp(
    lambda x, scale: (x, scale), lambda s, g: (s * jnp.clip(g / s, -0.1, 0.1), jnp.zeros(()))
  )

  def loss(params, batch, scale):
    hidden = clipped_unscaled(jnp.tanh(batch["x"] @ params["w"]), scale)
    return jnp.mean((hidden @ params["v"] - batch["y"]) ** 2)

  tx = mpjax.with_loss_scaling(optax.sgd(0.1), "fp16")
  run = mpjax.autocast(loss, "fp16")

  @jax.jit
  def step(params, state, batch):
    scale = mpjax.get_loss_scale(state).scale
    loss, grads = mpjax.value_and_grad(run, state)(params, batch, scale)
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state, loss

  check_loss_scaling(step, PARAMS, tx.init(PARAMS), BATCH)


LOSSES = {
  "with aux": (lambda p, b: (loss_fn(p, b), {"rows": 16}), (PARAMS, BATCH)),
  "an Average": (lambda p, b: mpjax.Average(16 * loss_fn(p, b), 16), (PARAMS, BATCH)),
  "of an array": (lambda w, train: jnp.sum(w**2) if train else 0.0, (PARAMS["w"], True)),
  "of a module": (mpjax.autocast(nnx_loss, "fp16"), (Net(), BATCH)),
  "that underflows": (mpjax.autocast(lambda p, b: 1e-6 * loss_fn(p, b), "fp16"), (PARAMS, BATCH)),
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_right_loss_passes(name):
  fun, args = LOSSES[name]
  check_loss_scaling(fun, *args)


def test_a_loss_of_a_module_with_a_rule_that_clips():
  def loss(model, batch):
    return jnp.mean((clipped(model(batch["x"])) - batch["y"]) ** 2)

  with pytest.raises(ValueError, match=r"gradient of (linear|norm)"):
    check_loss_scaling(loss, Net(), BATCH)


MISTAKES = {
  "no loss scale, in place": (
    lambda: check_loss_scaling(
      lambda m, o, b: None, Net(), nnx.Optimizer(Net(), optax.sgd(0.1), wrt=nnx.Param), BATCH
    ),
    ValueError,
    "no loss scale",
  ),
  "no loss scale": (
    lambda: check_loss_scaling(lambda p, s, b: (p, s), PARAMS, optax.sgd(0.1).init(PARAMS), BATCH),
    ValueError,
    "returned a tuple, which is no floating scalar.*none of its arguments holds a loss scale",
  ),
  "a made step without one": (
    lambda: check_loss_scaling(
      step := mpjax.make_train_step(loss_fn, optax.sgd(0.1), "bf16"), step.init(PARAMS), BATCH
    ),
    ValueError,
    "no loss scale",
  ),
  "a step that keeps its state": (
    lambda: check_loss_scaling(
      lambda p, s, b: p, PARAMS, mpjax.dynamic_loss_scale(optax.sgd(0.1)).init(PARAMS), BATCH
    ),
    ValueError,
    "updates no loss scale",
  ),
  "never finite": (
    lambda: check_loss_scaling(lambda p: jnp.sum(jnp.sqrt(p["v"] - 1)), PARAMS),
    ValueError,
    r"not finite at any loss scale.*find_nonfinite",
  ),
  "no arguments": (
    lambda: check_loss_scaling(loss_fn),
    TypeError,
    r"check_loss_scaling\(step, state, batch\)",
  ),
  "parameters": (lambda: check_loss_scaling(PARAMS, loss_fn), TypeError, r"of a dict"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_an_error_that_says_what_to_do(name):
  make, error, message = MISTAKES[name]
  with pytest.raises(error, match=message):
    make()
