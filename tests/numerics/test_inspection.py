"""`inspect_numerics`: figures are those of an independent computation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import mpjax

# A pass looks at fewer rows where all do not fit beside the state: here they always fit.
from mpjax.numerics import _pass
from mpjax.numerics._seen import INTEREST
from mpjax.numerics._tensors import KINDS
from tests.numerics._by_hand import (
  ACTIVATIONS,
  BATCH,
  PARAMS,
  ROWS,
  TX,
  WIDTH,
  at_scale,
  batch_of,
  by_hand,
  look,
  loss_fn,
  magnitudes_of,
  near_counts,
  normal,
  report_of,
  same,
  shares_by_hand,
)


def test_magnitudes_are_those_of_float32():
  report = report_of("fp16")
  loss, found = by_hand("fp32")
  assert report.reference_loss == pytest.approx(loss, rel=1e-5)
  tensors = {(t.kind, t.module, t.name): t for t in report.tensors if t.kind != "update"}
  assert tensors.keys() == found.keys()
  for key, values in found.items():
    magnitudes = tensors[key].magnitudes
    assert near_counts(magnitudes, magnitudes_of(values)), key
    assert (magnitudes.nan, magnitudes.inf, magnitudes.zero) == (0, 0, (values == 0).sum())
    for name in INTEREST:
      for scale in (1.0, report.loss_scale) if "gradient" in key[0] else (1.0,):
        shares = pytest.approx(shares_by_hand(values, name, scale), abs=5 / values.size)
        assert magnitudes.shares(name, scale) == shares, (key, name, scale)


@pytest.mark.parametrize("policy", ["fp32", "bf16", "fp16", "bf16_pure", "fp8"])
def test_errors_are_those_of_the_policys_own_run(policy):
  report = report_of(policy)
  (loss, found), (_, exact) = by_hand(policy), by_hand("fp32")
  assert report.loss == pytest.approx(loss, rel=1e-2 if policy != "fp32" else 1e-5)
  for t in report.tensors:
    if t.kind in ("update", "parameter"):
      continue
    a, b = (x[t.kind, t.module, t.name].astype(np.float64).ravel() for x in (found, exact))
    error = np.linalg.norm(a - b) / np.linalg.norm(b)
    if policy == "fp32":
      assert t.error < 1e-5
    else:
      assert 1e-5 < error < 0.2
      assert t.error == pytest.approx(error, rel=0.35)
    assert t.policy[:2] == (0, 0)
    assert abs(t.policy[2] - (a == 0).sum()) <= 2


def test_dtypes_shapes_lines_and_order_are_those_of_the_program():
  report = report_of("fp16")
  activations = report.of("activation")
  assert [(t.module, t.name) for t in activations] == ACTIVATIONS
  assert {t.shape for t in activations} == {(ROWS, WIDTH)}
  assert {t.line.partition(":")[0] for t in activations} == {"_by_hand.py"}
  assert [t.dtype for t in activations if t.name == "dot_general"] == ["float16"] * 2
  assert [t.kind for t in report.tensors] == sorted((t.kind for t in report.tensors), key=KINDS.index)
  weights = {("one", "w"), ("one", "b"), ("two", "w")}
  assert {(t.module, t.name, t.dtype) for t in report.of("parameter")} == {(*w, "float32") for w in weights}
  assert (report.batches, report.rows, report.step, report.loss_scale) == (1, ROWS, 0, 2.0**16)
  kept = [t.dtype for kind in ("parameter", "update") for t in report_of("bf16_pure").of(kind)]
  assert kept == ["bfloat16"] * 6


def test_reported_gradients_do_not_depend_on_the_loss_scale():
  step = mpjax.make_train_step(loss_fn, TX, "fp16")
  state, scales = step.init(PARAMS), (2.0**8, 2.0**12, 1000.0)
  reports = [mpjax.inspect_numerics(step, at_scale(state, s), BATCH, reference=False) for s in scales]
  for a, b, c in zip(*(report.tensors for report in reports), strict=True):
    assert near_counts(a.magnitudes, b.magnitudes)
    assert near_counts(a.magnitudes, c.magnitudes)
    assert a.magnitudes.range[1] == b.magnitudes.range[1]
  for report, scale in zip(reports, scales, strict=True):
    assert report.loss_scale == scale
    for t in report.of("weight gradient"):
      shares = t.magnitudes.shares("float8_e5m2", scale)
      assert t.to_dict(scale)["scaled_shares"]["float8_e5m2"] == shares._asdict()
    assert report.reference_loss is None
    assert {(t.error, t.policy) for t in report.of("activation")} == {(None, None)}
    assert report.advice.unchanged
    assert "float32:" not in str(report)


def test_gradients_inside_a_loop_over_time_are_unscaled_too():
  def loss(params, batch):
    step = lambda h, x: (jnp.tanh(x + h @ params), None)
    return jnp.mean(jax.lax.scan(step, jnp.zeros_like(batch[0]), batch)[0] ** 2)

  params, batch = normal(1, WIDTH, WIDTH, scale=0.1), normal(2, 3, ROWS, WIDTH)
  policy = {"base": "fp16", "loss_scaling": {"kind": "static", "init_scale": 2.0**8}}
  report = mpjax.inspect_numerics(loss, params, batch, policy=policy, advise=False)
  gradients = [t for t in report.of("activation gradient") if t.name == "dot_general"]
  assert gradients
  assert all(t.error < 0.01 for t in gradients)


def test_batches_and_the_micro_batches_of_accumulation_add_up():
  batches = batch_of(20), batch_of(30)
  first, second, both = (look("bf16", b) for b in ([batches[0]], [batches[1]], iter(batches)))
  assert (both.batches, both.rows) == (2, 2 * ROWS)
  assert both.loss == pytest.approx((first.loss + second.loss) / 2, rel=1e-6)
  assert both.reference_loss == pytest.approx((first.reference_loss + second.reference_loss) / 2, rel=1e-6)
  for a, b, total in zip(first.tensors, second.tensors, both.tensors, strict=True):
    if total.kind != "parameter":
      assert same(total.magnitudes, a.magnitudes + b.magnitudes)
    if total.error is not None:
      assert min(a.error, b.error) <= total.error * 1.0001
      assert total.error <= max(a.error, b.error) * 1.0001
  step = mpjax.make_train_step(loss_fn, TX, "bf16", accumulate=2)
  interleaved = jax.tree.map(lambda a, b: np.stack([a, b], 1).reshape(-1, *a.shape[1:]), *batches)
  report = mpjax.inspect_numerics(step, step.init(PARAMS), interleaved, advise=False)
  assert (report.batches, report.rows) == (2, 2 * ROWS)
  for a, b in zip(report.tensors, both.tensors, strict=True):
    assert a.kind == "update" or (same(a.magnitudes, b.magnitudes) and a.error == b.error)


def test_as_many_rows_are_looked_at_as_fit_and_the_same_for_both_policies(monkeypatch):
  parts = look("bf16", {name: x[:5] for name, x in BATCH.items()})
  monkeypatch.setattr(_pass, "_FITS", 1 << 11)  # the activations of 16 rows take 3 * 16 * 16 * 8 bytes
  report = look("bf16")
  assert (report.batches, report.rows, report.rows_left_out) == (1, 5, ROWS - 5)
  assert "1 batch (5 of 16 rows)" in str(report)
  assert (report.loss, report.reference_loss) == (parts.loss, parts.reference_loss)
  for a, b in zip(report.tensors, parts.tensors, strict=True):
    assert same(a.magnitudes, b.magnitudes)
    assert a.error == b.error
  monkeypatch.setattr(_pass, "_FITS", 1)
  assert look("bf16").rows == 1
  assert look({"base": "fp8", "fp8": {"emulate": True}}).rows == ROWS  # of fewer, nothing would run in FP8
  of_16 = lambda params, batch: jnp.mean((batch["x"].reshape(ROWS, WIDTH) @ params["one"]["w"]) ** 2)
  assert look("bf16", loss=of_16).rows == ROWS


class Net(nnx.Module):
  def __init__(self):
    rngs = nnx.Rngs(0, dropout=1)
    linear = lambda seed: nnx.Linear(
      WIDTH, WIDTH, rngs=rngs, kernel_init=lambda *_: jnp.asarray(normal(seed, WIDTH, WIDTH, scale=0.25))
    )
    self.first = linear(0)
    self.norm = nnx.BatchNorm(WIDTH, rngs=rngs)
    self.dropout = nnx.Dropout(0.5, rngs=rngs)
    self.blocks = nnx.List([linear(1), linear(2)])

  def __call__(self, x):
    x = self.dropout(nnx.relu(self.norm(self.first(x))))
    for block in self.blocks:
      x = x + block(x)
    return x


def net_loss(model, batch):
  return jnp.mean((model(batch["x"]).astype(jnp.float32) - batch["y"]) ** 2)


def stateful_loss(params, batch, rng, model_state):
  keep = jax.random.bernoulli(rng, 0.5, batch["x"].shape)
  mean = batch["x"].mean(0) + model_state["mean"]
  loss = loss_fn(params, {**batch, "x": jnp.where(keep, batch["x"] - mean, 0)})
  return loss, {}, {"mean": mean}


@pytest.mark.parametrize(("kind", "policy"), [("nnx", "fp16"), ("rng and model_state", "bf16")])
def test_gradients_and_loss_are_those_of_the_training_step(kind, policy):
  loss, params, init = stateful_loss, PARAMS, {}
  if kind == "nnx":
    loss, params = net_loss, Net()
  else:
    init = {"rng": jax.random.key(3), "model_state": {"mean": np.zeros(WIDTH, np.float32)}}
  step = mpjax.make_train_step(loss, TX, policy)
  state = step.init(params, **init)
  before = jax.tree.map(np.asarray, (state.params, state.opt_state))
  report = mpjax.inspect_numerics(step, state, BATCH, reference=False)
  jax.tree.map(np.testing.assert_array_equal, before, (state.params, state.opt_state))
  value, grads = step.gradients(state, BATCH)
  assert report.loss == pytest.approx(float(value), rel=1e-3)
  leaves = jax.tree_util.tree_flatten_with_path(grads)[0]
  tensors = {t.path: t for t in report.of("weight gradient")}
  assert len(tensors) == len(leaves)
  for path, leaf in leaves:
    t = tensors[jax.tree_util.keystr(path, simple=True, separator="/")]
    assert near_counts(t.magnitudes, magnitudes_of(leaf), 0.1), t.path
  if kind == "nnx":
    modules = [*dict.fromkeys(t.module for t in report.of("activation"))]
    linear = ["Net/first", "Net/blocks/0", "Net/blocks/1"]
    assert [m for m in modules if m in linear] == linear
    assert {t.module for t in report.of("parameter")} <= {*modules}
