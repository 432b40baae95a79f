"""A fault in a known layer is found there, and the policy that is advised mends it."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import yaml

import mpjax
from tests.numerics._by_hand import at_scale
from tests.numerics._planted_models import chain

# A model that is float16 throughout is one of the cases.
pytestmark = pytest.mark.filterwarnings("ignore:policy 'float16' means float16 for everything")

RATE = 8e-4
TX = optax.sign_sgd(RATE)
FAULTS = {
  "overflow": {"big": 1e4},
  "underflow": {"small": 1e-7},
  "all": {"big": 1e4, "small": 1e-7, "still": 32.0},
  "none": {},
}
POLICIES = {
  "float16": "float16",
  "fp16": {"base": "fp16", "loss_scaling": {"kind": "dynamic", "init_scale": 2.0**12}},  # no step is skipped
  "bf16": "bf16",
}
OVERFLOW, UNDERFLOW = ("overflow", "big"), ("underflow", "small")
STILL, BIG = ("lost updates", "still/w"), ("lost updates", "big/w")  # weights of 1e4 hardly move either
WANTED = {
  ("overflow", "fp16"): {OVERFLOW},
  ("all", "float16"): {OVERFLOW, UNDERFLOW, STILL, BIG},
  ("all", "bf16"): set(),
}


def problems(report):
  return {(f.kind, f.module) for f in report.findings if f.severity == "problem"}


@functools.cache
def model(fault):
  return chain(**FAULTS[fault])


def left(report, loss_fn, params, batch, **options):
  """The problems under the advised policy."""
  policy = report.advice.policy
  return problems(mpjax.inspect_numerics(loss_fn, params, batch, policy=policy, advise=False, **options))


@pytest.mark.parametrize(("fault", "policy"), WANTED)
def test_a_fault_is_found_in_its_layer_and_the_advised_policy_leaves_no_problem(fault, policy):
  params, batch, loss_fn = model(fault)
  report = mpjax.inspect_numerics(loss_fn, params, batch, policy=POLICIES[policy], tx=TX)
  assert problems(report) == WANTED[fault, policy]
  assert all(f.module.split("/")[0] in f.text for f in report.findings if f.module)
  order = [(f.severity != "problem", f.order) for f in report.findings]
  assert order == sorted(order)
  advice, text = report.advice, str(report)
  assert len(text.splitlines()) <= 12
  everything = " ".join(report.table("all").split())
  advised = mpjax.get_policy(advice.policy)
  assert advice.unchanged == (not WANTED[fault, policy])
  if advice.unchanged:
    assert advised == mpjax.get_policy(POLICIES[policy])
    assert "good as it is" in text
    return
  assert "big" in dict(advised.overrides)
  assert all(f"{key}: {buys}" in everything for key, buys in advice.lines)
  [pasted] = re.findall(r"^(policy: \{.*\n(?:  .*\n)*)", text, re.MULTILINE)
  assert mpjax.get_policy(yaml.safe_load(pasted)["policy"]) == advised
  assert "the policy below should fix" in text.splitlines()[0]
  assert left(report, loss_fn, params, batch, tx=TX) == set()


RNG = np.random.default_rng(0)
X = RNG.standard_normal((16, 16)).astype(np.float32)
W = (0.2 * np.random.default_rng(2).standard_normal((16, 16))).astype(np.float32)


def test_layers_that_are_alike_share_a_pattern_and_modules_inside_others_and_loops_have_their_own():
  sizes = np.asarray([1.0, 2e5], np.float32)
  params = {"wide": [W * 1e5] * 2, "inner": W, "root": W * 1e5, "layers": W * sizes[:, None, None]}

  def loss_fn(params, batch):
    x, sizes = batch
    for i, w in enumerate(params["wide"]):
      with jax.named_scope(f"blocks_{i}"), jax.named_scope("wide"):
        x = x + jnp.tanh((x @ w) * 1e-5)
    with jax.named_scope("root"):
      with jax.named_scope("inner"):
        x = jnp.tanh(x @ params["inner"])
      x = jnp.tanh((x @ params["root"]) * 1e-5)

    def layer(x, of_layer):
      w, size = of_layer
      with jax.named_scope("layers"):
        return x + jnp.tanh((x @ w).astype(jnp.float32) / size).astype(x.dtype), None

    x, _ = jax.lax.scan(layer, x, (params["layers"], sizes))
    return jnp.mean((x.astype(jnp.float32) - 1) ** 2)

  report = mpjax.inspect_numerics(loss_fn, params, (X, sizes), policy="fp16")
  modules = {*(f"blocks_{i}/wide" for i in range(2)), "root", "layers[1]"}
  assert {module for kind, module in problems(report) if kind == "overflow"} == modules
  assert {module for _, module in problems(report)} == modules
  overrides = dict(report.advice.policy["overrides"])
  assert overrides == dict.fromkeys((r"blocks_\d+/wide", "root$", "layers"), "bf16")
  after = mpjax.inspect_numerics(loss_fn, params, (X, sizes), policy=report.advice.policy, advise=False)
  assert problems(after) == set()
  dtypes = {t.scope: t.dtype for t in after.of("activation") if t.name.startswith("dot_general")}
  assert (dtypes.pop("root/inner"), *dtypes.values()) == ("float16", *["bfloat16"] * 4)


def plain_loss(params, batch):
  with jax.named_scope("first"):
    x = jnp.tanh(batch @ params["first"]["w"])
  with jax.named_scope("second"):
    return jnp.mean((x @ params["second"]["w"]).astype(jnp.float32) ** 2)


@pytest.mark.parametrize("place", ["data", "parameter"])
def test_what_is_not_finite_in_float32_is_not_blamed_on_the_policy(place):
  params, batch = {"first": {"w": W}, "second": {"w": W.copy()}}, X.copy()
  (batch if place == "data" else params["second"]["w"])[0, 0] = np.nan
  report = mpjax.inspect_numerics(plain_loss, params, batch, policy="fp16")
  assert problems(report) == {("nonfinite", "first" if place == "data" else "second")}
  assert report.advice.unchanged
  assert "1 problem: no change of the policy helps" in str(report)
  assert "overflows" not in report.table("all")


def test_gradients_too_large_for_any_loss_scale_are_said_to_overflow():
  loss_fn = lambda params, batch: 1e9 * plain_loss(params, batch)
  params = {"first": {"w": W}, "second": {"w": W}}
  report = mpjax.inspect_numerics(loss_fn, params, X, policy="fp16")
  kinds = {kind for kind, _ in problems(report)}
  assert "gradient overflow" in kinds
  assert "underflow" not in kinds
  assert "too small" not in report.table("all")
  assert left(report, loss_fn, params, X) == set()
  assert {spec for _, spec in report.advice.policy["overrides"]} <= {"bf16", "fp32"}


def bias_before_a_norm(size, scale=1.0):
  """A loss of some scale of inputs of some size, with a bias that has no gradient; parameters and a batch."""

  def loss_fn(params, batch):
    with jax.named_scope("layer"):
      h = batch @ params["layer"]["w"] + params["layer"]["b"]
    return scale * jnp.mean(jnp.tanh(h - jnp.mean(h, axis=0)) ** 2)

  rng = np.random.default_rng(0)
  w, x = (rng.standard_normal(shape).astype(np.float32) for shape in ((16, 32), (64, 16)))
  return loss_fn, {"layer": {"w": w / np.float32(size), "b": np.ones(32, np.float32)}}, x * np.float32(size)


@pytest.mark.parametrize("size", [1.0, 1e-3])  # at 1e-3 all gradients of weights are small
def test_the_error_of_a_gradient_of_zero_is_said_to_say_nothing(size):
  report = mpjax.inspect_numerics(*bias_before_a_norm(size), policy="bf16", advise=False)
  errors = {t.path: t.error for t in report.of("weight gradient")}
  assert errors["layer/b"] > 0.1 > errors["layer/w"]
  [note] = [finding for finding in report.findings if finding.kind == "weight gradient"]
  assert note.severity == "note"
  assert note.text.startswith("layer/b: its gradient is 0 but for rounding")
  assert "of the norm of the values that it sums" in note.text
  assert "policy bf16: the policy is good as it is; on the errors of layer/b see the note" in str(report)


@pytest.mark.parametrize(
  "options", [{}, {"autocast": False}, {"grad_dtype": "float16"}], ids=["autocast", "cast", "half gradients"]
)
def test_an_overflow_is_said_where_a_step_at_that_scale_is_skipped(options):
  """The gradients of the weights are far larger than those of the activations."""
  rng = np.random.default_rng(0)
  x, y = (rng.standard_normal((256, width)).astype(np.float32) + 1 for width in (32, 1))
  params = {"in": np.full((32, 64), 0.05, np.float32), "out": np.full((64, 1), 0.05, np.float32)}

  def loss_fn(params, batch):
    return jnp.mean((jnp.tanh(batch[0] @ params["in"]) @ params["out"] - batch[1]) ** 2)

  step = mpjax.make_train_step(loss_fn, optax.sgd(1e-5), {"base": "fp16", **options}, donate=False)
  start = step.init(params)
  for exponent in (12, 16) if options else (16, 23):
    state = at_scale(start, 2.0**exponent)
    report = mpjax.inspect_numerics(step, state, (x, y), advise=False)
    skipped = not step(state, (x, y))[1]["grads_finite"]
    assert skipped == (exponent == (16 if options else 23)), exponent
    found = [f for f in report.findings if f.kind == "gradient overflow"]
    assert bool(found) == skipped, exponent
    assert all("the scale will fall" in f.text for f in found)
    assert not problems(report)  # an error of what is infinite is explained by that
  static = {"kind": "static", "init_scale": 2.0**exponent}
  report = mpjax.inspect_numerics(
    loss_fn, params, (x, y), policy={"base": "fp16", "loss_scaling": static, **options}, advise=False
  )
  [text] = [f.text for f in report.findings if (f.kind, f.severity) == ("gradient overflow", "problem")]
  assert "will fall" not in text


def test_a_gradient_error_under_a_loss_scale_names_the_check_of_backward_rules():
  @jax.custom_vjp
  def clip(x):
    return x

  clip.defvjp(lambda x: (x, None), lambda _, g: (jnp.clip(g, -1e-3, 1e-3),))
  loss_fn = lambda params, batch: jnp.mean((clip(jnp.tanh(batch @ params)) @ params).astype(jnp.float32) ** 2)
  report = mpjax.inspect_numerics(loss_fn, W, X, policy="fp16")
  [text] = [f.text for f in report.findings if (f.kind, f.severity) == ("gradient error", "problem")]
  assert "mpjax.loss_scale.check_loss_scaling(step, state, batch) says whether a backward rule" in text


@pytest.mark.parametrize(
  ("fault", "autocast", "keeps"),
  [("none", True, (0.9,)), ("underflow", True, (0.5, 0.9, 0.999)), ("underflow", False, (0.9,))],
)
def test_good_loss_scales_keep_the_share_of_all_gradients_and_overflow_none(fault, autocast, keeps):
  params, batch, loss_fn = model(fault)
  policy = {"base": "bf16", "autocast": autocast}
  for keep in keeps:
    report = mpjax.inspect_numerics(loss_fn, params, batch, policy=policy, advise=False, keep=keep)
    gradients = [t.magnitudes for t in report.of("activation gradient")]
    # Autocast has the gradients of float32 weights in float32 from the product on.
    products = [t.magnitudes for t in report.of("weight gradient") if not autocast]
    good = []
    for exponent in range(25):
      kept = sum(m.kept("float16", 2.0**exponent) * (m.count - m.zero) for m in gradients)
      over = max(m.shares("float16", 2.0 ** (exponent + 1)).overflow for m in gradients + products)
      if not over:
        good.append((exponent, kept >= keep * sum(m.count - m.zero for m in gradients)))
    low = next((f"2^{exponent}" for exponent, enough in good if enough), None)
    assert low is not None or keep == 0.999
    [text] = [f.text for f in report.findings if f.kind == "range"]
    said = re.search(r"(?:from (\S+) to|overflow,) (2\^\d+)", text).groups()
    assert said == (low, f"2^{good[-1][0]}"), keep


@pytest.mark.parametrize("alone", [False, True])
def test_an_error_of_a_sum_that_cancels_is_named_and_is_a_problem_if_it_is_the_gradients(alone):
  """Rows in pairs, but for a part of 1e-3: what they give the bias nearly cancels."""
  rng = np.random.default_rng(4)
  half, target = rng.standard_normal((2, 32, 16)).astype(np.float32)
  batch = {"x": np.concatenate([half, -half]), "y": np.concatenate([target, -target + np.float32(2e-3)])}
  w = np.asarray(0.2 * rng.standard_normal((16, 16)), np.float32)
  params = {"b": np.zeros(16, np.float32)} | ({} if alone else {"w": w})

  def loss_fn(params, batch):
    h = batch["x"] @ jnp.asarray(params.get("w", w), batch["x"].dtype) + params["b"]
    return jnp.mean((jnp.tanh(h) - batch["y"]) ** 2)

  report = mpjax.inspect_numerics(loss_fn, params, batch, policy="bf16_pure", advise=False)
  [finding] = [f for f in report.findings if f.kind == "gradient error"]
  assert finding.severity == ("problem" if alone else "note")
  assert finding.text.startswith("b: the error of its gradient")
  assert "check_loss_scaling" not in finding.text  # there is no scale
  assert ("good as it is" in str(report)) != alone


def test_an_override_is_for_the_module_that_is_meant_and_for_no_other_of_its_name():
  def loss_fn(params, x):
    with jax.named_scope("lin"):
      h = x @ params["first"]  # leaves float16's range
    with jax.named_scope("block"), jax.named_scope("lin"):
      return jnp.mean((h * 1e-6) @ params["second"])

  params = {"first": np.full((16, 16), 1e4, np.float32), "second": np.ones((16, 16), np.float32)}
  report = mpjax.inspect_numerics(loss_fn, params, np.ones((4, 16), np.float32), policy="fp16")
  [(pattern, _)] = report.advice.policy["overrides"]
  assert pattern.rstrip("$") == "^lin"
