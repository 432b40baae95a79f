"""The suite `overhead`: what it compares is one and the same step."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks._overhead_steps import HAND, MODELS, batch_of, variants


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_every_variant_is_the_same_step(dtype):
  params, batch = MODELS["tiny perceptron"][0].init(), batch_of("tiny perceptron")
  losses = {}
  for name, (init, step) in variants("tiny perceptron", dtype).items():
    state = jax.tree.map(jnp.array, init(jax.tree.map(jnp.copy, params)))
    curve = []
    for _ in range(4):
      state, out = step(state, batch)
      curve.append(float(out["loss"] if isinstance(out, dict) else out))
    losses[name] = curve
  expected = losses[HAND]
  assert expected[-1] < expected[0]
  tolerance = {"float32": 1e-4, "bfloat16": 1e-2, "float16": 2e-3}[dtype]
  for name, curve in losses.items():
    np.testing.assert_allclose(curve, expected, rtol=tolerance, err_msg=name)
