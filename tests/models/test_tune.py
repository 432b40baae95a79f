"""`mpjax.tune` on models that others wrote: it chooses what their own numbers allow."""

import jax
import numpy as np
import pytest

import mpjax
from tests.models._table import MODELS

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", ["Equinox ViT", "Haiku LSTM", "Flax CNN"])
def test_a_model_of_others_is_tuned(name):
  model = MODELS[name]()
  params = jax.tree.map(np.asarray, model.params)
  loss = lambda params, batch, rng: model.loss(params, batch, rng)
  result = mpjax.tune(
    loss, params, [model.batch], target="h200", candidates=["bf16", "fp16", "fp32"], rng=jax.random.key(0)
  )
  errors = {trial.label: trial.error.total for trial in result.table}
  assert 0 == errors["fp32"] < errors["fp16"] < errors["bf16"] < 0.05
  assert result.policy == mpjax.get_policy("bf16")
  assert len(result.noise.modules) > 1
