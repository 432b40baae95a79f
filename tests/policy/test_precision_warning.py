"""Policies that are probably not meant: a bare dtype, which is jmp's, and a loss scale that nobody applies."""

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

BARE = [
  ("bfloat16", "bf16"),
  (" bfloat16 ", "bf16"),
  ("float16", "fp16"),
  ("f16", "fp16"),
  ("half", "fp16"),
  ("16-true", "fp16"),
  (jnp.bfloat16, "bf16"),
  (jnp.float16, "fp16"),
  (np.dtype("float16"), "fp16"),
]
# With the string that says that everything is meant.
NOT_BARE = [
  "fp32",
  "float32",
  "full",
  jnp.float32,
  "bf16",
  "fp16",
  "bf16_pure",
  "bf16-true",
  "32-true",
  "16-mixed",
  "mixed_float16",
  "params=bfloat16,compute=bfloat16,output=bfloat16",
  {"base": "float16", "loss_scaling": "dynamic"},
  {"base": "bf16", "overrides": {".*": "bfloat16"}},
  mpjax.get_policy("float16"),
]


def loss_fn(params, batch):
  return (params * batch).sum()


USES = {
  "autocast": lambda policy: mpjax.autocast(loss_fn, policy)(jnp.ones(2), jnp.ones(2)),
  "decorator": lambda policy: mpjax.autocast(policy=policy)(loss_fn)(jnp.ones(2), jnp.ones(2)),
  "make_train_step": lambda policy: mpjax.make_train_step(loss_fn, optax.sgd(0.1), policy),
}


def warned(use, policy):
  with warnings.catch_warnings(record=True) as found:
    warnings.simplefilter("always")
    USES[use](policy) if not (use == "autocast" and isinstance(policy, dict)) else mpjax.autocast(
      loss_fn, policy
    )
  return [w for w in found if w.category is mpjax.PrecisionWarning]


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize(("policy", "meant"), BARE, ids=str)
def test_a_bare_half_precision_dtype_is_warned_of_once_with_what_was_probably_meant(use, policy, meant):
  (warning,) = warned(use, policy)
  text = str(warning.message)
  assert repr(meant) in text
  # What the warning offers is the same policy, and is not warned of.
  (same,) = [word.strip("'") for word in text.split() if word.startswith("'params=")]
  assert mpjax.get_policy(same) == mpjax.get_policy(policy)
  assert warned(use, same) == []


def with_unused_rows(params, batch):
  return jnp.mean((batch @ params["w"]) ** 2) + 0 * params["unused"].sum()


@pytest.mark.parametrize("policy", ["float16", "half", "16-true", "bfloat16"])
def test_the_warning_of_float16_says_what_adam_does_to_a_zero_gradient(policy):
  with pytest.warns(mpjax.PrecisionWarning) as found:
    step = mpjax.make_train_step(with_unused_rows, optax.adam(1e-3), policy)
  text = str(found[0].message)
  params = {"w": jnp.ones((4, 2)), "unused": jnp.ones(3)}
  state, _ = step(step.init(params), jnp.ones((8, 4)))
  says_so = "Adam in float16 gives NaN for a zero gradient" in text
  assert says_so == (policy != "bfloat16") == (not mpjax.all_finite(state.params))
  # The way out that it names.
  if says_so:
    assert "optimizer_dtype=float32" in text
    step = step.with_policy(f"{step.policy},optimizer_dtype=float32")
    state, _ = step(step.init(params), jnp.ones((8, 4)))
    assert mpjax.all_finite(state.params)


@pytest.mark.parametrize("use", ["autocast", "make_train_step"])
@pytest.mark.parametrize("policy", NOT_BARE, ids=str)
def test_nothing_else_is_warned_of(use, policy):
  assert issubclass(mpjax.PrecisionWarning, UserWarning)
  if not isinstance(policy, dict) or "overrides" not in policy or use == "make_train_step":
    assert warned(use, policy) == []


@pytest.mark.parametrize(("policy", "meant"), BARE, ids=str)
def test_get_policy_and_overrides_do_not_warn(policy, meant):
  with warnings.catch_warnings():
    warnings.simplefilter("error")
    dtype = mpjax.get_policy(policy).compute_dtype
    assert mpjax.get_policy(policy).param_dtype == dtype
    mpjax.get_policy({"base": "bf16", "overrides": {"head": policy}})
    mpjax.autocast(loss_fn, "bf16", overrides={"head": policy})


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


PARAMS = jnp.ones(2)
WRAPPERS = {
  "plain": lambda f: f,
  "jit": jax.jit,
  "nnx.jit": nnx.jit,
  "checkpoint": jax.checkpoint,
  "partial": lambda f: functools.wraps(f)(functools.partial(f, batch=jnp.ones(2))),
}


def found_by_value_and_grad(policy, opt_state, wrap=lambda f: f):
  run = wrap(mpjax.autocast(loss_fn, policy))
  with warnings.catch_warnings(record=True) as found:
    warnings.simplefilter("always")
    mpjax.value_and_grad(run, opt_state)
  return [str(w.message) for w in found if w.category is mpjax.PrecisionWarning]


@pytest.mark.parametrize("wrap", WRAPPERS)
@pytest.mark.parametrize("policy", ["fp16", "16-mixed", {"base": "fp16", "loss_scaling": 64}], ids=str)
def test_value_and_grad_of_a_policy_with_a_loss_scale_warns_where_the_optimiser_has_none(policy, wrap):
  [text] = found_by_value_and_grad(policy, optax.sgd(0.1).init(PARAMS), WRAPPERS[wrap])
  assert "opt_state has no loss scale" in text
  assert "tx = mpjax.with_loss_scaling(tx, " in text
  tx = mpjax.with_loss_scaling(optax.sgd(0.1), mpjax.get_policy(policy))
  assert found_by_value_and_grad(policy, tx.init(PARAMS), WRAPPERS[wrap]) == []


@pytest.mark.parametrize("policy", ["fp32", "bf16", "fp8", {"base": "fp16", "loss_scaling": None}], ids=str)
def test_a_policy_without_a_loss_scale_is_not_warned_of(policy):
  assert found_by_value_and_grad(policy, optax.sgd(0.1).init(PARAMS)) == []


AUTOS = {
  "a call": lambda: mpjax.autocast(loss_fn),
  "a decorator": lambda: mpjax.autocast()(loss_fn),
  "said": lambda: mpjax.autocast(loss_fn, "auto"),
  "a step": lambda: mpjax.make_train_step(loss_fn, optax.sgd(0.1)).init(PARAMS),
}


@pytest.mark.parametrize(
  ("backend", "warned_of"), [("gpu", {"a call", "a decorator"}), ("cpu", set()), ("tpu", set())]
)
@pytest.mark.parametrize("name", AUTOS)
def test_autocast_without_a_policy_warns_where_that_is_a_loss_scale(name, backend, warned_of, monkeypatch):
  monkeypatch.setattr(jax, "default_backend", lambda: backend)
  with warnings.catch_warnings(record=True) as found:
    warnings.simplefilter("always")
    AUTOS[name]()
  texts = [str(w.message) for w in found if w.category is mpjax.PrecisionWarning]
  assert len(texts) == (name in warned_of)
  for text in texts:
    assert "fp16" in text
    assert "mpjax.autocast(fun, 'bf16')" in text
    assert "mpjax.with_loss_scaling(tx, 'auto')" in text


def test_a_step_without_a_policy_runs_without_a_warning_on_a_gpu(monkeypatch):
  monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
  step = mpjax.make_train_step(loss_fn, optax.sgd(0.1))
  assert step.policy.loss_scaling is not None
  jax.eval_shape(step.jitted, step.init(PARAMS), jnp.ones(2))  # warnings are errors
