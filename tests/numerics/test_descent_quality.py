"""The share of the intended descent that survives an update, against weights that are rounded by hand."""

import jax
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


def setting():
  rng = np.random.default_rng(0)
  normal = lambda scale: np.asarray(scale * rng.standard_normal((16, 16)), np.float32)
  # Numbers that every format has, so that all start from the same weights.
  params = {"large": normal(8.0), "small": normal(0.01)}
  params = {k: jnp.asarray(v.astype(ml_dtypes.bfloat16).astype(np.float32)) for k, v in params.items()}

  def loss_fn(params, batch):
    return jnp.mean(batch @ params["large"].astype(batch.dtype)) + jnp.mean(params["small"] @ batch)

  return loss_fn, params, jnp.asarray(normal(1.0))


def moved(held, w, u):
  """What the weight moves by, in float64."""
  w, u = np.float64(w), np.float64(u)
  if held in ("bfloat16", "float16", "float32"):
    dtype = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16, "float32": np.float32}[held]
    return (w + u).astype(dtype).astype(np.float64) - w
  if held == "int8":  # 24 bits of float32
    bits = (w + u).astype(np.float32).view(np.uint32)
    return ((bits + np.uint32(0x80)) & np.uint32(0xFFFFFF00)).view(np.float32).astype(np.float64) - w
  return (w + u).astype(np.float32).astype(np.float64) - w if held == "int16" else u


@pytest.mark.parametrize("held", POLICIES)
def test_descent_quality_is_the_projection_of_the_move_on_the_update(held):
  loss_fn, params, batch = setting()
  report = mpjax.inspect_numerics(
    loss_fn, params, batch, POLICIES[held], tx=optax.sign_sgd(RATE), advise=False, reference=False
  )
  product = squared = 0.0
  for tensor in report.of("update"):
    w = np.asarray(params[tensor.path], np.float64)
    # sign_sgd: a rate with the sign of the gradient, which the other weights of a column or row share
    step = mpjax.make_train_step(loss_fn, optax.sign_sgd(RATE), "fp32")
    state, _ = step(step.init(jax.tree.map(jnp.copy, params)), batch)
    u = np.where(np.asarray(state.params[tensor.path], np.float64) > w, RATE, -RATE)
    here = moved(held, w, u)
    assert tensor.descent_here == pytest.approx(np.sum(here * u) / np.sum(u * u), rel=1e-5)
    assert tensor.norm == pytest.approx(np.linalg.norm(u), rel=1e-5)
    product, squared = product + np.sum(here * u), squared + np.sum(u * u)
  assert report.descent_quality == pytest.approx(product / squared, rel=1e-5)
  assert report.to_dict()["descent_quality"] == report.descent_quality
  if held == "bfloat16":
    assert report.descent_quality < 0.9
  [note] = [f.text for f in report.findings if f.kind == "descent"]
  assert f"make {100 * report.descent_quality:.4g}%" in note


def test_weights_that_stand_still_make_no_descent_and_are_named():
  params = {"still": jnp.full((16, 16), 256.0), "moving": jnp.full((16, 16), 2.0**-6)}
  loss_fn = lambda params, batch: jnp.mean(batch * (params["still"] + params["moving"]))
  batch = jnp.ones((16, 16), jnp.bfloat16)
  report = mpjax.inspect_numerics(loss_fn, params, batch, "bf16_pure", tx=optax.sign_sgd(RATE), advise=False)
  quality = {t.path: t.descent_here for t in report.of("update")}
  assert quality == {"still": 0.0, "moving": 1.0}
  assert report.descent_quality == pytest.approx(0.5)
  assert report.descent_quality_in("int16") == pytest.approx(1.0)
  assert any("still 0%" in f.text for f in report.findings if f.kind == "descent")


def test_without_an_optimiser_there_is_no_descent():
  loss_fn, params, batch = setting()
  report = mpjax.inspect_numerics(loss_fn, params, batch, "bf16", advise=False, reference=False)
  assert report.descent_quality is None
  assert report.to_dict()["descent_quality"] is None
