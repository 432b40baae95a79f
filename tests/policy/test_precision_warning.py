"""Policies that are probably not meant: a bare dtype, as of jmp, and a loss scale that nobody applies."""

import functools
import subprocess
import sys
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
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
  {"base": "bf16", "overrides": {".*": "bfloat16"}},
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
  return [str(w.message) for w in found if w.category is mpjax.PrecisionWarning]


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
    for policy in NOT_BARE:
      assert warnings_of(functools.partial(use, policy)) == [], policy


def test_get_policy_and_overrides_do_not_warn():
  for policy in (*BARE["bf16"], *BARE["fp16"]):  # warnings are errors
    dtype = mpjax.get_policy(policy).compute_dtype
    assert mpjax.get_policy(policy).param_dtype == dtype
    mpjax.get_policy({"base": "bf16", "overrides": {"head": policy}})
    mpjax.autocast(loss_fn, "bf16", overrides={"head": policy})


@pytest.mark.parametrize("policy", ["float16", "half", "bfloat16"])
def test_the_warning_of_float16_says_what_adam_does_to_a_zero_gradient(policy):
  loss = lambda params, batch: ((batch @ params["w"]) ** 2).mean() + 0 * params["unused"].sum()
  steps = []
  (text,) = warnings_of(lambda: steps.append(mpjax.make_train_step(loss, optax.adam(1e-3), policy)))
  params = {"w": np.ones((4, 2), np.float32), "unused": np.ones(3, np.float32)}

  def is_finite(step):
    return bool(mpjax.all_finite(step(step.init(params), np.ones((8, 4), np.float32))[0].params))

  says_so = "Adam in float16 gives NaN for a zero gradient" in text
  assert says_so == (policy != "bfloat16") == (not is_finite(steps[0]))
  if says_so:  # the way out that it names
    assert "optimizer_dtype=float32" in text
    assert is_finite(steps[0].with_policy(f"{steps[0].policy},optimizer_dtype=float32"))


@pytest.mark.slow
def test_the_warning_points_to_the_line_of_the_user(tmp_path):
  script = tmp_path / "user.py"
  script.write_text(
    "import mpjax, optax\n"
    "loss = lambda p, b: (p * b).sum()\n"
    "mpjax.autocast(loss, 'bfloat16')\n"
    "mpjax.make_train_step(loss, optax.sgd(0.1), 'float16')\n"
    "@mpjax.autocast(policy='float16')\n"
    "def f(x): return x\n"
  )
  done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True)
  lines = [line for line in done.stderr.splitlines() if "PrecisionWarning" in line]
  assert [line.partition("user.py:")[2].partition(":")[0] for line in lines] == ["3", "4", "5"]


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
  for policy in ("fp16", "16-mixed", {"base": "fp16", "loss_scaling": 64}):
    scaled = mpjax.with_loss_scaling(plain, mpjax.get_policy(policy))
    for name, wrap in WRAPPERS.items():
      [text] = found(policy, plain, wrap)
      assert "opt_state has no loss scale" in text, (policy, name)
      assert "tx = mpjax.with_loss_scaling(tx, " in text, (policy, name)
      assert found(policy, scaled, wrap) == [], (policy, name)
  for policy in ("fp32", "bf16", "fp8", {"base": "fp16", "loss_scaling": None}):
    assert found(policy, plain, WRAPPERS["plain"]) == [], policy


def test_autocast_without_a_policy_warns_where_that_is_a_loss_scale(monkeypatch):
  make = lambda: mpjax.make_train_step(loss_fn, optax.sgd(0.1))
  autos = {
    "a call": lambda: mpjax.autocast(loss_fn),
    "a decorator": lambda: mpjax.autocast()(loss_fn),
    "said": lambda: mpjax.autocast(loss_fn, "auto"),
    "a step": lambda: make().init(PARAMS),
  }
  for backend, warned_of in (("cpu", ()), ("tpu", ()), ("gpu", ("a call", "a decorator"))):
    monkeypatch.setattr(jax, "default_backend", lambda backend=backend: backend)
    for name, act in autos.items():
      texts = warnings_of(act)
      assert len(texts) == (name in warned_of), (backend, name)
      for words in ("fp16", "mpjax.autocast(fun, 'bf16')", "mpjax.with_loss_scaling(tx, 'auto')"):
        assert all(words in text for text in texts)
  step = make()
  assert step.policy.loss_scaling is not None
  jax.eval_shape(step.jitted, step.init(PARAMS), PARAMS)  # warnings are errors
