"""One loop of one's own for every policy: identities without a loss scale, and states that are none."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import jmp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState

import mpjax

PARAMS = {"w": jnp.full((4, 2), 0.1), "b": jnp.zeros(2)}
BATCH = {"x": jnp.ones((8, 4)), "y": jnp.zeros((8, 2))}
POLICIES = ["fp32", "bf16", "fp16", "bf16_pure", {"base": "fp16", "loss_scaling": 128.0}]


def loss_fn(params, batch):
  return jnp.mean((batch["x"] @ params["w"] + params["b"] - batch["y"]) ** 2)


def norm_of(tree):
  return np.sqrt(sum(np.sum(np.square(leaf)) for leaf in jax.tree.leaves(tree)))


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_one_loop_with_every_function_serves_every_policy(policy):
  policy = mpjax.get_policy(policy)
  tx = mpjax.with_loss_scaling(optax.sgd(0.1), policy)
  run = mpjax.autocast(loss_fn, policy)

  @jax.jit
  def step(params, opt_state):
    scaled = lambda p: mpjax.scale_loss(run(p, BATCH), opt_state)
    grads = jax.grad(scaled)(params)
    norm = mpjax.loss_scale.gradient_norm(grads, opt_state)
    updates, opt_state = tx.update(grads, opt_state, params)
    metrics = mpjax.loss_scale.loss_scale_metrics(opt_state)
    kept = mpjax.keep_if_finite(opt_state, {"count": jnp.ones(())}, {"count": jnp.zeros(())})
    return optax.apply_updates(params, updates), norm, metrics, kept

  params, norm, metrics, kept = step(PARAMS, tx.init(PARAMS))
  grads = jax.grad(loss_fn)(PARAMS, BATCH)
  np.testing.assert_allclose(norm, norm_of(grads), rtol=0.01)
  np.testing.assert_allclose(params["w"], PARAMS["w"] - 0.1 * grads["w"], rtol=0.01)
  assert bool(metrics) == (policy.loss_scaling is not None)
  assert kept["count"] == 1


def test_without_a_loss_scale_the_loss_is_only_cast():
  state = optax.adam(0.1).init(PARAMS)
  out = mpjax.scale_loss(jnp.bfloat16(3), state)
  assert (out.dtype, float(out)) == (jnp.float32, 3)
  assert float(mpjax.scale_loss(mpjax.Average(6.0, 2), state)) == 3
  with pytest.raises(ValueError, match="no loss scale"):
    mpjax.get_loss_scale(state)


@pytest.mark.parametrize("policy", ["fp32", "fp16"])
def test_the_norm_for_a_log_is_of_unscaled_gradients_of_modules_too(policy):
  model = nnx.Linear(4, 2, rngs=nnx.Rngs(0))
  optimizer = nnx.Optimizer(model, mpjax.with_loss_scaling(optax.sgd(0.1), policy), wrt=nnx.Param)
  of = lambda model, x: jnp.mean(model(x) ** 2)
  _, grads = mpjax.value_and_grad(of, optimizer)(model, BATCH["x"])
  expected = norm_of(nnx.as_pure(nnx.grad(of)(model, BATCH["x"])))
  np.testing.assert_allclose(mpjax.loss_scale.gradient_norm(grads, optimizer), expected, rtol=1e-5)


def test_leaves_that_are_overwritten_do_not_count_in_the_norm():
  grads = {"w": jnp.full(4, 2.0), "_overwrite_with_gradient": {"scale": jnp.full((), jnp.inf)}}
  state = mpjax.static_loss_scale(optax.sgd(0.1), 4.0).init(grads)
  assert float(mpjax.loss_scale.gradient_norm(grads, state)) == 1


CALLS = {
  "value_and_grad": lambda state: mpjax.value_and_grad(loss_fn, state),
  "scale_loss": lambda state: mpjax.scale_loss(1.0, state),
  "keep_if_finite": lambda state: mpjax.keep_if_finite(state, 1.0, 2.0),
  "gradient_norm": lambda state: mpjax.loss_scale.gradient_norm(PARAMS, state),
}
NO_STATES = {
  "a name": (lambda: "fp16", "'fp16'"),
  "a policy": (lambda: mpjax.get_policy("fp16"), "a Policy"),
  "a policy of jmp": (lambda: jmp.get_policy("half"), "a Policy"),
  "a policy in YAML": (lambda: {"base": "fp16"}, "a dict"),
  "a loss scaling": (mpjax.LossScaling, "a LossScaling"),
  "a dtype": (lambda: np.dtype("float16"), "a Float16DType"),
  "a number": (lambda: 2.0**16, "65536.0"),
  "a scale": (lambda: jnp.float32(2.0**16), "an array, as parameters are"),
  "parameters": (lambda: PARAMS, "a dict, as parameters are"),
  "a list of layers": (lambda: [(jnp.ones(2), jnp.ones(2))], "a list, as parameters are"),
  "a parameter": (lambda: PARAMS["w"], "an array, as parameters are"),
  "a module": (lambda: nnx.Linear(2, 2, rngs=nnx.Rngs(0)), "a Linear.*or the nnx.Optimizer"),
  "a module's state": (lambda: nnx.state(nnx.Linear(2, 2, rngs=nnx.Rngs(0))), "a State"),
  "a module of Equinox": (lambda: eqx.nn.Linear(2, 2, key=jax.random.key(0)), "a Linear"),
  "a function": (lambda: loss_fn, "a function"),
  "an optimiser": (lambda: optax.sgd(0.1), "an optimiser: pass its state"),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("name", NO_STATES)
def test_what_is_no_optimisers_state_is_a_type_error_that_says_what_to_pass(name, call):
  make, shown = NO_STATES[name]
  with pytest.raises(TypeError, match=f"opt_state is {shown}") as error:
    CALLS[call](make())
  assert "opt_state = tx.init(params)" in str(error.value)
  assert len(str(error.value)) < 300


def of_own(state):
  """A transform of one's own with this state."""
  return optax.GradientTransformation(
    lambda params: state(), lambda grads, state, params=None: (grads, state)
  )


LINEAR = functools.partial(nnx.Linear, 2, 2, rngs=nnx.Rngs(0))
STATES = {
  "none": lambda: None,
  "empty": lambda: (),
  "a tuple": lambda: optax.adam(0.1).init(PARAMS),
  "a named chain": lambda: optax.named_chain(("a", optax.trace(0.9)), ("b", optax.scale(0.1))).init(PARAMS),
  "MultiSteps": lambda: optax.MultiSteps(optax.sgd(0.1), 2).init(PARAMS),
  "a count of one's own": of_own(lambda: jnp.zeros([], jnp.int32)).init,
  "moments with a count": of_own(lambda: {"count": jnp.zeros([], jnp.int32), "m": PARAMS}).init,
  "moments in a chain": optax.chain(of_own(lambda: PARAMS)).init,
  "an nnx.Optimizer": lambda: nnx.Optimizer(LINEAR(), optax.adam(0.1), wrt=nnx.Param),
  "its state": lambda: nnx.Optimizer(LINEAR(), optax.adam(0.1), wrt=nnx.Param).opt_state,
  "a TrainState": lambda: TrainState.create(apply_fn=None, params=PARAMS, tx=optax.adam(0.1)),
}


@pytest.mark.parametrize("name", STATES)
def test_every_optimisers_state_is_taken(name):
  make = STATES[name]
  state = make(PARAMS) if name.startswith(("a count", "moments")) else make()
  loss, grads = mpjax.value_and_grad(loss_fn, state)(PARAMS, BATCH)
  expected, plain = jax.value_and_grad(loss_fn)(PARAMS, BATCH)
  assert loss == expected
  jax.tree.map(np.testing.assert_array_equal, grads, plain)
  assert mpjax.scale_loss(1.0, state) == 1
  assert mpjax.keep_if_finite(state, 1.0, 2.0) == 1


SAYS = {
  "fp16": 2.0**16,
  "16-mixed": 2.0**16,
  "mixed_float16": 2.0**16,
  "params=float32,compute=float16,output=float32,loss_scaling=64": 64,
  "bf16": None,
  "bf16-mixed": None,
  "fp32": None,
  "half": None,
  "params=float32,compute=float16,output=float32": None,
  # Words for a loss scaling keep their meaning.
  "keras": 2.0**15,
  "dynamic": 2.0**16,
  "1024": 1024,
  "none": None,
}


@pytest.mark.parametrize("spec", SAYS)
def test_with_loss_scaling_takes_a_policys_name(spec):
  tx = optax.sgd(0.1)
  wrapped = mpjax.with_loss_scaling(tx, spec)
  if SAYS[spec] is None:
    assert wrapped is tx
  else:
    assert mpjax.get_loss_scale(wrapped.init(PARAMS)).scale == SAYS[spec]


@pytest.mark.parametrize(("backend", "scaled"), [("cpu", False), ("tpu", False), ("gpu", True)])
def test_auto_is_what_the_backend_makes_of_it(backend, scaled, monkeypatch):
  monkeypatch.setattr(jax, "default_backend", lambda: backend)
  tx = optax.sgd(0.1)
  assert (mpjax.with_loss_scaling(tx, "auto") is not tx) == scaled


@pytest.mark.parametrize(("spec", "meant"), [("fp61", "fp16"), ("kears", "keras"), ("p=f32,c=f61", "f")])
def test_a_word_that_is_neither_a_scaling_nor_a_policy_names_the_choices(spec, meant):
  with pytest.raises(ValueError, match=r"neither a loss scaling \(none, dynamic,.*nor a policy") as error:
    mpjax.with_loss_scaling(optax.sgd(0.1), spec)
  assert f"did you mean '{meant}" in str(error.value)
