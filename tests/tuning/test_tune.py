"""`mpjax.tune`: the best set of known models, tolerances, and what it cannot do."""

import contextlib
import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import yaml
from flax import nnx
from jax.sharding import AbstractMesh, AxisType

import mpjax
from mpjax.tuning import _tune
from tests.planner._plans import a_time
from tests.tuning._planted_models import FEW, LAYERS, planted

TOLERANCE = 0.25
PARAMS, BATCHES, LOSS = planted()
HALVES = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}


def level_of(policy, layer):
  """The level of precision that a policy has for a layer of the planted model."""
  for pattern, override in policy.overrides:
    if pattern == layer:
      return HALVES[override.compute_dtype.name]
  plain = policy.fp8 is None or layer in ("first", "narrow")
  plain = plain or (layer == "last" and not policy.fp8.last_layer)
  return HALVES[policy.compute_dtype.name] if plain else "fp8"


def tuned(*faults, layers=FEW, **options):
  params, batches, loss_fn = planted(*faults, layers=layers)
  return mpjax.tune(loss_fn, params, batches, **{"target": "h200", "tolerance": TOLERANCE} | options)


@functools.cache
def of_presets():
  return tuned(candidates=["bf16", "fp16", "fp32"])


FAULTS = ("over", "near", "outlier")
FIVE = ("first", *FAULTS, "last")


@pytest.fixture(autouse=True)
def products_take_the_time(monkeypatch):
  """Launches decide the time of models this small: here products and bytes do, as in large ones."""

  def plan(*args, **options):
    found = mpjax.plan(*args, **options)
    seconds = found.floor and sum(found.floor.parts.values())
    return dataclasses.replace(found, time=seconds and a_time(seconds))

  monkeypatch.setattr(_tune, "plan", plan)


@functools.cache
def of_faults(layers):
  return tuned(*FAULTS, layers=layers)


@pytest.mark.parametrize("layers", [FIVE, pytest.param(LAYERS, marks=pytest.mark.slow)])
def test_the_best_set_of_a_planted_model_is_found(layers):
  result = of_faults(layers)
  safer = {"first": "bf16", "narrow": "bf16", "near": "fp16", "outlier": "bf16"}
  found = {layer: level_of(result.policy, layer) for layer in layers}
  assert found == {layer: safer.get(layer, "fp8") for layer in layers}, str(result)
  assert result.chosen.error.total <= TOLERANCE
  assert mpjax.get_policy(yaml.safe_load(result.yaml)["policy"]) == result.policy
  trials = {trial.label: trial for trial in result.table}
  assert [label for label in ("fp16", "bf16", "fp8", "fp32") if trials[label].passes] == ["fp32"]
  assert trials["fp32"].error.total == 0


def test_the_recipe_of_the_target_is_measured_and_one_that_is_too_coarse_is_tried_by_channel():
  found = {
    target: tuned(layers=("first", "one", "two", "last"), target=target, tolerance=0.06)
    for target in ("h200", "b200", "v5e")
  }
  recipes = {target: result.policy.fp8.recipe for target, result in found.items()}
  assert recipes == {"h200": "per_channel", "b200": "auto", "v5e": "auto"}
  errors = {t: next(x.error.total for x in r.table if x.label == "fp8") for t, r in found.items()}
  assert max(errors["b200"], errors["v5e"]) < 0.06 < errors["h200"]


def test_fp8_that_its_compiler_has_as_slower_than_bfloat16_is_not_chosen():
  for target, chosen in (("v6e", "bf16"), ("tpu7x", "fp8")):
    result = tuned(layers=("first", "one", "two", "last"), target=target, tolerance=0.5)
    assert result.chosen.label.startswith(chosen), str(result)
  step = mpjax.make_train_step(LOSS, optax.sgd(0.1), "fp8")
  answer = str(mpjax.plan(step, step.init(PARAMS), BATCHES[0], target="v6e", compile=False))
  assert "takes 1.13 times as long as bfloat16" in answer


def test_the_answer_has_the_policy_its_cost_its_error_and_what_was_dropped():
  result = of_faults(FIVE)
  lines = str(result).splitlines()
  assert len(lines) <= 12
  assert max(map(len, lines)) <= 116
  assert lines[0].startswith(f"tune for h200: {result.chosen.label[:60]}")
  text = str(result)
  for words in (
    "tolerance 25%",
    f"{len(result.trials)} policies tried",
    "cheaper ones dropped, ",
    "gradient too far off: fp8",
    "\npolicy: {",
  ):
    assert words in text, words
  pasted = "\n".join(lines[next(i for i, line in enumerate(lines) if line.startswith("policy: ")) : -1])
  assert mpjax.get_policy(yaml.safe_load(pasted)["policy"]) == result.policy
  assert [line.split()[0] for line in lines if line.endswith("0%")] == ["fp32"]
  table = result.table("policies").splitlines()
  assert max(map(len, table)) <= 116
  assert all(heading in table[1] for heading in ("cost:", "error", "why dropped"))


def test_what_is_found_has_the_error_that_its_gradients_have():
  exact = jax.jit(jax.grad(LOSS))
  for label, trial in zip(("bf16", "fp16"), of_presets().table, strict=False):
    scaled = lambda p, batch, label=label: 2.0**16 * mpjax.autocast(LOSS, label)(p, batch)
    rounded, apart, whole = jax.jit(jax.grad(scaled)), 0.0, 0.0
    for batch in BATCHES:
      for a, b in zip(*map(jax.tree.leaves, (exact(PARAMS, batch), rounded(PARAMS, batch))), strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64) / 2.0**16
        apart, whole = apart + np.sum((a - b) ** 2), whole + np.sum(a**2)
    assert trial.label == label
    assert trial.error.gradient == pytest.approx((apart / whole) ** 0.5, rel=0.15)


def test_the_noise_is_that_of_batches():
  # Rows whose gradients are independent: the mean of n of them is off by sigma / sqrt(n).
  rng = np.random.default_rng(0)
  rows, weights = 64, np.ones(2048, np.float32)
  batches = [1 + rng.standard_normal((rows, 2048), np.float32) for _ in range(4)]
  mean, total = lambda w, x: jnp.mean(x @ w), lambda w, x: jnp.sum(x @ w)
  for fun in (mean, total):
    result = mpjax.tune(fun, weights, batches, candidates=["fp32"], target="h200")
    assert result.noise.total == pytest.approx(1 / rows**0.5, rel=0.05)
    assert result.tolerance == pytest.approx(0.1 * result.noise.total)
  single = [x[:1] for x in batches]
  result = mpjax.tune(mean, weights, single, candidates=["fp32"], tolerance="0.3 noise")
  assert result.noise.total == pytest.approx(0.7, rel=0.1)  # of a mean of 1 and a noise of 1
  assert result.tolerance == pytest.approx(0.3 * result.noise.total)
  once, twice = (mpjax.tune(mean, weights, batches[:1] * n, candidates=["fp32"]).noise for n in (1, 2))
  assert once == twice


def test_the_cheapest_that_passes_is_chosen_and_the_plain_preset_if_nothing_is_cheaper():
  result = of_presets()
  assert result.chosen.label == "bf16"
  assert result.policy == mpjax.get_policy("bf16")
  assert result.yaml == "policy: bf16\n"
  why = {"bf16": "chosen", "fp16": "no cheaper", "fp32": "dearer"}
  assert {t.label: t.why for t in result.table} == why
  assert "plain preset" in str(result)


def test_a_result_is_data():
  result = of_presets()
  data = json.loads(json.dumps(result.to_dict(), allow_nan=False))
  assert data["chosen"] == "bf16"
  assert [row["label"] for row in data["table"]] == ["bf16", "fp16", "fp32"]
  assert mpjax.get_policy(data["policy"]) == result.policy
  assert f"{1e9 * result.chosen.cost.seconds:.2f} ns" in result.table("policies")


def of_one_layer(factor=1.0):
  return lambda w, batch: factor * jnp.mean((batch["x"] @ w - batch["y"]) ** 2)


def test_memory_is_saved_by_state_in_few_bytes():
  rng = np.random.default_rng(0)
  batch = {name: rng.standard_normal((16, 1024), np.float32) for name in ("x", "y")}
  weights = rng.standard_normal((1024, 1024), np.float32) / 32
  tx = optax.adamw(1e-3, b2=0.95)
  result = mpjax.tune(
    of_one_layer(), weights, batch, target="h200", tolerance=0.25, objective="memory", tx=tx
  )
  presets = [t for t in result.table if t.kind == "preset"]
  assert result.chosen.cost.peak < 0.9 * min(t.cost.peak for t in presets)
  assert result.policy.optimizer_dtype is not None
  assert 0 < result.chosen.error.update <= TOLERANCE
  worst = max((t.error for t in result.table if t.error), key=lambda error: error.update)
  assert worst.total == worst.update > worst.gradient


class Flax(nnx.Module):
  def __init__(self):
    self.hidden = nnx.Linear(8, 16, rngs=nnx.Rngs(0))
    self.norm = nnx.BatchNorm(16, rngs=nnx.Rngs(0))

  def __call__(self, x):
    return self.norm(jnp.tanh(self.hidden(x)))


def of_tokens(params, batch):
  x = params["table"][batch["tokens"]] @ params["table"].T
  return jnp.mean(x**2) * batch["factor"] * params["scale"]


def kinds():
  """What is particular: parameters, batch, loss and expected modules."""
  x, y = np.random.default_rng(0).standard_normal((2, 16, 8), np.float32)
  batch = {"x": x, "y": y}
  tokens = {"tokens": np.arange(32).reshape(16, 2) % 5, "factor": 0.5}
  table = {"table": y[:5, :3], "scale": np.float32(1)}
  of_module = lambda m, batch: jnp.mean((m(batch["x"])[:, :8] - batch["y"]) ** 2)
  return {
    "bare arrays": (x[:8, :8], x, lambda w, batch: jnp.mean((batch @ w) ** 2), [""]),
    "integers and numbers": (table, tokens, of_tokens, ["scale", "table"]),
    "a Flax module": (Flax(), batch, of_module, ["hidden", "norm"]),
    "large gradients": (x[:8, :8], batch, of_one_layer(1e29), [""]),
    "small gradients": (x[:8, :8], batch, of_one_layer(1e-27), [""]),
  }


def test_parameters_and_batches_are_of_any_kind():
  for name, (params, batch, loss, modules) in kinds().items():
    result = mpjax.tune(loss, params, batch, target="h200", candidates=["bf16"], tolerance="5 noise")
    assert list(result.table[0].error.modules) == modules, name
    assert 0.1 < result.noise.total < 3, name
    assert 1e-4 < result.table[0].error.gradient < 0.03, name


def test_a_step_and_its_state_can_be_given():
  step = mpjax.make_train_step(LOSS, optax.sgd(0.1), "bf16", accumulate=256)  # one row each
  state, _ = step(step.init(PARAMS), BATCHES[0])
  result = mpjax.tune(step, state, BATCHES, target="h200", candidates=["bf16"])
  assert result.policy == mpjax.get_policy("bf16")
  jax.block_until_ready(step(state, BATCHES[1]))  # nothing of it was donated


@pytest.mark.parametrize("types", [None, AxisType.Auto, AxisType.Explicit])
def test_a_step_on_a_mesh_is_planned_for_it_and_measured_without_it(types):
  kind, axes, tx = types or AxisType.Auto, ("data", "fsdp"), optax.sgd(0.1)
  plain = mpjax.make_train_step(LOSS, tx, "bf16")
  state, batch = plain.init(PARAMS), BATCHES[0]
  mesh = AbstractMesh((2, 4), axes, axis_types=(kind,) * 2)
  if types is not None:  # on devices that are here
    mesh = jax.make_mesh((2, 4), axes, axis_types=(kind,) * 2)
  step = mpjax.make_train_step(LOSS, tx, "bf16", mesh=mesh)
  with contextlib.nullcontext() if types is None else jax.set_mesh(mesh):
    if types is not None:
      state, batch = step.init(PARAMS), jax.device_put(batch, step.layout.batch_sharding)
    options = {"target": "h200:8", "candidates": ["bf16"], "tolerance": 1.0}
    result = mpjax.tune(step, state, [batch], **options)
    assert not any(x.is_deleted() for x in jax.tree.leaves((state, batch)) if isinstance(x, jax.Array))
  expected = mpjax.tune(plain, plain.init(PARAMS), BATCHES[:1], **options).table[0].error.gradient
  assert result.table[0].error.gradient == pytest.approx(expected, rel=0.02)


def test_arguments_that_are_none_are_named():
  no_list, positive = "expected a list of policies", "expected a positive number"
  too_small = "none of 1 candidates stays below 1e-09: the smallest error"
  for options, message in (
    ({"tolerance": 0}, f"tolerance=0: {positive}"),
    ({"tolerance": [1]}, rf"tolerance=\[1\]: {positive}"),
    ({"tolerance": True}, f"tolerance=True: {positive}"),
    ({"tolerance": "0.1 of it"}, "expected a positive number, or a share such as '0.1 noise'"),
    ({"objective": "speed"}, "objective='speed': expected one of time, memory"),
    ({"candidates": []}, "expected at least one policy"),
    ({"candidates": "bf16"}, f"candidates='bf16': {no_list}"),
    ({"candidates": 3}, f"candidates=3: {no_list}"),
    ({"candidates": ["tf32"]}, "tf32 can be measured only on a GPU"),
    (
      {"candidates": [{"base": "bf16", "reduce_dtype": "bfloat16"}]},
      "candidates: .*without a mesh; leave out reduce_dtype",
    ),
    ({"candidates": ["bf15"]}, "candidates: unknown policy 'bf15'"),
    ({"candidates": ["bf16"], "tolerance": 1e-9}, too_small),
    ({"target": "h300"}, "unknown target 'h300'"),
  ):
    with pytest.raises(ValueError, match=message):
      tuned(**options)
  for went in ("minutes", "trials", "recompute", "plan_of"):
    with pytest.raises(TypeError, match=f"mpjax.tune has no argument '{went}': "):
      tuned(**{went: 1})


def test_what_cannot_be_judged_is_an_error_that_says_what_to_do():
  nan = lambda params, batch: LOSS(params, batch) * jnp.log(-1.0)
  with pytest.raises(ValueError, match=r"in float32 the loss is nan .* mpjax\.find_nonfinite"):
    mpjax.tune(nan, PARAMS, BATCHES)
  row = {name: x[:1] for name, x in BATCHES[0].items()}
  for batches in (row, [row, row]):
    with pytest.raises(ValueError, match="one row, or equal ones, say nothing of the gradient's noise"):
      mpjax.tune(LOSS, PARAMS, batches)
  with pytest.raises(ValueError, match="gradient in float32 is zero"):
    mpjax.tune(lambda params, batch: 0.0 * LOSS(params, batch), PARAMS, BATCHES)
  for batches in ([], {name: x[:0] for name, x in row.items()}):
    with pytest.raises(ValueError, match="no batch"):
      mpjax.tune(LOSS, PARAMS, batches)
