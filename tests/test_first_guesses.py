"""What users of other libraries write first: it works, or the error contains the line to write."""

import functools
import inspect

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest

import mpjax
from mpjax._gone import INSTEAD

X, Y = jnp.ones((4, 8)), jnp.ones((4, 2))
PARAMS, BATCH, TX = {"w": jnp.ones((8, 2))}, (X, Y), optax.sgd(0.1)
BF16 = jnp.bfloat16
MLP = eqx.nn.MLP(8, 2, 8, 1, key=jax.random.key(0))
DENSE = nn.Dense(2)


def loss_fn(params, batch):
  return loss_of_two(params, *batch)


def loss_of_two(params, x, y):
  return jnp.mean((x @ params["w"] - y) ** 2)


def loss_with_key(params, batch, key):
  return loss_fn(params, batch)


def module_loss(module, batch):
  return jnp.mean(jax.vmap(module)(batch[0]) ** 2)


def with_statement(*args, **options):
  with mpjax.autocast(*args, **options):
    return loss_fn(PARAMS, BATCH)


STEP = mpjax.make_train_step(loss_fn, TX, "fp16", donate=False)
STATE = STEP.init(PARAMS)

# What is written, and what of it works (None), or what the error contains.
GUESSES = {
  "flax: a linen module as parameters": (lambda: STEP.init(DENSE), "step.init(model.init(key, x)['params'])"),
  "jmp: StaticLossScale": (lambda: mpjax.StaticLossScale(1024), "mpjax.static_loss_scale(tx, 1024.0)"),
  "apex: initialize": (lambda: mpjax.initialize, "mpjax.make_train_step(loss_fn, tx, policy='bf16')"),
  "torch: autocast('cuda', dtype=)": (lambda: mpjax.autocast("cuda", dtype=BF16), "policy='bf16'"),
  "torch: autocast(f, dtype=)": (
    lambda: mpjax.autocast(loss_fn, dtype=BF16),
    "mpjax.autocast(f, policy='bf16')",
  ),
  "torch: autocast(f, enabled=)": (lambda: mpjax.autocast(loss_fn, enabled=False), "policy='fp32'"),
  "torch: with autocast()": (lambda: with_statement(), "loss = mpjax.autocast(loss_fn, 'bf16')"),
  "torch: GradScaler": (lambda: mpjax.GradScaler(), "tx = mpjax.dynamic_loss_scale(tx)"),
  "jmp: DynamicLossScale": (lambda: mpjax.DynamicLossScale(2.0**15), "tx = mpjax.dynamic_loss_scale(tx)"),
  "jmp: scale in place of tx": (lambda: mpjax.dynamic_loss_scale(1024.0), "mpjax.dynamic_loss_scale(tx"),
  "jmp: cast_to_compute": (lambda: mpjax.cast_to_compute(PARAMS), "get_policy('bf16').cast_to_compute"),
  "jmp: get_policy(string)": (lambda: mpjax.get_policy("params=float32,compute=half,output=float32"), None),
  "jmp: Policy('bf16')": (lambda: mpjax.Policy("bf16"), "mpjax.get_policy('bf16')"),
  "keras: get_policy('mixed_bfloat16')": (lambda: mpjax.get_policy("mixed_bfloat16"), None),
  "keras: set_global_policy": (
    lambda: mpjax.set_global_policy("mixed_bfloat16"),
    "mpjax.autocast(loss_fn, 'bf16')",
  ),
  "lightning: precision='16-mixed'": (lambda: mpjax.make_train_step(loss_fn, TX, "16-mixed"), None),
  "lightning: precision=": (
    lambda: mpjax.make_train_step(loss_fn, TX, precision="bf16-mixed"),
    "policy='bf16'",
  ),
  "flax: TrainState.create": (
    lambda: mpjax.TrainState.create(apply_fn=DENSE.apply, params=PARAMS, tx=TX),
    "state = step.init(params)",
  ),
  "flax: a linen module as loss": (lambda: mpjax.make_train_step(DENSE, TX), "def loss_fn(params, batch)"),
  "flax: explain(module, x)": (lambda: mpjax.explain(DENSE, X), "mpjax.explain(model.apply, variables, x"),
  "flax: autocast(module)": (lambda: mpjax.autocast(DENSE, "bf16"), "mpjax.autocast(model.apply, "),
  "equinox: a module in a step": (lambda: mpjax.make_train_step(module_loss, TX, "bf16").init(MLP), None),
  "equinox: tx.init(module)": (
    lambda: mpjax.dynamic_loss_scale(optax.adam(0.1)).init(MLP),
    "eqx.partition(model, eqx.is_inexact_array)",
  ),
  "tune(loss, params, batches, policies=...)": (
    lambda: mpjax.tune(loss_fn, PARAMS, [BATCH], policies=["bf16"]),
    "mpjax.tune has no argument 'policies'",
  ),
  "bitsandbytes: quantized_state(tx, bits=8)": (lambda: mpjax.quantized_state(TX, bits=8), "(tx, 'int8')"),
  "master_weights(params)": (lambda: mpjax.master_weights(PARAMS), "mpjax.master_weights(tx)"),
  "a name that moved": (lambda: mpjax.layerwise_loss_scale, "mpjax.loss_scale.layerwise_loss_scale"),
  "with_loss_scaling(tx, name)": (lambda: mpjax.with_loss_scaling(TX, "fp16"), None),
  "value_and_grad(f, policy)": (lambda: mpjax.value_and_grad(loss_fn, "fp16"), "opt_state = tx.init(params)"),
  "step(state, x, y)": (lambda: STEP(STATE, X, Y), "step(state, (x, y))"),
  "step(params, opt_state, batch)": (
    lambda: STEP(PARAMS, TX.init(PARAMS), BATCH),
    "state = step.init(params)",
  ),
  "a loss of (params, x, y)": (lambda: mpjax.make_train_step(loss_of_two, TX), "step(state, (x, y))"),
  "a loss with a key": (lambda: mpjax.make_train_step(loss_with_key, TX), "'rng'"),
  "explain(f, policy)(*args)": (
    lambda: mpjax.explain(loss_fn, "bf16")(PARAMS, BATCH),
    "mpjax.explain(loss_fn, params, batch, policy='bf16')",
  ),
  "explain(step, state, batch)": (lambda: mpjax.explain(STEP, STATE, BATCH), None),
  "plan(step, (state, batch))": (lambda: mpjax.plan(STEP, (STATE, BATCH)), "mpjax.plan(step, state, batch)"),
  "plan(f, (params, batch))": (
    lambda: mpjax.plan(loss_fn, (PARAMS, BATCH)),
    "mpjax.plan(loss_fn, params, batch, target='h100'), with its arguments one by one",
  ),
  "plan(device=)": (lambda: mpjax.plan(STEP, STATE, BATCH, device="h100"), "target='h100'"),
  "plan('h100')": (lambda: mpjax.plan("h100"), "mpjax.plan(loss_fn, params, batch, target='h100')"),
  "inspect_numerics(f, params, batch, policy)": (
    lambda: mpjax.inspect_numerics(loss_fn, PARAMS, BATCH, "fp16"),
    "mpjax.inspect_numerics(loss_fn, params, batch, policy='bf16')",
  ),
  "inspect_numerics(step, params, batch)": (
    lambda: mpjax.inspect_numerics(STEP, PARAMS, BATCH),
    "state = step.init(params)",
  ),
  "find_nonfinite(f, params, batch)": (lambda: mpjax.find_nonfinite(loss_fn, PARAMS, BATCH), None),
  "find_nonfinite(f with rng, params, batch, key)": (
    lambda: mpjax.find_nonfinite(lambda params, batch, rng: loss_fn(params, batch), PARAMS, BATCH, X),
    "batch, rng=rng",
  ),
  "another policy round an autocast": (
    lambda: mpjax.find_nonfinite(mpjax.autocast(loss_fn, "fp16"), PARAMS, BATCH, policy="bf16"),
    "pass the function without its autocast",
  ),
}


@pytest.mark.parametrize("guess", GUESSES)
def test_a_first_guess_works_or_says_what_to_write(guess):
  act, line = GUESSES[guess]
  if line is None:
    act()
    return
  with pytest.raises((TypeError, ValueError, AttributeError)) as error:
    act()
  assert line in str(error.value)


def test_names_are_where_the_error_says():
  for name in mpjax.loss_scale.__all__:
    if name in dir(mpjax) or name[0].isupper():
      continue
    with pytest.raises(AttributeError, match=rf"mpjax\.loss_scale\.{name}\b"):
      getattr(mpjax, name)
    assert getattr(mpjax.loss_scale, name).__doc__


@pytest.mark.parametrize("old", INSTEAD)
def test_an_old_name_says_what_is_written_in_its_place(old):
  place, name = old.split(".")
  package = getattr(mpjax, place, None)
  for module in (mpjax, package) if inspect.ismodule(package) else ():  # else a key of a policy or config
    assert not hasattr(module, name)
    with pytest.raises(AttributeError) as error:
      getattr(module, name)
    assert str(error.value).endswith(INSTEAD[old])


def passing_a_key(fun):
  return functools.wraps(fun)(lambda params, batch: fun(params, batch, None))


def test_a_wrapper_that_passes_arguments_itself_is_a_loss_function():
  @jax.tree_util.Partial
  def bound(params, batch):
    return loss_with_key(params, batch, None)

  def wrapped(*args):
    return loss_with_key(*args, key=None)

  wrapped.__wrapped__ = loss_with_key
  for fun in (bound, wrapped, jax.jit(passing_a_key(loss_with_key))):
    step = mpjax.make_train_step(fun, TX, "fp32")
    step(step.init(PARAMS), BATCH)
    assert mpjax.explain(fun, PARAMS, BATCH, policy="bf16").rows
