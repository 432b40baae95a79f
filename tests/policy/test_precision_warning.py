"""Policies that are probably not meant: a bare dtype, as of jmp, and a loss scale that nobody applies."""

import functools
import os
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import mpjax

# By what was probably meant.
BARE = {
  "bf16": ("bfloat16", " bfloat16 ", jnp.bfloat16),
  "fp16": ("float16", "f16", "half", "16-true", jnp.float16, np.dtype("float16")),
}
# With the string that says that everything is meant.
NOT_BARE = [
  *("fp32", "float32", "full", jnp.float32, "bf16", "fp16", "bf16_pure", "bf16-true", "32-true", "16-mixed"),
  *("mixed_float16", "params=bfloat16,compute=bfloat16,output=bfloat16", mpjax.get_policy("float16")),
  {"base": "float16", "loss_scaling": "dynamic"},
]


PARAMS = np.ones(2, np.float32)


def loss_fn(params, batch):
  return (params * batch).sum()


USES = (
  lambda policy: mpjax.autocast(loss_fn, policy),
  lambda policy: mpjax.autocast(policy=policy)(loss_fn),
  lambda policy: mpjax.make_train_step(loss_fn, optax.sgd(0.1), policy),
)


def make_and_call(use, policy):
  made = use(policy)
  if not isinstance(made, mpjax.TrainStep):
    jax.eval_shape(made, PARAMS, PARAMS)


def warnings_of(act):
  with warnings.catch_warnings(record=True) as found:
    warnings.simplefilter("always")
    act()
  ours = [w for w in found if w.category is mpjax.PrecisionWarning]
  if "MPJAX_TYPECHECK" not in os.environ:  # which puts frames between
    assert all(w.filename == __file__ for w in ours)  # where the user's line is
  return [str(w.message) for w in ours]


def test_a_bare_half_precision_dtype_is_warned_of_once_with_what_was_probably_meant():
  assert issubclass(mpjax.PrecisionWarning, UserWarning)
  for use in USES:
    for meant, policy in [(meant, policy) for meant, policies in BARE.items() for policy in policies]:
      (text,) = warnings_of(functools.partial(make_and_call, use, policy))
      assert repr(meant) in text, policy
      # What the warning offers is the same policy, and is not warned of.
      (same,) = [word.strip("'") for word in text.split() if word.startswith("'params=")]
      assert mpjax.get_policy(same) == mpjax.get_policy(policy)
      assert warnings_of(functools.partial(make_and_call, use, same)) == [], policy
      # Of a module it is what is meant.
      for_a_module = {"base": "bf16", "overrides": {"head": policy}}
      assert warnings_of(functools.partial(use, for_a_module)) == [], policy
    for policy in NOT_BARE:
      assert warnings_of(functools.partial(use, policy)) == [], policy


WRAPPERS = {
  "plain": lambda f: f,
  "jit": jax.jit,
  "nnx.jit": nnx.jit,
  "checkpoint": jax.checkpoint,
  "partial": lambda f: functools.wraps(f)(functools.partial(f, batch=PARAMS)),
}


def test_value_and_grad_of_a_policy_with_a_loss_scale_warns_where_the_optimiser_has_none():
  def found(policy, tx, wrap):
    run, opt_state = wrap(mpjax.autocast(loss_fn, policy)), tx.init(PARAMS)
    return warnings_of(lambda: mpjax.value_and_grad(run, opt_state))

  plain = optax.sgd(0.1)
  scaled = mpjax.with_loss_scaling(plain, "fp16")
  for name, wrap in WRAPPERS.items():
    [text] = found("fp16", plain, wrap)
    assert "opt_state has no loss scale" in text, name
    assert "tx = mpjax.with_loss_scaling(tx, 'fp16')" in text, name
    assert found("fp16", scaled, wrap) == [], name
  for policy in ("fp32", "bf16", "fp8", {"base": "fp16", "loss_scaling": None}):
    assert found(policy, plain, WRAPPERS["plain"]) == [], policy


def test_autocast_without_a_policy_warns_where_that_is_a_loss_scale(monkeypatch):
  autos = {
    "a call": lambda: mpjax.autocast(loss_fn),
    "a decorator": lambda: mpjax.autocast()(loss_fn),
    "said": lambda: mpjax.autocast(loss_fn, "auto"),
    "a step": lambda: mpjax.make_train_step(loss_fn, optax.sgd(0.1)).init(PARAMS),
  }
  for backend, warned_of in (("cpu", ()), ("tpu", ()), ("gpu", ("a call", "a decorator"))):
    monkeypatch.setattr(jax, "default_backend", lambda backend=backend: backend)
    for name, act in autos.items():
      texts = warnings_of(act)
      assert len(texts) == (name in warned_of), (backend, name)
      for words in ("fp16", "mpjax.autocast(fun, 'bf16')", "mpjax.with_loss_scaling(tx, 'auto')"):
        assert all(words in text for text in texts)
