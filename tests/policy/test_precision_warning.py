"""A bare dtype is jmp's: everything in it; who probably meant a preset is told, once."""

import subprocess
import sys
import warnings

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import mpjax

BARE = [
  ("bfloat16", "bf16"),
  (" bfloat16 ", "bf16"),
  ("float16", "fp16"),
  ("f16", "fp16"),
  ("half", "fp16"),
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
  "16-true",
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
