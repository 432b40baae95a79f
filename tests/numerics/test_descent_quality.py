"""The share of the intended descent that survives an update, against weights that are rounded by hand."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest

import mpjax

RATE = 2.0**-9
POLICIES = {
  "float32": "bf16",
  "bfloat16": "bf16_pure",
  "float16": {"base": "float16", "loss_scaling": None},
  "int8": {"base": "bf16_pure", "master_weights": "int8"},
  "int16": {"base": "bf16_pure", "master_weights": "int16"},
  "stochastic": {"base": "bf16_pure", "master_weights": "stochastic"},
}
pytestmark = pytest.mark.filterwarnings("ignore:policy 'float16' means float16 for everything")


def loss_fn(params, batch):
  return jnp.mean(batch @ params["large"].astype(batch.dtype)) + jnp.mean(params["small"] @ batch)


def setting():
  """Weights and a batch of numbers that every format has, so that all start from the same weights."""
  rng = np.random.default_rng(0)
  held = lambda scale: (scale * rng.standard_normal((16, 16))).astype(ml_dtypes.bfloat16).astype(np.float32)
  params, batch = {"large": held(8.0), "small": held(0.01)}, held(1.0)
  ones = np.ones((16, 16))
  # sign_sgd: the rate with the sign of the gradient, which the other weights of a column or row share
  updates = {"large": -RATE * np.sign(batch.T @ ones), "small": -RATE * np.sign(ones @ batch.T)}
  return params, batch, updates


def moved(held, w, u):
  """What the weight moves by, in float64."""
  w = np.float64(w)
  if held in ("bfloat16", "float16", "float32"):
    dtype = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16, "float32": np.float32}[held]
    return (w + u).astype(dtype).astype(np.float64) - w
  # Of int8 on average.
  return (w + u).astype(np.float32).astype(np.float64) - w if held in ("int8", "int16") else u


@pytest.mark.parametrize("held", POLICIES)
def test_descent_quality_is_the_projection_of_the_move_on_the_update(held):
  params, batch, updates = setting()
  report = mpjax.inspect_numerics(
    loss_fn, params, batch, policy=POLICIES[held], tx=optax.sign_sgd(RATE), advise=False, reference=False
  )
  product = squared = 0.0
  assert [tensor.path for tensor in report.of("update")] == [*params]
  for tensor in report.of("update"):
    u = updates[tensor.path]
    here = moved(held, params[tensor.path], u)
    assert tensor.descent_here == pytest.approx(np.sum(here * u) / np.sum(u * u), rel=1e-5)
    assert tensor.norm == pytest.approx(np.linalg.norm(u), rel=1e-5)
    product, squared = product + np.sum(here * u), squared + np.sum(u * u)
  assert report.descent_quality == pytest.approx(product / squared, rel=1e-5)
  assert report.to_dict()["descent_quality"] == report.descent_quality
  assert (report.descent_quality < 0.9) == (held in ("bfloat16", "float16"))
  [note] = [f.text for f in report.findings if f.kind == "descent"]
  assert f"make {100 * report.descent_quality:.4g}%" in note


def test_weights_that_stand_still_make_no_descent_and_are_named():
  full = lambda value, dtype=np.float32: np.full((16, 16), value, dtype)
  params, batch = {"still": full(256.0), "moving": full(2.0**-6)}, full(1.0, ml_dtypes.bfloat16)
  loss = lambda params, batch: jnp.mean(batch * (params["still"] + params["moving"]))
  report = mpjax.inspect_numerics(
    loss, params, batch, policy="bf16_pure", tx=optax.sign_sgd(RATE), advise=False
  )
  quality = {t.path: t.descent_here for t in report.of("update")}
  assert quality == {"still": 0.0, "moving": 1.0}
  assert report.descent_quality == pytest.approx(0.5)
  assert report.descent_quality_in("int16") == pytest.approx(1.0)
  assert any("still 0%" in f.text for f in report.findings if f.kind == "descent")
