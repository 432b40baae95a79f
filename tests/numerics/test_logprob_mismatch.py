"""The mismatch of two policies' predictions, against float64 by hand."""

import jax
import ml_dtypes
import numpy as np
import pytest

import mpjax

ROWS, LENGTH, WIDTH, CLASSES = 3, 20, 32, 17
DTYPES = {"fp32": np.float32, "bf16": ml_dtypes.bfloat16, "fp16": np.float16}
RNG = np.random.default_rng(0)
X = RNG.standard_normal((ROWS, LENGTH, WIDTH)).astype(np.float32)
PARAMS = {"w": (2 / WIDTH**0.5 * RNG.standard_normal((WIDTH, CLASSES))).astype(np.float32)}
LABELS = RNG.integers(0, CLASSES, (ROWS, LENGTH))


def logits_fn(params, x):
  return x @ params["w"]


def mismatch(*policies, params=PARAMS, x=X, **options):
  return mpjax.numerics.logprob_mismatch(logits_fn, params, x, *policies, **options)


def logprobs(params, x, name):
  """In float64, of a product whose operands and results are rounded."""
  dtype = DTYPES[name]
  rounded = lambda x: x.astype(dtype).astype(np.float64)
  logits = (rounded(x) @ rounded(params["w"])).astype(dtype).astype(np.float64)
  logits -= logits.max(-1, keepdims=True)
  return logits - np.log(np.sum(np.exp(logits), -1, keepdims=True))


@pytest.mark.parametrize(
  ("pair", "labelled"),
  [(("bf16", "fp32"), True), (("fp16", "bf16"), False)],
)
def test_the_figures_are_those_of_float64(pair, labelled):
  a, b = (logprobs(PARAMS, X, name) for name in pair)
  chosen = LABELS if labelled else a.argmax(-1)
  d = np.take_along_axis(a - b, chosen[..., None], -1)[..., 0]
  kl = np.sum(np.exp(a) * (a - b), -1)
  found = mismatch(*pair, labels=LABELS if labelled else None)
  near = lambda value, atol=2e-6: pytest.approx(value, rel=0.03, abs=atol)  # float32 moves a rounding or two
  assert found.mean == near(np.abs(d).mean())
  assert found.largest == near(np.abs(d).max())
  assert found.bias == near(d.mean())
  assert (found.kl_mean, found.kl_largest) == (near(kl.mean(), 1e-9), near(kl.max(), 1e-9))
  assert found.changed == (a.argmax(-1) != b.argmax(-1)).mean()
  assert (found.positions, found.not_finite) == (ROWS * LENGTH, 0)
  assert found.policies == pair
  data = jax.tree.map(type, found.to_dict())
  assert data["mean"] is data["kl_mean"] is data["changed"] is float
  assert f"{pair[0]} against {pair[1]}, 60 positions: |dlogp| mean" in str(found)


def test_a_policy_and_itself_agree_and_one_without_autocast_computes_in_its_dtype():
  found = mismatch("bf16", "bf16", labels=LABELS)
  assert (found.mean, found.largest, found.kl_mean, found.changed) == (0, 0, 0, 0)
  assert mismatch("bf16_pure", "bf16", labels=LABELS).mean == pytest.approx(0, abs=1e-3)


def test_positions_that_are_masked_or_not_finite_are_left_out():
  mask = np.zeros((ROWS, LENGTH), bool)
  mask[0] = True
  a, b = (logprobs(PARAMS, X[0], name) for name in ("bf16", "fp32"))
  d, kl = np.take_along_axis(a - b, LABELS[0, :, None], -1), np.sum(np.exp(a) * (a - b), -1)
  found = mismatch("bf16", "fp32", labels=LABELS, mask=mask)
  assert found.positions == LENGTH
  assert found.mean == pytest.approx(np.abs(d).mean(), rel=0.03)
  assert found.kl_largest == pytest.approx(kl.max(), rel=0.03)
  broken = X.copy()
  broken[0, :10] = 1e6
  found = mismatch("fp16", "fp32", x=broken, labels=LABELS)
  assert found.not_finite == pytest.approx(1 / 6)
  assert np.isfinite(found.mean)
  assert "16.7% of positions are not finite" in str(found)


def test_predictions_that_are_far_apart_have_a_finite_divergence():
  params = {"w": 200 * PARAMS["w"]}
  a, b = (logprobs(params, X, name) for name in ("bf16", "fp32"))
  found = mismatch("bf16", "fp32", params=params, labels=LABELS)
  assert found.kl_mean == pytest.approx(np.sum(np.exp(a) * (a - b), -1).mean(), rel=0.05)


@pytest.mark.parametrize(
  ("options", "message"),
  [
    ({"labels": np.ones(4, np.int32)}, r"labels of shape \(4,\): expected \(3, 20\)"),
    ({"mask": np.ones(4, np.int32)}, r"mask of shape \(4,\): expected \(3, 20\)"),
    ({"mask": np.zeros((ROWS, LENGTH), bool)}, "no position counts"),
  ],
)
def test_wrong_shapes_and_an_empty_mask_are_refused(options, message):
  with pytest.raises(ValueError, match=message):
    mismatch("bf16", "fp16", **options)
