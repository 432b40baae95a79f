"""A fault in a known layer is found there, and the advice mends it: measured again, and by training."""

import functools
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import mpjax
from mpjax.numerics.advice._findings import scale_limits
from mpjax.policy import Override
from tests.numerics._planted_models import chain, planted

# A model that is float16 throughout is one of the cases.
pytestmark = pytest.mark.filterwarnings("ignore:policy 'float16' means float16 for everything")

RATE = 8e-4
FAULTS = {
  "overflow": {"big": 1e4},
  "underflow": {"small": 1e-7},
  "lost updates": {"still": 32.0},
  "all": {"big": 1e4, "small": 1e-7, "still": 32.0},
  "none": {},
}
POLICIES = {
  "float16": "float16",
  "fp16": {"base": "fp16", "loss_scaling": {"kind": "dynamic", "init_scale": 2.0**12}},  # no step is skipped
  "no scale": {"base": "fp16", "loss_scaling": None},
  "static": {"base": "fp16", "loss_scaling": {"kind": "static", "init_scale": 1.0}},
  "bf16_pure": "bf16_pure",
  "bf16": "bf16",
}
OVERFLOW, UNDERFLOW = ("overflow", "big"), ("underflow", "small")
STILL, BIG = ("lost updates", "still/w"), ("lost updates", "big/w")  # weights of 1e4 hardly move either
WANTED = {
  ("overflow", "fp16"): {OVERFLOW},
  ("underflow", "float16"): {UNDERFLOW},
  ("underflow", "static"): {UNDERFLOW},
  ("lost updates", "bf16_pure"): {STILL},
  ("all", "float16"): {OVERFLOW, UNDERFLOW, STILL, BIG},
  ("all", "static"): {OVERFLOW, UNDERFLOW},
}
CASES = [pytest.param(*case, id=" under ".join(case)) for case in WANTED]


def problems(report):
  return {(f.kind, f.module) for f in report.findings if f.severity == "problem"}


@functools.cache
def model(fault):
  return chain(**FAULTS[fault])


SAID = {}  # the lines of progress by fault and policy


@functools.cache
def inspected(fault, policy):
  params, batch, loss_fn = model(fault)
  tx = optax.sign_sgd(RATE)
  say = SAID.setdefault((fault, policy), []).append
  return mpjax.inspect_numerics(loss_fn, params, batch, POLICIES[policy], tx=tx, progress=say)


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "policy"), CASES)
def test_a_fault_is_found_in_its_layer_and_nowhere_else(fault, policy):
  report = inspected(fault, policy)
  assert problems(report) == WANTED[fault, policy]
  assert all(f.module.split("/")[0] in f.text for f in report.findings if f.module)


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "policy"), CASES)
def test_the_advice_is_a_policy_under_which_no_problem_is_left(fault, policy):
  advice = inspected(fault, policy).advice
  assert not advice.unchanged
  assert advice.left == ()
  assert advice.measured
  assert all(m.after < 0.1 for m in advice.measured)
  assert any(m.after < m.before for m in advice.measured)
  advised = mpjax.get_policy(advice.policy)
  if fault in ("overflow", "underflow") or policy == "static":
    assert {pattern for pattern, _ in advised.overrides} <= {"big", "small"}
  assert (fault in ("overflow", "all")) == ("big" in dict(advised.overrides))
  params, batch, loss_fn = model(fault)
  if fault == "all":
    again = mpjax.inspect_numerics(
      loss_fn, params, batch, advice.policy, tx=optax.sign_sgd(RATE), advise=False
    )
    assert problems(again) == set()


@functools.cache
def trained(fault, policy):
  """The loss after some steps, and how far each layer's weights have moved."""
  params, batch, loss_fn = model(fault)
  known = {**POLICIES, "fp32": "fp32"}
  spec = (
    known[policy] if policy in known else inspected(fault, policy.removesuffix(", advised")).advice.policy
  )
  step = mpjax.make_train_step(loss_fn, optax.sign_sgd(RATE), spec)
  state = step.init(params)
  first = jax.tree.map(lambda p: np.asarray(p, np.float64), state.params)
  for _ in range(20):
    state, _ = step(state, batch)
  last = jax.tree.map(lambda p: np.asarray(p, np.float64), state.params)
  loss = float(jax.jit(loss_fn)(jax.tree.map(lambda p: p.astype(jnp.float32), state.params), batch))
  return loss, {name: np.abs(last[name]["w"] - first[name]["w"]).mean() for name in last}


@pytest.mark.slow
@pytest.mark.parametrize(
  ("fault", "policy", "layer"),
  [
    ("underflow", "float16", "small"),
    ("underflow", "static", "small"),
    ("lost updates", "bf16_pure", "still"),
    ("all", "float16", "still"),
  ],
)
def test_weights_that_stood_still_move_with_the_advice_as_in_float32(fault, policy, layer):
  before, after, exact = (trained(fault, name)[1][layer] for name in (policy, f"{policy}, advised", "fp32"))
  assert before < 0.5 * exact
  assert after == pytest.approx(exact, rel=0.1)


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "policy"), [("overflow", "fp16"), ("all", "float16")])
def test_the_loss_with_the_advice_is_nearer_that_of_float32(fault, policy):
  before, after, exact = (trained(fault, name)[0] for name in (policy, f"{policy}, advised", "fp32"))
  assert abs(after - exact) < 0.5 * abs(before - exact)
  assert after == pytest.approx(exact, rel=2e-2)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["fp16", "float16"])
def test_a_healthy_policy_stays_as_it_is(policy):
  report = inspected("none", policy)
  assert problems(report) == set()
  assert report.advice.unchanged
  assert mpjax.get_policy(report.advice.policy) == mpjax.get_policy(POLICIES[policy])
  assert "good as it is" in str(report)


def test_a_fault_that_the_policy_does_not_have_is_none():
  assert problems(inspected("all", "bf16")) == set()


@pytest.mark.slow
def test_faults_of_a_flax_model_are_found_in_their_modules():
  params, batch, loss_fn = planted(big=1e4, small=1.0, still=0.2)
  report = mpjax.inspect_numerics(loss_fn, params, batch, "fp16")
  assert problems(report) == {("overflow", "Planted/big")}
  assert dict(report.advice.policy["overrides"]) == {"Planted/big": "bf16"}
  assert report.advice.left == ()


@pytest.mark.slow
def test_without_trials_the_advice_is_what_the_first_run_suggests():
  params, batch, loss_fn = model("overflow")
  lines = []
  report = mpjax.inspect_numerics(loss_fn, params, batch, "fp16", advise=False, progress=lines.append)
  assert lines
  assert not [line for line in lines if line.startswith("trying")]
  assert report.advice.policy["overrides"] == [["big", "bf16"]]
  assert report.advice.measured == ()
  inspected("overflow", "fp16")
  assert [line for line in SAID["overflow", "fp16"] if line.startswith("trying")]


X = np.random.default_rng(0).standard_normal((16, 16)).astype(np.float32)
LARGE = nn.initializers.normal(3e4)


def report_of(module, policy="fp16", **options):
  params = module.init(jax.random.key(0), X)["params"]
  loss_fn = lambda params, batch: jnp.mean(
    (module.apply({"params": params}, batch).astype(jnp.float32) - 1) ** 2
  )
  return mpjax.inspect_numerics(loss_fn, params, X, policy, **options)


class Block(nn.Module):
  @nn.compact
  def __call__(self, x):
    return x + jnp.tanh(nn.Dense(16, name="wide", kernel_init=LARGE)(x) * 1e-5)


class Blocks(nn.Module):
  @nn.compact
  def __call__(self, x):
    for i in range(3):
      x = Block(name=f"blocks_{i}")(x)
    return nn.Dense(4, name="head")(x)


@pytest.mark.slow
def test_layers_that_are_alike_share_a_pattern():
  report = report_of(Blocks(), advise=False)
  assert problems(report) == {("overflow", f"Blocks/blocks_{i}/wide") for i in range(3)}
  assert report.advice.policy["overrides"] == [[r"Blocks/blocks_\d+/wide", "bf16"]]


class Root(nn.Module):
  @nn.compact
  def __call__(self, x):
    x = jnp.tanh(nn.Dense(16, name="inner")(x))
    w = self.param("w", LARGE, (16, 16))
    x = jnp.tanh((x @ w) * 1e-5)
    return nn.Dense(16, name="out")(x)


@pytest.mark.slow
def test_a_pattern_for_a_module_leaves_those_inside_it_alone():
  report = report_of(Root())
  assert problems(report) == {("overflow", "Root")}
  assert report.advice.left == ()
  ((pattern, policy),) = report.advice.policy["overrides"]
  assert (pattern, policy) == ("Root$", "bf16")
  after = report_of(Root(), report.advice.policy, advise=False)
  dtypes = {t.module: t.dtype for t in after.of("activation") if t.name == "dot_general"}
  assert dtypes == {"Root/inner": "float16", "Root": "bfloat16", "Root/out": "float16"}


@pytest.mark.slow
def test_a_step_of_a_loop_is_named_and_the_pattern_is_that_of_the_loop():
  w = 0.2 * np.random.default_rng(1).standard_normal((3, 16, 16)).astype(np.float32)
  size = np.asarray([1.0, 2e5, 1.0], np.float32)

  def loss_fn(params, batch):
    def layer(x, of_layer):
      w, size = of_layer
      with jax.named_scope("layers"):
        return x + jnp.tanh((x @ w).astype(jnp.float32) / size).astype(x.dtype), None

    out, _ = jax.lax.scan(layer, batch["x"], (params["w"], batch["size"]))
    return jnp.mean((out.astype(jnp.float32) - 1) ** 2)

  params = {"w": jnp.asarray(w * size[:, None, None])}
  report = mpjax.inspect_numerics(loss_fn, params, {"x": X, "size": size}, "fp16")
  assert ("overflow", "layers[1]") in problems(report)
  assert {module for _, module in problems(report)} == {"layers[1]"}
  assert report.advice.policy["overrides"] == [["layers", "bf16"]]
  assert report.advice.left == ()


def plain_loss(params, batch):
  with jax.named_scope("first"):
    x = jnp.tanh(batch @ params["first"]["w"])
  with jax.named_scope("second"):
    return jnp.mean((x @ params["second"]["w"]).astype(jnp.float32) ** 2)


@pytest.mark.parametrize("place", ["data", "parameter"])
def test_what_is_not_finite_in_float32_is_not_blamed_on_the_policy(place):
  w = 0.2 * np.random.default_rng(2).standard_normal((16, 16)).astype(np.float32)
  params, batch = {"first": {"w": w}, "second": {"w": w.copy()}}, X.copy()
  (batch if place == "data" else params["second"]["w"])[0, 0] = np.nan
  report = mpjax.inspect_numerics(plain_loss, params, batch, "fp16", tx=optax.sgd(1e-2))
  assert problems(report) == {("nonfinite", "first" if place == "data" else "second")}
  assert report.advice.unchanged
  assert "good as it is" not in str(report)
  assert "overflows" not in str(report)


@pytest.mark.slow
@pytest.mark.parametrize("scale", [2.0])
def test_a_loss_scale_of_the_optimisers_own_is_left_to_it(scale):
  params, batch, loss_fn = model("underflow")
  tx = mpjax.static_loss_scale(optax.sgd(1e-2), scale)
  report = mpjax.inspect_numerics(loss_fn, params, batch, POLICIES["no scale"], tx=tx)
  assert report.loss_scale == scale
  assert problems(report) == {UNDERFLOW}
  advised = mpjax.get_policy(report.advice.policy)
  assert advised.loss_scaling is None
  assert advised.overrides == (("small", Override("bfloat16")),)
  assert report.advice.left == ()


def test_gradients_too_large_for_any_loss_scale_are_said_to_overflow():
  def loss_fn(params, batch):
    return 1e9 * plain_loss(params, batch)

  w = 0.2 * np.random.default_rng(2).standard_normal((16, 16)).astype(np.float32)
  report = mpjax.inspect_numerics(loss_fn, {"first": {"w": w}, "second": {"w": w}}, X, "fp16")
  kinds = {kind for kind, _ in problems(report)}
  assert "gradient overflow" in kinds
  assert "underflow" not in kinds
  assert "too small" not in str(report)
  assert report.advice.left == ()
  assert {spec for _, spec in report.advice.policy["overrides"]} <= {"bf16", "fp32"}


@pytest.mark.slow
def test_what_fp8_is_too_narrow_for_goes_back_to_bfloat16():
  """Current scaling divides by the largest value: beside one of 1e7, E4M3 has nothing left for the others."""
  rng = np.random.default_rng(3)
  w = lambda: jnp.asarray(0.2 * rng.standard_normal((16, 16)), jnp.float32)
  params = {"first": {"w": w()}, "spiky": {"w": w().at[0].multiply(1e-7)}, "last": {"w": w()}}

  def loss_fn(params, batch):
    with jax.named_scope("first"):
      x = jnp.tanh(batch["x"] @ params["first"]["w"])
    with jax.named_scope("spiky"):
      x = jnp.tanh((x * batch["size"]) @ params["spiky"]["w"])
    with jax.named_scope("last"):
      return jnp.mean(((x @ params["last"]["w"]).astype(jnp.float32) - 1) ** 2)

  batch = {"x": jnp.asarray(X), "size": jnp.ones(16).at[0].set(1e7)}
  fp8 = {"emulate": True, "min_dim": 1, "first_layer": True, "last_layer": True}
  report = mpjax.inspect_numerics(loss_fn, params, batch, {"base": "fp8", "fp8": fp8}, pieces=1)
  assert ("error", "spiky") in problems(report)
  advised = mpjax.get_policy(report.advice.policy)
  assert "spiky" in dict(advised.overrides)
  assert advised.fp8.emulate
  assert not [f for f in report.advice.left if f.kind == "error"]


@pytest.mark.parametrize("fault", ["overflow", "underflow"])
def test_the_lines_of_the_advice_are_what_differs(fault):
  report = inspected(fault, "fp16" if fault == "overflow" else "float16")
  advice = report.advice
  text = str(report)
  for key, buys in advice.lines:
    assert f"  {key}: {buys}" in text
  assert re.search(r"^policy:$", text, re.MULTILINE)
  mpjax.get_policy(advice.policy)


def inspect_bias_before_a_norm(size, policy="bf16", scale=1.0):
  """Inputs of some size, a bias that has no gradient, and a loss of some scale."""

  def loss_fn(params, batch):
    with jax.named_scope("layer"):
      h = batch @ params["layer"]["w"] + params["layer"]["b"]
    h = h - jnp.mean(h, axis=0)  # a bias before it has no gradient
    return scale * jnp.mean(jnp.tanh(h) ** 2)

  keys = jax.random.split(jax.random.key(0))
  params = {"layer": {"w": jax.random.normal(keys[0], (16, 32)) / size, "b": jnp.ones(32)}}
  batch = size * jax.random.normal(keys[1], (64, 16))
  return mpjax.inspect_numerics(loss_fn, params, batch, policy, advise=False)


@pytest.mark.parametrize("size", [1.0, 1e-3])  # at 1e-3 all gradients of weights are small
def test_the_error_of_a_gradient_of_zero_is_said_to_say_nothing(size):
  report = inspect_bias_before_a_norm(size)
  errors = {t.path: t.error for t in report.of("weight gradient")}
  assert errors["layer/b"] > 0.1 > errors["layer/w"]
  [note] = [finding for finding in report.findings if finding.kind == "weight gradient"]
  assert note.severity == "note"
  assert note.text.startswith("layer/b: its gradient is 0 but for rounding")
  assert "of the norm of what it is a sum of" in note.text
  assert "advice: the policy is good as it is; on the errors of layer/b see the note" in str(report)


@pytest.mark.parametrize("exponent", [0, 8, *range(16, 23)])
def test_a_loss_scale_that_overflows_nothing_is_among_those_that_are_good(exponent):
  policy = {"base": "fp16", "loss_scaling": {"kind": "static", "init_scale": 2.0**exponent}}
  report = inspect_bias_before_a_norm(1.0, policy)
  [text] = [f.text for f in report.findings if f.kind == "range"]
  low, high = (int(e) for e in re.search(r"loss scales from 2\^(\d+) to 2\^(\d+) keep", text).groups())
  overflows = any(f.kind == "gradient overflow" for f in report.findings)
  assert overflows == (exponent > high)
  if not overflows and exponent < low:
    assert f"what the run's 2^{exponent} loses is a small part" in text
  else:
    assert overflows or low <= exponent <= high


@pytest.mark.parametrize("kind", ["autocast", "cast", "half gradients"])
@pytest.mark.parametrize("exponent", [12, 16, 23])
def test_an_overflow_is_said_where_a_step_at_that_scale_is_skipped(kind, exponent):
  """The gradients of the weights are far larger than those of the activations."""
  kinds = {"autocast": {}, "cast": {"autocast": False}, "half gradients": {"grad_dtype": "float16"}}
  policy = {"base": "fp16", "loss_scaling": {"init_scale": 2.0**exponent}} | kinds[kind]
  x = jax.random.normal(jax.random.key(0), (256, 32)) + 1
  y = jax.random.normal(jax.random.key(1), (256, 1))

  def loss_fn(params, batch):
    return jnp.mean((jnp.tanh(batch[0] @ params["in"]) @ params["out"] - batch[1]) ** 2)

  params = {"in": jnp.full((32, 64), 0.05), "out": jnp.full((64, 1), 0.05)}
  step = mpjax.make_train_step(loss_fn, optax.sgd(1e-5), policy, donate=False)
  state = step.init(params)
  report = mpjax.inspect_numerics(step, state, (x, y), advise=False, pieces=1)
  skipped = not step(state, (x, y))[1]["grads_finite"]
  assert skipped == (exponent == 23 or (kind != "autocast" and exponent > 12))
  found = [f for f in report.findings if f.kind == "gradient overflow"]
  assert bool(found) == skipped
  assert all("the scale will fall" in f.text for f in found)


@pytest.mark.parametrize("fault", ["none", "underflow"])
@pytest.mark.parametrize(("keep", "autocast"), [(0.5, True), (0.9, True), (0.999, True), (0.9, False)])
def test_good_loss_scales_keep_the_share_of_all_gradients_and_overflow_none(fault, keep, autocast):
  params, batch, loss_fn = model(fault)
  policy = {"base": "bf16", "autocast": autocast}
  report = mpjax.inspect_numerics(loss_fn, params, batch, policy, advise=False, keep=keep)
  gradients = [t.magnitudes for t in report.of("activation gradient")]
  # Autocast has the gradients of float32 weights in float32 from the product on.
  products = [t.magnitudes for t in report.of("weight gradient") if len(t.shape) > 1 and not autocast]
  good = []
  for exponent in range(25):
    kept = sum(m.kept("float16", 2.0**exponent) * (m.count - m.zero) for m in gradients)
    over = max(m.shares("float16", 2.0 ** (exponent + 1)).overflow for m in gradients + products)
    if not over:
      good.append((2.0**exponent, kept >= keep * sum(m.count - m.zero for m in gradients)))
  low = next((scale for scale, enough in good if enough), None)
  assert low is not None or keep == 0.999
  assert scale_limits(report) == (low, good[-1][0])


@pytest.mark.parametrize("alone", [False, True])
def test_an_error_of_a_sum_that_cancels_is_named_and_is_a_problem_if_it_is_the_gradients(alone):
  """Rows in pairs, but for a part of 1e-3: what they give the bias nearly cancels."""
  rng = np.random.default_rng(4)
  half, target = rng.standard_normal((2, 32, 16)).astype(np.float32)
  batch = {"x": np.concatenate([half, -half]), "y": np.concatenate([target, -target + 2e-3])}
  w = np.asarray(0.2 * rng.standard_normal((16, 16)), np.float32)
  params = {"b": jnp.zeros(16)} | ({} if alone else {"w": w})

  def loss_fn(params, batch):
    h = batch["x"] @ jnp.asarray(params.get("w", w), batch["x"].dtype) + params["b"]
    return jnp.mean((jnp.tanh(h) - batch["y"]) ** 2)

  report = mpjax.inspect_numerics(loss_fn, params, batch, "bf16_pure", advise=False)
  [finding] = [f for f in report.findings if f.kind == "gradient error"]
  assert finding.severity == ("problem" if alone else "note")
  assert finding.text.startswith("b: the error of its gradient")
  assert ("good as it is" in str(report)) != alone


@pytest.mark.slow
def test_advice_that_needs_float32_weights_drops_what_half_precision_ones_had_besides():
  params, batch, loss_fn = model("overflow")
  policy = {"base": "float16", "master_weights": "stochastic"}
  report = mpjax.inspect_numerics(loss_fn, params, batch, policy, tx=optax.sign_sgd(RATE))
  advised = mpjax.get_policy(report.advice.policy)
  assert (advised.autocast, advised.param_dtype, advised.master_weights) == (True, "float32", None)
  assert report.advice.left == ()
