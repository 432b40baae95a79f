"""`mpjax.tune`: the best set of known models, tolerances, trials that are kept, and what it cannot do."""

import functools
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import yaml
from flax import nnx

import mpjax
from mpjax.patterns import component_regex
from mpjax.tuning import Cost, GradientError, Trial, TuneResult
from mpjax.tuning._modules import LEVELS, Module, list_modules, mixed_policy, pattern_of
from tests.tuning._planted_models import LAYERS, planted

TOLERANCE = 0.25


def level_of(policy, layer):
  """The level of precision that a policy has for a layer of the planted model."""
  for pattern, override in policy.overrides:
    if pattern == layer:
      return {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}[override.compute_dtype.name]
  half = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}[policy.compute_dtype.name]
  plain = policy.fp8 is None or layer in policy.fp8.exclude or layer in ("first", "narrow")
  return half if plain or (layer == "last" and not policy.fp8.last_layer) else "fp8"


def tuned(*faults, **options):
  params, batches, loss_fn = planted(*faults)
  return mpjax.tune(loss_fn, params, batches, **{"target": "h200", "tolerance": TOLERANCE} | options)


EVERYWHERE = dict.fromkeys(("one", "over", "near", "outlier", "two", "last"), "fp8")


@pytest.mark.parametrize(
  ("faults", "expected"),
  [
    ((), {}),
    (("over",), {}),
    pytest.param(("near",), {"near": "fp16"}, marks=pytest.mark.slow),
    pytest.param(("outlier",), {"outlier": "bf16"}, marks=pytest.mark.slow),
    pytest.param(("over", "near", "outlier"), {"near": "fp16", "outlier": "bf16"}, marks=pytest.mark.slow),
  ],
)
def test_the_best_set_of_a_planted_model_is_found(faults, expected):
  result = tuned(*faults)
  found = {layer: level_of(result.policy, layer) for layer in LAYERS}
  half = {"first": "bf16", "narrow": "bf16"}
  assert found == {**EVERYWHERE, **half, **expected}, str(result)
  assert result.chosen.error.total <= TOLERANCE
  assert mpjax.get_policy(yaml.safe_load(result.yaml)["policy"]) == result.policy
  trials = {trial.label: trial for trial in result.table}
  assert trials["fp16"].passes == ("over" not in faults)
  assert trials["bf16"].passes == ("near" not in faults)
  assert trials["fp8"].passes == (not {"near", "outlier"} & set(faults))
  assert trials["fp32"].error.total == 0


def test_what_is_found_has_the_error_that_its_gradients_have():
  params, batches, loss_fn = planted("outlier")
  result = tuned("outlier", candidates=["bf16", "fp16", "fp32"])
  for label in ("bf16", "fp16"):
    apart = whole = 0.0
    for batch in batches:
      exact = jax.jit(jax.grad(loss_fn))(params, batch)
      scaled = lambda p, batch, label=label: 2.0**16 * mpjax.autocast(loss_fn, label)(p, batch)
      rounded = jax.tree.map(lambda g: g / 2.0**16, jax.jit(jax.grad(scaled))(params, batch))
      for a, b in zip(*map(jax.tree.leaves, (exact, rounded)), strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        apart, whole = apart + np.sum((a - b) ** 2), whole + np.sum(a**2)
    [trial] = [t for t in result.table if t.label == label]
    assert trial.error.gradient == pytest.approx((apart / whole) ** 0.5, rel=0.15)


def test_the_noise_is_that_of_batches():
  # Rows whose gradients are independent: the mean of n of them is off by sigma / sqrt(n).
  rng = np.random.default_rng(0)
  rows, width = 64, 2048
  batches = [jnp.asarray(1 + rng.standard_normal((rows, width)), jnp.float32) for _ in range(4)]
  loss = lambda w, x: jnp.mean(x @ w)
  total = lambda w, x: jnp.sum(x @ w)
  expected = 1 / rows**0.5
  for fun in (loss, total):
    result = mpjax.tune(fun, jnp.ones(width), batches, candidates=["fp32"], target="h200")
    assert result.noise.total == pytest.approx(expected, rel=0.05)
    assert result.tolerance == pytest.approx(0.1 * result.noise.total)
  single = [x[:1] for x in batches]
  result = mpjax.tune(loss, jnp.ones(width), single, candidates=["fp32"], tolerance="0.3 noise")
  assert result.noise.total == pytest.approx(0.7, rel=0.1)  # of a mean of 1 and a noise of 1
  assert result.tolerance == pytest.approx(0.3 * result.noise.total)


def test_the_cheapest_that_passes_is_chosen_and_the_plain_preset_if_nothing_is_cheaper():
  result = tuned(candidates=["bf16", "fp16", "fp32"])
  assert result.chosen.label == "bf16"
  assert result.policy == mpjax.get_policy("bf16")
  assert result.yaml.startswith("policy: bf16  # ")
  assert {t.label: t.why for t in result.table} == {
    "bf16": "chosen",
    "fp16": "no cheaper",
    "fp32": "dearer",
  }
  assert "plain preset" in str(result)
  assert [t.label for t in result.front] == ["bf16", "fp16", "fp32"]


def test_nothing_cheaper_than_float32_is_said():
  result = tuned(tolerance=1e-7, candidates=["bf16", "fp32"])
  assert result.policy == mpjax.get_policy("fp32")
  assert "nothing cheaper stays below 1e-07; the smallest error is 0.0" in str(result)


@pytest.mark.slow
def test_memory_is_saved_by_state_in_few_bytes():
  result = tuned(objective="memory", candidates=None, tx=optax.adamw(1e-3, b2=0.95))
  presets = [t for t in result.table if t.kind == "preset"]
  assert result.chosen.cost.peak < 0.9 * min(t.cost.peak for t in presets)
  assert result.policy.optimizer_dtype is not None
  assert 0 < result.chosen.error.update <= TOLERANCE


# Losses with parameters and batches of many kinds: bare arrays, numbers, Flax and Equinox modules, a mesh.
def of_one_layer(w, batch):
  return jnp.mean((batch["x"] @ w - batch["y"]) ** 2)


def of_tokens(params, batch):
  x = params["table"][batch["tokens"]] @ params["table"].T
  return jnp.mean(x**2) * batch["factor"] * params["scale"]


class Flax(nnx.Module):
  def __init__(self):
    self.hidden = nnx.Linear(8, 16, rngs=nnx.Rngs(0))
    self.norm = nnx.BatchNorm(16, rngs=nnx.Rngs(0))

  def __call__(self, x):
    return self.norm(jnp.tanh(self.hidden(x)))


def as_are(names):
  """Parameters, batch, loss and expected modules, by what is particular."""
  x, y = jax.random.normal(jax.random.key(0), (2, 16, 8))
  batch = {"x": x, "y": y}
  if names == "bare arrays":
    return x[:8, :8], x, lambda w, batch: jnp.mean((batch @ w) ** 2), [""]
  if names == "integers and numbers":
    batch = {"tokens": jnp.arange(32).reshape(16, 2) % 5, "factor": 0.5}
    params = {"table": jax.random.normal(jax.random.key(1), (5, 3)), "scale": jnp.float32(1)}
    return params, batch, of_tokens, ["scale", "table"]
  if names == "a Flax module":
    return (
      Flax(),
      batch,
      lambda m, batch: jnp.mean((m(batch["x"])[:, :8] - batch["y"]) ** 2),
      ["hidden", "norm"],
    )
  if names == "large gradients":
    return x[:8, :8], batch, lambda w, batch: 1e29 * of_one_layer(w, batch), [""]
  assert names == "small gradients"
  return x[:8, :8], batch, lambda w, batch: 1e-27 * of_one_layer(w, batch), [""]


@pytest.mark.parametrize(
  "names", ["bare arrays", "integers and numbers", "a Flax module", "large gradients", "small gradients"]
)
def test_parameters_and_batches_are_of_any_kind(names):
  params, batch, loss, modules = as_are(names)
  result = mpjax.tune(loss, params, batch, target="h200", candidates=["bf16", "fp32"])
  assert list(result.noise.modules) == modules
  assert 0.1 < result.noise.total < 3
  bf16 = result.table[0]
  assert 1e-4 < bf16.error.gradient < 0.03
  assert list(bf16.error.modules) == modules


def test_a_gpu_without_bfloat16_is_tuned_to_float16():
  params, batch, loss, _ = as_are("bare arrays")
  result = mpjax.tune(loss, params, batch, target="t4")
  assert {trial.label for trial in result.table if trial.kind == "preset"} == {"fp16", "fp32"}
  assert result.policy == mpjax.get_policy("fp16")
  among = mpjax.tune(loss, params, batch, target="t4", candidates=["bf16", "fp16", "fp32"])
  assert among.policy == mpjax.get_policy("fp16")


def test_names_that_are_patterns_are_taken_literally():
  names = ["a+b", "(c)", "d[0]", "e$", "^g", "h.i", "j|k", "l?m", "n p", "r:s"]
  paths = [f"{root}/{name}" for name in names for root in ("one", "two")]
  for path in paths:
    pattern = pattern_of(Module(path, (path,)), paths)
    spec = yaml.safe_load(yaml.safe_dump({"base": "bf16", "overrides": {pattern: "float32"}}))
    [(found, _)] = mpjax.get_policy(spec).overrides
    assert list(filter(component_regex(found).search, paths)) == [path]


@pytest.mark.parametrize(
  "spec",
  [
    "bf16_lean",
    "params=bfloat16,compute=float16",
    {"base": "fp16", "loss_scaling": 128},
    {"base": "fp16", "loss_scaling": {"kind": "dynamic", "growth_interval": 7}},
    {"base": "fp8", "fp8": {"recipe": "delayed", "margin": 1}},
    {"base": "fp8", "fp8": {"recipe": "current", "include": ["b: c"], "exclude": ["#a"], "min_dim": 16}},
    {"base": "bf16", "overrides": {"a: b#": "float32", "^x$": {"recompute": "nothing"}}},
  ],
)
def test_a_policy_is_written_so_that_it_reads_as_itself(spec):
  policy = mpjax.get_policy(spec)
  cost, error = Cost(1.0, 1.0, 1, 1, 0, True), GradientError(0.1, {}, 1.0)
  chosen = Trial("it", "candidate", policy, cost, error, True)
  result = TuneResult(policy, chosen, (chosen,), 1.0, None, 1.0, "h200", "time", 1, 1)
  assert mpjax.get_policy(yaml.safe_load(result.yaml)["policy"]) == policy


def test_memory_is_saved_by_computing_again():
  weights = {name: jnp.eye(8) for name in ("one", "two")}

  def deep(weights, x):
    for name, w in weights.items():
      with jax.named_scope(name):
        x = jnp.tanh(jnp.tanh(jnp.tanh(x @ w)))
    return jnp.mean(x**2)

  x = jax.random.normal(jax.random.key(0), (1 << 16, 8))
  tune = functools.partial(mpjax.tune, deep, weights, x, target="h200", tolerance=0.1)
  result = tune(objective="memory")
  assert result.recompute == "dots"
  assert result.policy == mpjax.get_policy("bf16")
  assert {t.recompute for t in result.table} == {None, "dots", "nothing"}
  assert "\n  recompute: dots" in str(result)
  assert mpjax.get_policy(yaml.safe_load(result.yaml)["policy"]) == result.policy
  assert tune().recompute is None


def test_a_trial_that_was_made_is_not_made_again(tmp_path):
  file, lines = tmp_path / "trials.jsonl", []
  first = tuned(trials=file, progress=lines.append, candidates=["bf16", "fp32"])
  assert lines == ["float32", "bf16", "fp32"]
  with file.open("a") as kept:
    for wrong in ("3", "null", file.read_text().splitlines()[0].replace('"update": 0.0', '"update": "a"')):
      kept.write(f"{wrong}\n")
    kept.write('{"subject": "cut o')
  lines.clear()
  again = tuned(trials=file, progress=lines.append, candidates=["bf16", "fp16", "fp32"])
  assert lines == ["float32", "fp16"]
  assert again.table[0] == first.table[0]
  lines.clear()
  tuned(trials=file, progress=lines.append, candidates=["fp16", "fp32"])  # its line is one of its own
  assert lines == ["float32"]
  lines.clear()
  tuned("outlier", trials=file, progress=lines.append, candidates=["bf16"])  # of another model
  assert lines == ["float32", "bf16"]


def test_a_search_whose_time_is_over_has_the_best_preset():
  result = tuned("outlier", minutes=1e-6)
  assert {t.kind for t in result.table} == {"preset"}
  assert result.policy == mpjax.get_policy("bf16")
  assert "time was over" in result.notes[0]


def test_a_result_is_data_and_a_picture(tmp_path):
  pytest.importorskip("matplotlib")
  result = tuned(candidates=["bf16", "fp16", "fp32"])
  result.save_json(tmp_path / "tune.json")
  data = json.loads((tmp_path / "tune.json").read_text())
  assert data["chosen"] == "bf16"
  assert [row["label"] for row in data["table"]] == ["bf16", "fp16", "fp32"]
  assert mpjax.get_policy(data["policy"]) == result.policy
  result.save_picture(tmp_path / "tune.png")
  assert (tmp_path / "tune.png").read_bytes()[1:4] == b"PNG"
  result.save_picture(tmp_path / "tune.svg")
  words = re.findall(r">([^<>]+)</text>", (tmp_path / "tune.svg").read_text())
  assert {"bf16", "fp16", "fp32, error 0", "chosen", "tolerance"} <= {*words}


@pytest.mark.parametrize("accumulate", [1, 256])  # one row each
def test_a_step_and_its_state_can_be_given(accumulate):
  params, batches, loss_fn = planted()
  step = mpjax.make_train_step(loss_fn, optax.sgd(0.1), "bf16", accumulate=accumulate)
  state = step.init(params)
  state, _ = step(state, batches[0])
  result = mpjax.tune(step, state, batches, target="h200", candidates=["bf16", "fp32"])
  assert result.policy == mpjax.get_policy("bf16")
  jax.block_until_ready(step(state, batches[1]))  # nothing of it was donated


@pytest.mark.parametrize(
  ("options", "message"),
  [
    ({"tolerance": 0}, "tolerance=0: expected a positive number"),
    ({"tolerance": [1]}, r"tolerance=\[1\]: expected a positive number"),
    ({"tolerance": True}, "tolerance=True: expected a positive number"),
    ({"tolerance": "0.1 of it"}, "expected a positive number, or a share such as '0.1 noise'"),
    ({"objective": "speed"}, "objective='speed': expected one of time, memory"),
    ({"candidates": []}, "expected at least one policy"),
    ({"candidates": "bf16"}, "candidates='bf16': expected a list of policies"),
    ({"candidates": 3}, "candidates=3: expected a list of policies"),
    ({"candidates": ["tf32"]}, "tf32 can be measured on a GPU alone"),
    ({"minutes": True}, "minutes=True: expected a positive number"),
    ({"minutes": "3"}, "minutes='3': expected a positive number"),
    ({"trials": "/"}, "trials='/': Is a directory"),
    ({"trials": "/proc/x/y"}, "trials='/proc/x/y': No such file or directory"),
    ({"candidates": ["bf15"]}, "candidates: unknown policy 'bf15'"),
    (
      {"candidates": ["bf16"], "tolerance": 1e-9},
      "none of 1 candidates stays below 1e-09: the smallest error",
    ),
    ({"minutes": 0}, "minutes=0: expected a positive number"),
    ({"target": "h300"}, "unknown target 'h300'"),
  ],
)
def test_arguments_that_are_none_are_named(options, message):
  with pytest.raises(ValueError, match=message):
    tuned(**options)


def test_what_cannot_be_judged_is_an_error_that_says_what_to_do():
  params, batches, loss_fn = planted()
  nan = lambda params, batch: loss_fn(params, batch) * jnp.log(-1.0)
  with pytest.raises(ValueError, match=r"in float32 the loss is nan .* mpjax\.find_nonfinite"):
    mpjax.tune(nan, params, batches)
  row = jax.tree.map(lambda x: x[:1], batches[0])
  with pytest.raises(ValueError, match="one batch of one row says nothing of the gradient's noise"):
    mpjax.tune(loss_fn, params, row)
  with pytest.raises(ValueError, match="gradient in float32 is zero"):
    mpjax.tune(lambda params, batch: 0.0 * loss_fn(params, batch), params, batches)
  for batches in ([], jax.tree.map(lambda x: x[:0], row)):
    with pytest.raises(ValueError, match="no batch"):
      mpjax.tune(loss_fn, params, batches)


def test_a_batch_whose_halves_do_not_fit_says_so_and_has_a_tolerance_of_its_own():
  params, [batch, other], loss_fn = planted()
  table = jnp.eye(512)  # with a row for each entry, of which the batch has two
  longer = lambda batch: batch | {"one": table, "two": table[:, 0], "three": table[:, 1]}
  whole = lambda params, batch: loss_fn(params, batch) + 0 * (batch["one"] @ jnp.zeros(512)).sum()
  fixed = lambda params, batch: whole(params, batch) + 0 * (batch["two"] * jnp.ones(512)).sum()
  tune = functools.partial(mpjax.tune, fixed, params, target="h200", candidates=["bf16"])
  with pytest.raises(ValueError, match=r"half of a batch cannot be run \(.*\): give .* a tolerance such as"):
    tune([longer(batch)])
  assert tune([longer(batch)], tolerance=0.01).noise is None
  assert tune([longer(batch), longer(other)]).noise.how == "the batches"


def test_candidates_that_are_mappings_are_written_out_and_told_apart(tmp_path):
  overridden = [{"base": "bf16", "overrides": {layer: "float32"}} for layer in ("near", "one")]
  result = tuned("near", candidates=[*overridden, "fp32"])
  assert result.policy == mpjax.get_policy(overridden[0])
  assert mpjax.get_policy(yaml.safe_load(result.yaml)["policy"]) == result.policy
  assert [t.label for t in result.table] == ["bf16,overrides=... (1)", "bf16,overrides=... (2)", "fp32"]
  assert "plain preset" not in result.conclusion


def test_what_has_no_rows_is_in_both_halves_of_a_batch():
  params, batches, loss_fn = planted()

  def masked(params, batch):
    return loss_fn(params, {k: batch[k] for k in ("x", "y")}) * batch["mask"].sum() + 0 * batch["key"].sum()

  more = {"mask": jnp.eye(3), "key": jax.random.PRNGKey(0)}
  plain, with_more = (
    mpjax.tune(fun, params, [batch | extra for batch in batches], target="h200", candidates=["bf16"])
    for fun, extra in ((loss_fn, {}), (masked, more))
  )
  assert with_more.noise.total == pytest.approx(plain.noise.total, rel=1e-4)


@pytest.mark.parametrize(
  ("paths", "pattern"),
  [
    (["up"], "up"),
    (["a*b", "ab", "a1b"], r"a\*b"),
    (["blocks/0/up", "blocks/1/up"], "up"),
    (["layers.0", "layers.1", "layersx0"], r"layers\.\d+"),
  ],
)
def test_a_pattern_matches_the_paths_of_its_module_alone(paths, pattern):
  module = Module(paths[0], tuple(path for path in paths if re.fullmatch(f"(.*/)?{pattern}", path)))
  assert pattern_of(module, paths).strip("^$") == pattern


def test_a_mixed_policy_does_what_it_says():
  params, batches, loss_fn = planted()
  rows = lambda policy: mpjax.explain(loss_fn, policy)(params, batches[0])
  emulated = mpjax.get_policy({"base": "fp8", "fp8": {"emulate": True}})
  modules = list_modules(rows("bf16"), rows(emulated))
  assert [m.name for m in modules if m.fp8] == ["one", "over", "near", "outlier", "two"]
  rng = np.random.default_rng(0)
  for _ in range(8):
    levels = {m: str(rng.choice(m.levels)) for m in modules}
    policy = mixed_policy(levels, [path for m in modules for path in m.paths])
    spec = policy.to_dict()
    if policy.fp8 is not None:
      spec["fp8"]["emulate"] = True
    runs_in = {row.path: row.after for row in rows(mpjax.get_policy(spec)).rows if row.flops}
    for module, level in levels.items():
      if module.name in runs_in:
        names = dict(zip(LEVELS, ("float32", "float16", "bfloat16", "float8_e4m3fn"), strict=True))
        assert runs_in[module.name] == names[level]
