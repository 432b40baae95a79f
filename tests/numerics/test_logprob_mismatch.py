"""The mismatch of two policies' predictions, against float64 by hand."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import mpjax

ROWS, WIDTH, CLASSES = 3, 32, 17
DTYPES = {"fp32": np.float32, "bf16": ml_dtypes.bfloat16, "fp16": np.float16}


def setting(size=2.0):
  rng = np.random.default_rng(0)
  x = rng.standard_normal((ROWS, 20, WIDTH)).astype(np.float32)
  w = (size / WIDTH**0.5 * rng.standard_normal((WIDTH, CLASSES))).astype(np.float32)
  return {"w": jnp.asarray(w)}, jnp.asarray(x), rng.integers(0, CLASSES, (ROWS, 20))


def logits_fn(params, x):
  return x @ params["w"]


def logprobs(params, x, name):
  """In float64, of a product whose operands and results are rounded."""
  dtype = DTYPES[name]
  rounded = lambda x: np.asarray(x).astype(dtype).astype(np.float64)
  logits = (rounded(x) @ rounded(params["w"])).astype(dtype).astype(np.float64)
  logits -= logits.max(-1, keepdims=True)
  return logits - np.log(np.sum(np.exp(logits), -1, keepdims=True))


@pytest.mark.parametrize("pair", [("bf16", "fp32"), ("fp16", "fp32"), ("bf16", "fp16"), ("fp32", "bf16")])
@pytest.mark.parametrize("labelled", [False, True])
def test_the_figures_are_those_of_float64(pair, labelled):
  params, x, labels = setting()
  a, b = (logprobs(params, x, name) for name in pair)
  chosen = labels if labelled else a.argmax(-1)
  d = np.take_along_axis(a - b, chosen[..., None], -1)[..., 0]
  kl = np.sum(np.exp(a) * (a - b), -1)
  found = mpjax.logprob_mismatch(logits_fn, params, x, *pair, labels if labelled else None)
  near = lambda value: pytest.approx(value, rel=0.03, abs=2e-6)  # float32 moves a rounding or two
  assert found.mean == near(np.abs(d).mean())
  assert found.largest == near(np.abs(d).max())
  assert found.bias == near(d.mean())
  assert found.kl_mean == pytest.approx(kl.mean(), rel=0.03, abs=1e-9)
  assert found.kl_largest == pytest.approx(kl.max(), rel=0.03, abs=1e-9)
  assert found.changed == (a.argmax(-1) != b.argmax(-1)).mean()
  assert (found.positions, found.not_finite) == (ROWS * 20, 0)
  assert found.policies == pair


def test_float16_takes_away_most_of_what_bfloat16_has():
  params, x, labels = setting()
  bf16, fp16 = (
    mpjax.logprob_mismatch(logits_fn, params, x, name, "fp32", labels) for name in ("bf16", "fp16")
  )
  assert fp16.mean < bf16.mean / 4
  assert fp16.kl_mean < bf16.kl_mean / 16


def test_a_policy_and_itself_agree():
  params, x, labels = setting()
  found = mpjax.logprob_mismatch(logits_fn, params, x, "bf16", "bf16", labels)
  assert (found.mean, found.largest, found.kl_mean, found.changed) == (0, 0, 0, 0)


def test_a_policy_without_autocast_computes_in_its_dtype_throughout():
  params, x, labels = setting()
  found = mpjax.logprob_mismatch(logits_fn, params, x, "bf16_pure", "bf16", labels)
  assert found.mean == pytest.approx(0, abs=1e-3)


def test_positions_that_are_masked_or_not_finite_are_left_out():
  params, x, labels = setting()
  mask = np.zeros((ROWS, 20), bool)
  mask[0] = True
  part = mpjax.logprob_mismatch(logits_fn, params, x[:1], "bf16", "fp32", labels[:1])
  found = mpjax.logprob_mismatch(logits_fn, params, x, "bf16", "fp32", labels, mask=mask)
  assert (found.positions, found.mean, found.kl_largest) == (
    20,
    *(pytest.approx(value, rel=1e-3) for value in (part.mean, part.kl_largest)),  # products of other sizes
  )
  broken = mpjax.logprob_mismatch(logits_fn, params, x.at[0, :10].set(1e6), "fp16", "fp32", labels)
  assert broken.not_finite == pytest.approx(1 / 6)
  assert np.isfinite(broken.mean)
  assert "16.7% of positions are not finite" in str(broken)


def test_predictions_that_are_far_apart_have_a_finite_divergence():
  params, x, labels = setting(size=400.0)
  found = mpjax.logprob_mismatch(logits_fn, params, x, "bf16", "fp32", labels)
  a, b = (logprobs(params, x, name) for name in ("bf16", "fp32"))
  assert found.kl_mean == pytest.approx(np.sum(np.exp(a) * (a - b), -1).mean(), rel=0.05)


@pytest.mark.parametrize("name", ["labels", "mask"])
def test_wrong_shapes_are_refused(name):
  params, x, _ = setting()
  with pytest.raises(ValueError, match=rf"{name} of shape \(4,\): expected \(3, 20\)"):
    mpjax.logprob_mismatch(logits_fn, params, x, "bf16", "fp16", **{name: np.ones(4, np.int32)})


def test_an_empty_mask_is_refused():
  params, x, _ = setting()
  with pytest.raises(ValueError, match="no position counts"):
    mpjax.logprob_mismatch(logits_fn, params, x, "bf16", "fp16", mask=np.zeros((ROWS, 20), bool))


def test_the_data_is_plain():
  params, x, labels = setting()
  found = mpjax.logprob_mismatch(logits_fn, params, x, "bf16", "fp16", labels)
  data = jax.tree.map(type, found.to_dict())
  assert data["mean"] is data["kl_mean"] is data["changed"] is float
  assert "bf16 against fp16, 60 positions: |dlogp| mean" in str(found)
