"""`inspect_numerics` against the same figures computed by hand, and what it takes and refuses."""

import functools
import json
import math

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from flax import nnx

import mpjax
from mpjax.numerics.summary import Summary
from mpjax.numerics.tensors import BINS, INTEREST, KINDS, Magnitudes, full_summary

WIDTH, ROWS = 16, 16  # FP8 products take multiples of 16
_FP8 = {"emulate": True, "min_dim": 1, "first_layer": True, "last_layer": True}
POLICIES = {
  "fp32": "fp32",
  "bf16": "bf16",
  "fp16": "fp16",
  "float16": "float16",
  "bf16_pure": "bf16_pure",
  "fp8": {"base": "fp8", "fp8": _FP8},
}
AS_ROUNDED = {"xla_allow_excess_precision": False}


def normal(seed, *shape, scale=1.0):
  return jnp.asarray(scale * np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def params_of(seed=0):
  return {
    "one": {"w": normal(seed, WIDTH, WIDTH, scale=0.25), "b": normal(seed + 1, WIDTH, scale=0.1)},
    "two": {"w": normal(seed + 2, WIDTH, WIDTH, scale=0.25)},
  }


def batch_of(seed=10, rows=ROWS):
  return {"x": normal(seed, rows, WIDTH), "y": normal(seed + 1, rows, WIDTH)}


def mlp(params, batch, taps=()):
  """The loss, and the activations that are looked at; what is added to them has their gradients."""
  tap = lambda x, i: x + taps[i] if taps else x
  x = batch["x"].astype(params["one"]["w"].dtype)
  with jax.named_scope("one"):
    z = tap(x @ params["one"]["w"], 0)
    h = tap(jnp.tanh(z + params["one"]["b"]), 1)
  with jax.named_scope("two"):
    out = tap(h @ params["two"]["w"], 2)
  return jnp.mean((out.astype(jnp.float32) - batch["y"]) ** 2), (z, h, out)


def loss_fn(params, batch):
  return mlp(params, batch)[0]


ACTIVATIONS = [("one", "dot_general"), ("one", "tanh"), ("two", "dot_general")]


@functools.cache
def report_of(policy, **options):
  tx = optax.sgd(1e-2)
  return mpjax.inspect_numerics(
    loss_fn, params_of(), batch_of(), POLICIES[policy], tx=tx, advise=False, title="mlp", pieces=1, **options
  )


def by_hand(policy):
  """Loss, activations, their gradients and those of parameters: of the policy's own run."""
  policy = mpjax.get_policy(policy)
  params, batch = policy.cast_to_param(params_of()), batch_of()
  fun = mlp
  if policy.autocast:
    fun = mpjax.autocast(mlp, policy)
  else:
    params, batch = policy.cast_to_compute((params, batch))
  scale = policy.loss_scaling.init_scale if policy.loss_scaling else 1.0

  def scaled(params, taps):
    loss, activations = fun(params, batch, taps)
    return loss.astype(jnp.float32) * scale, (loss, activations)

  dtype = jnp.float32 if policy.autocast else policy.compute_dtype
  taps = [jnp.zeros((ROWS, WIDTH), dtype)] * 3
  run = jax.jit(jax.grad(scaled, (0, 1), has_aux=True), compiler_options=AS_ROUNDED)
  (grads, of_taps), (loss, activations) = run(params, taps)
  unscale = lambda tree: jax.tree.map(lambda g: np.asarray(g, np.float32) / scale, tree)
  return float(loss), jax.tree.map(np.asarray, activations), unscale(of_taps), unscale(grads)


def tensors_by_hand(policy):
  """By (kind, module, name): the values."""
  loss, activations, of_taps, grads = by_hand(policy)
  found = {}
  for (module, name), value, gradient in zip(ACTIVATIONS, activations, of_taps, strict=True):
    found["activation", module, name] = np.asarray(value, np.float32)
    found["activation gradient", module, name] = gradient
  for module, leaves in grads.items():
    for name, gradient in leaves.items():
      found["weight gradient", module, name] = gradient
      found["parameter", module, name] = np.asarray(params_of()[module][name])
  return loss, found


def magnitudes_of(x, scale=1.0):
  summary = full_summary(scale)
  return Magnitudes.of(summary, np.asarray(summary(jnp.asarray(x))))


def shares_by_hand(x, name, scale):
  with np.errstate(over="ignore"):
    rounded = (x * np.float32(scale)).astype(ml_dtypes.finfo(name).dtype).astype(np.float32)
  tiny = float(ml_dtypes.finfo(name).smallest_normal)
  gone, over = (x != 0) & (rounded == 0), ~np.isfinite(rounded)
  small = (rounded != 0) & ~over & (np.abs(rounded) < tiny)
  return gone.mean(), small.mean(), over.mean()


def near_counts(got, want, fraction=0.02):
  """Whether two histograms agree but for values that float32's rounding takes over an edge."""
  moved = np.abs(np.cumsum(got.histogram[1]) - np.cumsum(want.histogram[1])).max()
  return got.count == want.count and moved <= max(1, fraction * want.count)


@pytest.mark.parametrize("policy", ["fp32", "fp16"])
def test_magnitudes_are_those_of_float32(policy):
  report = report_of(policy)
  loss, found = tensors_by_hand("fp32")
  assert report.reference_loss == pytest.approx(loss, rel=1e-5)
  tensors = {(t.kind, t.module, t.name): t for t in report.tensors if t.kind != "update"}
  assert tensors.keys() == found.keys()
  for key, values in found.items():
    magnitudes = tensors[key].magnitudes
    assert near_counts(magnitudes, magnitudes_of(values)), key
    assert (magnitudes.nan, magnitudes.inf, magnitudes.zero) == (0, 0, (values == 0).sum())
    for name in INTEREST:
      for scale in (1.0, report.loss_scale) if "gradient" in key[0] else (1.0,):
        assert magnitudes.shares(name, scale) == pytest.approx(
          shares_by_hand(values, name, scale), abs=2 / values.size
        ), (key, name, scale)


@pytest.mark.parametrize("policy", POLICIES)
def test_errors_are_those_of_the_policys_own_run(policy):
  report = report_of(policy)
  loss, found = tensors_by_hand(POLICIES[policy])
  _, exact = tensors_by_hand("fp32")
  assert report.loss == pytest.approx(loss, rel=1e-2 if policy != "fp32" else 1e-5)
  for t in report.tensors:
    if t.kind in ("update", "parameter"):
      continue
    a, b = (x[t.kind, t.module, t.name].astype(np.float64).ravel() for x in (found, exact))
    error = np.linalg.norm(a - b) / np.linalg.norm(b)
    cosine = a @ b / (np.linalg.norm(a) * np.linalg.norm(b))
    if policy == "fp32":
      assert t.error < 1e-5
    else:
      assert 1e-5 < error < 0.2
      assert t.error == pytest.approx(error, rel=0.35)
      assert 1 - t.cosine == pytest.approx(1 - cosine, rel=0.6, abs=1e-6)
    assert t.policy[:2] == (0, 0)
    assert abs(t.policy[2] - (a == 0).sum()) <= 2


def test_dtypes_shapes_lines_and_order_are_those_of_the_program():
  report = report_of("fp16")
  activations = report.of("activation")
  assert [(t.module, t.name) for t in activations] == ACTIVATIONS
  assert {t.shape for t in activations} == {(ROWS, WIDTH)}
  assert {t.line.partition(":")[0] for t in activations} == {"test_inspection.py"}
  assert [t.dtype for t in activations if t.name == "dot_general"] == ["float16"] * 2
  assert [t.kind for t in report.tensors] == sorted((t.kind for t in report.tensors), key=KINDS.index)
  assert {(t.module, t.name, t.dtype) for t in report.of("parameter")} == {
    ("one", "w", "float32"),
    ("one", "b", "float32"),
    ("two", "w", "float32"),
  }
  assert (report.batches, report.rows, report.step, report.loss_scale) == (1, ROWS, 0, 2.0**16)


@pytest.mark.parametrize("policy", ["bf16_pure", "float16"])
def test_parameters_and_updates_are_in_the_policys_dtype(policy):
  name = mpjax.get_policy(policy).param_dtype.name
  assert {t.dtype for kind in ("parameter", "update") for t in report_of(policy).of(kind)} == {name}


def scaled_policy(scale):
  return {"base": "fp16", "loss_scaling": {"kind": "static", "init_scale": scale}}


@pytest.fixture(scope="module")
def without_reference():
  run = lambda policy: mpjax.inspect_numerics(
    loss_fn, params_of(), batch_of(), policy, tx=optax.sgd(1e-2), reference=False
  )
  return {scale: run(scaled_policy(scale)) for scale in (2.0**8, 2.0**12, 1000.0)}


def test_reported_gradients_do_not_depend_on_the_loss_scale(without_reference):
  low, high, odd = (without_reference[scale] for scale in (2.0**8, 2.0**12, 1000.0))
  for a, b, c in zip(low.tensors, high.tensors, odd.tensors, strict=True):
    assert near_counts(a.magnitudes, b.magnitudes)
    assert near_counts(a.magnitudes, c.magnitudes)
    assert a.magnitudes.range[1] == b.magnitudes.range[1]
  for report in without_reference.values():
    for t in report.of("weight gradient"):
      data = t.to_dict(report.loss_scale)
      assert (
        data["scaled_shares"]["float8_e5m2"]
        == t.magnitudes.shares("float8_e5m2", report.loss_scale)._asdict()
      )


def test_without_a_reference_there_are_no_errors(without_reference):
  report = without_reference[2.0**8]
  assert report.reference_loss is None
  assert {(t.error, t.cosine, t.policy) for t in report.tensors} == {(None, None, None)}
  assert report.advice.unchanged
  assert "float32:" not in str(report)


@pytest.fixture(scope="module")
def two_batches():
  run = lambda batches, **options: mpjax.inspect_numerics(
    loss_fn, params_of(), batches, "bf16", advise=False, **options
  )
  first, second = batch_of(20), batch_of(30)
  return run([first]), run([second]), run(iter([first, second])), (first, second)


def test_batches_add_up(two_batches):
  first, second, both, _ = two_batches
  assert (both.batches, both.rows) == (2, 2 * ROWS)
  assert both.loss == pytest.approx((first.loss + second.loss) / 2, rel=1e-6)
  assert both.reference_loss == pytest.approx((first.reference_loss + second.reference_loss) / 2, rel=1e-6)
  for a, b, total in zip(first.tensors, second.tensors, both.tensors, strict=True):
    assert total.magnitudes == a.magnitudes + b.magnitudes
    norms = [np.sqrt(t.magnitudes.count) for t in (a, b)]
    assert min(a.error, b.error) <= total.error * 1.0001
    assert total.error <= max(a.error, b.error) * 1.0001, norms


def test_micro_batches_of_accumulation_are_the_batches(two_batches):
  *_, both, (first, second) = two_batches
  interleaved = jax.tree.map(lambda a, b: jnp.stack([a, b], 1).reshape(-1, *a.shape[1:]), first, second)
  step = mpjax.make_train_step(loss_fn, optax.sgd(1e-2), "bf16", accumulate=2)
  report = mpjax.inspect_numerics(step, step.init(params_of()), interleaved, advise=False)
  assert (report.batches, report.rows) == (2, 2 * ROWS)
  for a, b in zip([t for t in report.tensors if t.kind != "update"], both.tensors, strict=True):
    assert (a.magnitudes, a.error) == (b.magnitudes, b.error)


@pytest.mark.parametrize("loss", ["mean", "sum"])
def test_a_batch_in_pieces_gives_the_same_figures(loss):
  run = lambda pieces: mpjax.inspect_numerics(
    lambda p, b: loss_fn(p, b) if loss == "mean" else jnp.sum((mlp(p, b)[1][2] - b["y"]) ** 2),
    params_of(),
    batch_of(),
    "bf16",
    tx=optax.sgd(1e-2),
    advise=False,
    pieces=pieces,
  )
  whole, parts = run(1), run(4 if loss == "mean" else None)  # None finds out that it has to be 1
  assert (parts.batches, parts.rows) == (whole.batches, whole.rows) == (1, ROWS)
  assert parts.reference_loss == pytest.approx(whole.reference_loss, rel=1e-5)
  for a, b in zip(whole.tensors, parts.tensors, strict=True):
    assert (a.kind, a.module, a.name) == (b.kind, b.module, b.name)
    assert near_counts(a.magnitudes, b.magnitudes), (a.kind, a.module, a.name)
    if a.kind != "update":
      assert b.error == pytest.approx(a.error, rel=0.3)


class Net(nnx.Module):
  def __init__(self):
    rngs = nnx.Rngs(0, dropout=1)
    self.first = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
    self.norm = nnx.BatchNorm(WIDTH, rngs=rngs)
    self.dropout = nnx.Dropout(0.5, rngs=rngs)
    self.blocks = nnx.List([nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(2)])

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


@pytest.mark.parametrize("policy", ["bf16", "fp16"])
@pytest.mark.parametrize("kind", ["nnx", "rng and model_state"])
def test_gradients_and_loss_are_those_of_the_training_step(kind, policy):
  loss, params, init = net_loss, Net(), {}
  if kind != "nnx":
    loss, params = stateful_loss, params_of()
    init = {"rng": jax.random.key(3), "model_state": {"mean": jnp.zeros(WIDTH)}}
  step = mpjax.make_train_step(loss, optax.sgd(1e-2), policy)
  state = step.init(params, **init)
  before = jax.tree.map(np.asarray, (state.params, state.opt_state))
  report = mpjax.inspect_numerics(step, state, batch_of(), reference=False)
  jax.tree.map(np.testing.assert_array_equal, before, (state.params, state.opt_state))
  value, grads = step.gradients(state, batch_of())
  assert report.loss == pytest.approx(float(value), rel=1e-3)
  leaves = jax.tree_util.tree_flatten_with_path(grads)[0]
  tensors = {t.path: t for t in report.of("weight gradient")}
  assert len(tensors) == len(leaves)
  for path, leaf in leaves:
    t = tensors[jax.tree_util.keystr(path, simple=True, separator="/")]
    assert near_counts(t.magnitudes, magnitudes_of(leaf, report.loss_scale), 0.1), t.path
  if kind == "nnx":
    modules = list(dict.fromkeys(t.module for t in report.of("activation")))
    assert [m for m in modules if m in ("Net/first", "Net/blocks/0", "Net/blocks/1")] == [
      "Net/first",
      "Net/blocks/0",
      "Net/blocks/1",
    ]
    assert {t.module for t in report.of("parameter")} <= {*modules}


def given_updates(updates):
  return optax.GradientTransformation(lambda params: (), lambda grads, state, params=None: (updates, state))


LOST = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


@pytest.mark.parametrize("policy", ["fp32", "float16", "bf16_pure"])
def test_lost_updates_are_those_that_rounding_loses(policy):
  rng = np.random.default_rng(5)
  held = np.dtype(mpjax.get_policy(policy).param_dtype)
  weights = rng.choice([-1, 1], 4000) * 2.0 ** rng.uniform(-26, 15, 4000)
  relative = rng.choice([-1, 1], 4000) * 2.0 ** rng.uniform(-14, -4, 4000)
  weights = np.concatenate([weights, [1.0, 1.0, 1.0, 1.0, 2.0**-24, 2.0**-24, 0.0, 3.0]]).astype(held)
  extra = [2.0**-11, 2.0**-12, -(2.0**-12), 2.0**-8, 2.0**-25, 2.0**-24, 2.0**-30, 0.0]
  updates = np.concatenate([weights[:4000].astype(np.float64) * relative, extra]).astype(np.float32)
  report = mpjax.inspect_numerics(
    lambda p, b: jnp.sum(p["w"].astype(jnp.float32) * b) * 1e-6,
    {"w": jnp.asarray(weights)},
    jnp.ones(len(weights)),
    policy,
    tx=given_updates({"w": jnp.asarray(updates)}),
    advise=False,
    pieces=1,
  )
  (t,) = report.of("update")
  moved = updates != 0
  for name, dtype in LOST.items():
    kept = weights.astype(dtype)
    new = (kept.astype(np.float32) + updates).astype(dtype)
    assert t.lost[name] == pytest.approx((new == kept)[moved].mean(), abs=1e-6), name
  wide = weights.astype(np.float32)
  ratio = np.where(wide != 0, np.abs(updates) / np.where(wide != 0, np.abs(wide), 1), 0)
  assert near_counts(t.magnitudes, magnitudes_of(ratio), 1e-3)
  lost = [f for f in report.findings if f.kind == "lost updates"]
  assert all(f.severity == ("problem" if t.lost.get(held.name, 0) > 0.5 else "note") for f in lost)


def test_without_an_optimiser_nothing_is_said_of_updates():
  report = mpjax.inspect_numerics(loss_fn, params_of(), batch_of(), "bf16", advise=False)
  assert not report.of("update")
  assert not [f for f in report.findings if f.kind == "lost updates"]


DEEP = 4


def scanned_loss(params, batch):
  def layer(x, w):
    with jax.named_scope("layers"):
      return x + jnp.tanh(x @ w), None

  out, _ = jax.lax.scan(layer, batch["x"], params["w"])
  return jnp.mean((out - batch["y"]) ** 2)


def test_steps_of_a_loop_are_layers():
  params = {"w": normal(7, DEEP, WIDTH, WIDTH, scale=0.2) * (4.0 ** jnp.arange(DEEP))[:, None, None]}
  batch = batch_of()
  report = mpjax.inspect_numerics(scanned_loss, params, batch, "fp32", advise=False)
  names = [t.module for t in report.of("activation") if t.name == "dot_general"]
  assert names == [f"layers[{i}]" for i in range(DEEP)]
  x = np.asarray(batch["x"])
  for i in range(DEEP):
    z = x @ np.asarray(params["w"][i])
    (t,) = [t for t in report.of("activation", f"layers[{i}]") if t.name == "dot_general"]
    assert near_counts(t.magnitudes, magnitudes_of(z))
    x = x + np.tanh(z)


def strict(text):
  def refuse(name):
    raise ValueError(name)

  return json.loads(text, parse_constant=refuse)


@pytest.mark.parametrize("policy", ["fp16", "fp8"])
def test_the_dictionary_is_strict_json_of_the_documented_form(policy, tmp_path):
  report = report_of(policy)
  report.save_json(tmp_path / "report.json")
  data = strict((tmp_path / "report.json").read_text())
  assert data == strict(json.dumps(report.to_dict(), allow_nan=False))
  assert data.keys() == {
    *("version", "title", "policy", "compute_dtype", "backend", "versions", "loss_scale", "step"),
    *("batches", "rows", "loss", "bins", "formats", "tensors", "findings", "advice"),
  }
  assert (data["version"], data["title"], data["bins"]) == (1, "mlp", list(BINS))
  assert data["formats"].keys() == {*INTEREST}
  for t in data["tensors"]:
    assert t["count"] == t["zero"] + t["below"] + sum(t["counts"]) + t["nan"] + t["inf"]
    assert len(t["counts"]) == len(data["bins"])
    assert (t["scaled_shares"] is not None) == (t["kind"] in ("activation gradient", "weight gradient"))
    assert (t["lost"] is not None) == (t["kind"] == "update")
    assert t["shares"].keys() == {*INTEREST}
  order = [(KINDS.index(t["kind"]), t["order"]) for t in data["tensors"]]
  assert order == sorted(order)
  assert data["advice"].keys() >= {"policy", "yaml", "lines", "measured", "unchanged"}
  mpjax.get_policy(data["advice"]["policy"])


def test_numbers_that_json_has_not_are_strings():
  batch = batch_of()
  batch["x"] = batch["x"].at[0, 0].set(jnp.nan)
  report = mpjax.inspect_numerics(loss_fn, params_of(), batch, "bf16", tx=optax.sgd(1e-2), advise=False)
  data = strict(json.dumps(report.to_dict(), allow_nan=False))
  assert data["loss"] == {"policy": "nan", "reference": "nan"}
  (first, *_) = report.of("activation")
  assert (first.magnitudes.nan, first.policy[0]) == (WIDTH, WIDTH)


def test_the_text_has_every_finding():
  report = report_of("bf16_pure")
  text = str(report)
  assert report.findings
  assert all(finding.text in text for finding in report.findings)
  assert report.advice.yaml.rstrip() in text
  assert text.startswith("numerics of mlp: policy bf16_pure, 1 batch (16 rows), step 0")


STEP = mpjax.make_train_step(loss_fn, optax.sgd(1e-2), "bf16")
WRONG = {
  "no batch": (lambda: (loss_fn, params_of(), []), {}, "no batch: expected"),
  "no batch left": (lambda: (loss_fn, params_of(), iter(())), {}, "no batch: expected"),
  "keep": (lambda: (loss_fn, params_of(), batch_of()), {"keep": 1.0}, "keep=1.0: expected a share"),
  "keep text": (
    lambda: (loss_fn, params_of(), batch_of()),
    {"keep": "most"},
    "keep='most': expected a share",
  ),
  "target": (lambda: ("gpt", params_of(), batch_of()), {}, "'gpt': expected a TrainStep or a loss function"),
  "state": (lambda: (STEP, params_of(), batch_of()), {}, "state of type dict: expected the TrainState"),
  "tx": (
    lambda: (STEP, STEP.init(params_of()), batch_of()),
    {"tx": optax.sgd(1.0)},
    "tx beside a TrainStep",
  ),
  "rng": (
    lambda: (STEP, STEP.init(params_of()), batch_of()),
    {"rng": jax.random.key(0)},
    "rng beside a TrainStep",
  ),
  "rng not taken": (
    lambda: (loss_fn, params_of(), batch_of()),
    {"rng": jax.random.key(0)},
    "loss_fn does not take 'rng'",
  ),
  "reference": (lambda: (loss_fn, params_of(), batch_of()), {"reference": "x"}, "reference='x': expected"),
  "policy": (lambda: (loss_fn, params_of(), batch_of(), "fp61"), {}, "unknown policy 'fp61'"),
  "accumulate": (
    lambda: (
      (step := mpjax.make_train_step(loss_fn, optax.sgd(1e-2), accumulate=3)),
      step.init(params_of()),
      batch_of(),
    ),
    {},
    "16 rows cannot be split into accumulate=3",
  ),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_arguments_are_named(wrong):
  make, options, message = WRONG[wrong]
  with pytest.raises(ValueError, match=message):
    mpjax.inspect_numerics(*make(), **options)


def test_a_step_is_inspected_under_another_policy_at_that_ones_loss_scale():
  step = mpjax.make_train_step(loss_fn, optax.sgd(1e-2), "fp16")
  state = step.init(params_of())
  report = mpjax.inspect_numerics(step, state, batch_of(), scaled_policy(4.0), advise=False)
  assert (report.loss_scale, report.policy) == (4.0, mpjax.get_policy(scaled_policy(4.0)))
  later = state.replace(opt_state=state.opt_state._replace(scale=jnp.float32(32.0)))
  assert step.adopt(later, step).opt_state.scale == 32.0
  assert mpjax.inspect_numerics(step, later, batch_of(), advise=False).loss_scale == 32.0


def test_an_adopted_state_keeps_what_fits():
  adam = optax.adam(1e-2)
  step = mpjax.make_train_step(loss_fn, adam, "bf16", donate=False)
  state, _ = step(step.init(params_of()), batch_of())
  narrow = step.with_policy("float16").adopt(state, step)
  assert {x.dtype.name for x in jax.tree.leaves(narrow.params)} == {"float16"}
  assert all(not np.any(m) for m in jax.tree.leaves(optax.tree.get(narrow.opt_state, "mu")))
  wide = step.with_policy("fp32").adopt(state, step)
  jax.tree.map(np.testing.assert_array_equal, wide.opt_state, state.opt_state)
  assert int(wide.step) == 1
  assert math.isfinite(float(step.with_policy("fp32")(wide, batch_of())[1]["loss"]))


def test_a_step_in_float32_with_another_loss_function_is_a_reference():
  doubled = mpjax.make_train_step(lambda p, b: 2 * loss_fn(p, b), optax.sgd(1e-2), "fp32")
  step = mpjax.make_train_step(loss_fn, optax.sgd(1e-2), "bf16")
  report = mpjax.inspect_numerics(step, step.init(params_of()), batch_of(), reference=doubled, advise=False)
  assert report.reference_loss == pytest.approx(2 * report.loss, rel=1e-2)
  assert all(0.45 < t.error < 0.55 for t in report.of("weight gradient"))


def test_the_sketch_is_not_needed_for_exact_counts():
  x = np.asarray([0.0, -0.0, 2.0**-70, 2.0**-64, 1.0, 2.0**40, np.inf, np.nan], np.float32)
  summary = Summary(full_summary(1.0).edges)
  m = Magnitudes.of(summary, np.asarray(summary(jnp.asarray(x))))
  below, counts = m.histogram
  assert (m.zero, below, counts[0], counts[-BINS[0]], counts[-1], m.inf, m.nan) == (2, 1, 1, 1, 1, 1, 1)


def test_a_batch_on_an_explicit_mesh_is_inspected():
  mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Explicit,))
  place = lambda tree, *axes: jax.device_put(tree, jax.NamedSharding(mesh, jax.P(*axes)))
  params = {"w": jnp.eye(8) * 0.5}
  batch = jnp.arange(32.0).reshape(4, 8) / 32
  loss_fn = lambda params, batch: jnp.mean((batch @ params["w"]) ** 2)
  expected = mpjax.inspect_numerics(loss_fn, params, batch, "fp16")
  with jax.set_mesh(mesh):
    found = mpjax.inspect_numerics(loss_fn, place(params), place(batch, "data"), "fp16")
  assert [t.magnitudes for t in found.tensors] == [t.magnitudes for t in expected.tensors]
