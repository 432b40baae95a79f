"""What comes of FP8 under autocast: values, dtypes, what is not finite, devices without FP8 units."""

from __future__ import annotations

import sys

import jax
import numpy as np
import optax
import pytest

import mpjax
from tests.casting._jaxprs import jit, named
from tests.fp8._programs import W, X, fp8, loss, mlp, weights
from tests.fp8._reference import normal


@pytest.mark.skipif(sys.version_info < (3, 12), reason="needs skip_file_prefixes of warnings")
def test_the_warning_names_the_users_line():
  with pytest.warns(UserWarning, match="no FP8 units") as said:
    mpjax.autocast(loss, "fp8")(weights(*[128] * 4), normal(128, 128))
  assert said[0].filename == __file__


@pytest.mark.parametrize("policy", ["fp8", {"base": "fp8", "fp8": {"recipe": "mx", "min_dim": 16}}], ids=str)
def test_without_units_fp8_is_bfloat16_and_says_so(policy):
  w, x = weights(*[128] * 4), normal(128, 128)
  with pytest.warns(
    UserWarning, match=r"cpu has no FP8 units: they run in bfloat16 instead.*emulate: true"
  ) as said:
    out = jit(jax.value_and_grad(mpjax.autocast(loss, policy)))(w, x)
  assert len(said) == 1
  half = jit(jax.value_and_grad(mpjax.autocast(loss, "bf16")))(w, x)
  jax.tree.map(np.testing.assert_array_equal, out, half)
  rows = [row for row in mpjax.explain(loss, w, x, policy=policy).rows if row.flops]
  assert {row.after for row in rows} == {"bfloat16"}
  assert all("emulate: true" in row.why for row in rows)


@pytest.mark.parametrize("recipe", ["current", "mx", "delayed"])
def test_what_is_not_finite_reaches_the_loss_scale(recipe):
  policy = {**fp8(recipe=recipe), "compute_dtype": "float16", "loss_scaling": {"init_scale": 2.0**10}}
  of = lambda w, batch: loss([w["first"], w["inner"], w["last"]], batch)
  step = mpjax.make_train_step(of, optax.adam(1e-2), policy, donate=False)
  state = step.init(dict(zip(("first", "inner", "last"), W, strict=False)), batch=X)
  state, metrics = step(state, X)
  assert bool(metrics["grads_finite"])
  for where, bad in (("input", np.nan), ("input", np.inf), ("weight", -np.inf)):
    x, inner = X.copy(), np.array(state.params["inner"])
    (x if where == "input" else inner)[3, 5] = bad
    given = state.replace(params={**state.params, "inner": inner})
    after, metrics = step(given, x)
    assert not bool(metrics["grads_finite"]), (where, bad)
    jax.tree.map(
      np.testing.assert_array_equal, (after.params, after.fp8_state), (given.params, given.fp8_state)
    )
    assert float(after.opt_state.scale) == float(state.opt_state.scale) / 2


def test_output_and_gradient_dtypes():
  out, grads = jax.eval_shape(jax.value_and_grad(mpjax.autocast(loss, fp8())), W, X)
  assert {a.dtype.name for a in jax.tree.leaves((out, grads))} == {"float32"}
  made = lambda fun: sorted(e.params["spec"].out_dtype.name for e in named("fp8_dot_general", fun, W, X))
  assert made(mpjax.autocast(mlp, fp8())) == ["bfloat16"] * 3
  grad = jax.grad(mpjax.autocast(loss, fp8()))  # of float32 weights it is float32, of activations not
  assert made(grad) == ["bfloat16"] * 6 + ["float32"] * 3
  assert made(mpjax.autocast(mlp, {**fp8(), "accum_dtype": "float32"})) == ["float32"] * 3
