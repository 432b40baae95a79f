"""Errors of one direction are told from errors that average out, and are those of NumPy."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import mpjax

ROWS, WIDTH, COLUMNS = 64, 32, 1024
SAID = {
  "random": None,
  "down": "too small overall",
  "up": "too large overall",
  "one sign": "too small overall",
  "offset": "the mean of its error is -",
}


def setting(kind):
  """Inputs that bfloat16 has; weights that it rounds down, up, or either way; a product of all signs or one."""
  rng = np.random.default_rng(0)
  x = rng.standard_normal((ROWS, WIDTH)).astype(ml_dtypes.bfloat16).astype(np.float32)
  if kind in ("random", "offset"):
    w = rng.standard_normal((WIDTH, COLUMNS))
  else:
    step = {"down": 2.0**-9, "up": 3 * 2.0**-9, "one sign": 2.0**-9}[kind]  # ties go to even
    signs = np.ones((WIDTH, COLUMNS)) if kind == "one sign" else rng.choice([-1.0, 1.0], (WIDTH, COLUMNS))
    w = signs * (1 + step)
  if kind == "one sign":
    x = np.abs(x)
  if kind == "offset":  # two large terms that all but cancel, of which one is rounded
    x[:, :2], w[0], w[1] = 1.0, 256.5, -256.0
  return x, w.astype(np.float32)


def loss_fn(params, batch):
  with jax.named_scope("layer"):
    y = batch @ params["w"].astype(batch.dtype)
  return jnp.mean(y.astype(jnp.float32) ** 2)


def inspect(kind, policy="bf16"):
  x, w = setting(kind)
  return mpjax.inspect_numerics(loss_fn, {"w": w}, x, policy=policy, advise=False)


def by_hand(x, w):
  half = lambda a: a.astype(ml_dtypes.bfloat16).astype(np.float64)
  exact = x.astype(np.float64) @ w.astype(np.float64)
  error = half((half(x) @ half(w)).astype(np.float32)) - exact
  rms = np.sqrt((exact**2).mean())
  return error.mean() / rms, (error * exact).sum() / (exact**2).sum(), np.sqrt((error**2).mean()) / rms


@pytest.mark.parametrize("kind", SAID)
def test_signed_errors_are_those_of_numpy_and_biased_rounding_is_noted(kind):
  report = inspect(kind)
  [product] = report.of("activation", "layer")
  bias, gain, error = by_hand(*setting(kind))
  assert product.error == pytest.approx(error, rel=0.1)
  assert product.bias == pytest.approx(bias, abs=0.02 * error + 0.05 * abs(bias))
  assert product.gain == pytest.approx(gain, abs=0.15 * error)  # of a sketch
  notes = [(f.severity, f.module) for f in report.findings if f.kind == "bias"]
  assert notes == ([("note", "layer")] if SAID[kind] else [])
  assert (SAID[kind] or "") in " ".join(report.table("findings").split())
  [data] = [t for t in report.to_dict()["tensors"] if t["kind"] == "activation"]
  assert (data["bias"], data["gain"]) == (product.bias, product.gain)


def test_errors_of_a_float32_policy_are_not_called_biased():
  assert not [f for f in inspect("down", "fp32").findings if f.kind == "bias"]
