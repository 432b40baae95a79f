"""Training steps of public code bases, written anew: their losses under autocast are those of float32."""

import functools

import jax
import numpy as np
import pytest

import mpjax
from tests.models import code_bases
from tests.models._model import distance

pytestmark = pytest.mark.slow

# How far a loss of the run may be from that of the float32 program: about three times what was found.
DISTANCE = {
  "big_vision": {"bf16": 0.005, "fp16": 0.0005},
  # Of losses of 10 to 25, until another action is drawn: from there on it is another run.
  "purejaxrl": {"bf16": 0.05, "fp16": 0.005},
  "jaxpi": {"bf16": 0.0015, "fp16": 0.0003},
  "tunix": {"bf16": 0.005, "fp16": 0.001},
  "mamba": {"bf16": 0.002, "fp16": 0.0005},
  "diffrax": {"bf16": 0.003, "fp16": 0.0005},
}
plain = functools.cache(lambda name: code_bases.RUNS[name](None))


@pytest.mark.parametrize("policy", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("name", DISTANCE)
def test_losses_are_those_of_float32(name, policy):
  want, got = plain(name), code_bases.RUNS[name](policy)
  assert got.skipped == 0
  assert np.isfinite(got.losses).all()
  assert np.ptp(want.losses, axis=-1).min() > 10 * DISTANCE[name]["fp16"]
  np.testing.assert_allclose(got.losses, want.losses, rtol=0, atol=DISTANCE[name].get(policy, 1e-5))
  assert got.result.get("base is kept", True)


@pytest.mark.parametrize("policy", ["fp32", "bf16", "fp16"])
def test_a_solver_stops_where_it_does_in_float32(policy):
  at = code_bases.ode()
  want, got = (jax.jit(f)(at.params, at.batch) for f in (at.solution, mpjax.autocast(at.solution, policy)))
  np.testing.assert_array_equal(got[0], np.broadcast_to(at.batch[1], got[0].shape))
  np.testing.assert_array_equal(got[2], want[2])
  assert got[3].all()
  np.testing.assert_allclose(got[1], want[1], atol={"fp32": 1e-6, "bf16": 0.02, "fp16": 0.002}[policy])


@pytest.mark.parametrize("order", ["of grad", "around grad"])
@pytest.mark.parametrize("policy", ["bf16", "fp16"])
def test_the_gradient_of_a_solver(policy, order):
  at, cast = code_bases.ode(), mpjax.autocast(policy=policy)
  grad = jax.grad(cast(at.loss)) if order == "of grad" else cast(jax.grad(at.loss))
  got, want = (jax.jit(f)(at.params, at.batch) for f in (grad, jax.grad(at.loss)))
  assert distance(got, want) < {"bf16": 0.03, "fp16": 0.004}[policy]
