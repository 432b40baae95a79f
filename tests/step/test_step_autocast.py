"""A training step under a policy with autocast."""

import jax
import numpy as np
import optax
import pytest

import mpjax
from tests.step._problems import BATCH, linen_loss, linen_variables


def make(policy):
  step = mpjax.make_train_step(linen_loss, optax.adam(1e-2), policy)
  params, statistics = linen_variables()
  return step, step.init(params, model_state=statistics)


def vector(tree):
  return np.concatenate([np.ravel(x) for x in jax.tree.leaves(tree)])


def test_gradients_are_nearer_to_float32_than_by_casting_parameters():
  def gradients(policy):
    step, state = make(policy)
    return vector(step.gradients(state, BATCH)[1])

  exact = gradients("fp32")
  error = lambda autocast: np.linalg.norm(gradients({"base": "bf16", "autocast": autocast}) - exact)
  assert error(True) <= error(False)


def test_overrides_and_accumulation_dtype_are_honoured():
  step, state = make({"base": "bf16", "overrides": {".*/head": "fp32"}})
  explanation = step.explain(state, BATCH)
  assert explanation.matrix_flops() == {"bfloat16": 2 * 16 * 4 * 8, "float32": 2 * 16 * 8 * 1}
  assert {row.path for row in explanation.rows if row.flops and row.after == "float32"} == {"Net/head"}
  step, state = make({"base": "bf16", "accum_dtype": "float32"})
  assert "tensor<4x8xbf16>) -> tensor<16x8xf32>" in step.jitted.lower(state, BATCH).as_text()
  step, state = make({"base": "bf16", "overrides": {"heat": "fp32"}})
  with pytest.raises(ValueError, match=r"'heat' matches no module path.*Net/first.*Net/head"):
    step.explain(state, BATCH)
