"""`find_nonfinite`: planted faults are named by operation, module, line, pass and turn; masks are not blamed."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

import mpjax
from mpjax.numerics import find_nonfinite
from tests.numerics import _faults
from tests.numerics._faults import PRIMITIVE, W, exp_large, line_of, log_zero, none, plain

X = np.random.default_rng(0).uniform(0.5, 1.5, size=(4, 4)).astype(np.float32)
BATCH = {"x": X}
FP16 = {"base": "fp16", "loss_scaling": {"init_scale": 4.0}}
# Without autocast, and without a loss scale.
CAST = {"param_dtype": "float32", "compute_dtype": "float16", "output_dtype": "float32"}
POLICIES = {"fp16": FP16, "bf16": "bf16", "fp32": "fp32", "cast": CAST}


def mean(y):
  return y.astype(jnp.float32).mean()


def of_loss(loss, params, policy="fp32", **options):
  step = mpjax.make_train_step(loss, optax.sgd(0.1), policy, **options)
  return step, step.init(params)


def of_faults(faults, policy, **options):
  params = {"w": [W] * len(faults)}
  return of_loss(lambda p, b: mean(plain(p, b["x"], faults)), params, policy, **options)


def hunt(step, state, batch=None, reference=False):
  return find_nonfinite(step, state, BATCH if batch is None else batch, reference=reference)


@pytest.mark.parametrize(
  ("policy", "fault"),
  [
    *(("fp16", fault) for fault in ("none", *PRIMITIVE)),
    ("cast", "overflow"),
    ("bf16", "overflow"),
    ("fp32", "overflow"),
  ],
)
def test_a_fault_is_named_by_its_operation_module_line_and_pass(fault, policy):
  report = hunt(*of_faults(["none", fault, "none"], POLICIES[policy]))
  if fault == "none" or (fault == "overflow" and policy in ("bf16", "fp32")):
    assert report.finite
    assert report.origin is None
    assert "every value is finite" in str(report)
    return
  origin = report.origin
  assert (origin.primitive, origin.module, origin.line) == (PRIMITIVE[fault], "layer_1", line_of(fault))
  assert origin.backward == (fault == "sqrt_zero") == ("loss" not in report.results)
  assert "gradients['w'][2]" in report.results or origin.backward
  assert report.results.keys() == report.compiled.keys()
  assert origin.nonfinite.nan == (16 if fault == "zero_by_zero" else 0)
  assert origin.dtype == ("float16" if policy == "cast" or fault == "overflow" else "float32")
  assert str(report).startswith(f"layer_1: {origin.primitive} ({line_of(fault)})")


def test_an_overflow_says_how_far_and_its_override_mends_it():
  step, state = of_faults(["none", "overflow", "none"], FP16)
  report = hunt(step, state, reference=True)
  assert report.origin.overflowed
  assert 65504 < report.origin.float32_largest < 1e9
  assert max(operand.largest for operand in report.origin.operands) < 1e4
  assert report.in_float32 is False
  assert "In float32 the same step is finite." in str(report)
  assert 'overrides: {"layer_1": fp32}' in str(report)
  mended = step.with_policy(FP16 | {"overrides": {report.origin.module: "fp32"}})
  assert hunt(mended, state).finite


@pytest.mark.parametrize("policy", ["fp16", "fp32"])
def test_a_fault_that_float32_has_too_is_said_to_be_so(policy):
  report = hunt(*of_faults(["exp_large"], POLICIES[policy]), reference=True)
  assert report.in_float32 is True
  assert ("In float32 it is non-finite too" in str(report)) == (policy == "fp16")
  assert "learning rate" in str(report)
  if policy == "fp16":
    assert report.reference.origin.line == report.origin.line


def test_an_overflow_of_the_scaled_gradient_is_mended_by_the_scale_that_is_advised():
  loss = lambda p, b: mean(jnp.sin(b["x"] @ p["w"]) * 100)
  step, state = of_loss(loss, {"w": W}, "fp16")
  at = lambda scale: state.replace(opt_state=state.opt_state._replace(scale=np.float32(scale)))
  report = hunt(step, at(2.0**20), reference=True)
  assert report.origin.backward
  assert report.loss_scale == 2.0**20
  assert "loss" not in report.results
  assert report.in_float32 is False
  assert f"a loss scale of at most {report.largest_scale:g}" in str(report)
  for _ in range(3):  # what comes after the first overflow may want less still
    scale = report.largest_scale
    assert scale < report.loss_scale
    report = hunt(step, at(scale))
    if report.finite:
      break
  assert report.finite
  assert not hunt(step, at(2 * scale)).finite


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_data_and_parameters_that_are_not_finite_are_named_with_the_operation_that_reads_them_first(value):
  step, state = of_faults(["none", "none"], FP16)
  x, broken = X.copy(), W.copy()
  x[0, :3] = broken[1, 1] = value
  kind = "NaN" if np.isnan(value) else "+inf"
  for batch, params, said, module, advice in (
    ({"x": x}, [W, W], f"batch['x'] holds 3 {kind} of 16", "layer_0", "fix the data"),
    (BATCH, [W, broken], f"params['w'][1] holds 1 {kind} of 16", "layer_1", "checkpoint"),
  ):
    report = hunt(step, state.replace(params={"w": params}), batch, reference=True)
    ((name, reader),) = report.readers.items()
    assert report.origin is None, said
    assert report.inputs.keys() == {name}
    assert (reader.primitive, reader.module, reader.backward) == ("dot_general", module, False), said
    line = line_of("product", _faults.__file__)
    assert report.verdict.startswith(
      f"{said}, first read by {module}: dot_general ({line}), forward pass."
    ), said
    assert advice in str(report)


def test_the_first_read_of_a_bad_input_leads_to_the_loss_wherever_it_is():
  """It is not a read that a choice hides, a cast or a slice, and it may be a turn of a loop or a lookup."""

  def hidden(p, b):
    x = jnp.where(jnp.isnan(b["x"]), 0, b["x"] * 2) @ p["w"][0].astype(jnp.float16).astype(jnp.float32)
    x, _ = jax.lax.scan(lambda c, w: (jnp.tanh(c @ w), None), x, p["w"][:3])  # line of: turn
    return mean(x * (b["x"] + 1))  # line of: second read

  x, w, table = X.copy(), np.stack([W] * 4), np.ones((8, 4), np.float32)
  x[0, 0] = w[2, 0, 0] = table[5] = np.nan
  looked_up = lambda p, b: mean(p["table"][b["rows"]] + 1)  # line of: lookup
  for loss, params, batch, name, line, turns in (
    (hidden, {"w": np.stack([W] * 4)}, {"x": x}, "batch['x']", "second read", []),
    (hidden, {"w": w}, BATCH, "params['w']", "turn", ["iteration 3 of 3"]),
    (looked_up, {"table": table}, {"rows": np.arange(8)}, "params['table']", "lookup", []),
  ):
    reader = hunt(*of_loss(loss, params), batch).readers[name]
    assert (reader.line, [*map(str, reader.iterations)]) == (line_of(line, __file__), turns), line
  assert hunt(*of_loss(lambda p, b: mean(p["w"] * b["x"][1:]), {"w": W[1:]}), {"x": x}).finite


def of_layers(layer):
  factors = np.asarray([1, 1, 0, 1], np.float32)
  scanned = lambda x, row: (layer(x @ row[0], row[1]), None)
  return lambda p, b: mean(jax.lax.scan(scanned, b["x"], (p["w"], factors))[0])


def reversed_loop(p, b):
  body = lambda c, w: (c - 1, jnp.log(c) * w)  # line of: reversed
  return jax.lax.scan(body, b["x"], p["w"], reverse=True)[1].mean()


quotient = lambda x, factor: x / factor  # line of: quotient
root = lambda x, factor: jnp.sqrt(jnp.abs(x) * factor)  # line of: root
logarithms = lambda p, b: mean(jnp.log(b["x"] @ p["w"]))  # line of: logarithms
# Its operand is rounded from float32, to which the gradient goes.
products = lambda p, b: mean((jnp.tanh(b["x"] @ p["w"]) @ p["v"]) ** 2)  # line of: products
written = lambda value: lambda p, b: mean(jnp.where(b["x"] > 1, b["x"] @ p["w"], value))  # line of: written
HIGH = {"base": "fp16", "loss_scaling": {"init_scale": 2.0**13}}
LAYERS, VECTOR = {"w": np.stack([W] * 4)}, {"w": np.ones(4, np.float32)}
SMALL = {"w": np.full((4, 4), 0.1, np.float32), "v": np.full((4, 4), 4, np.float32)}
WITHOUT_ROW = X * np.float32(np.arange(4) != 2)[:, None]
AT_ZERO = "log ({}) took the logarithm of zero, forward pass"
# The loss, its parameters, batch and step; then what the text says, and the index, length and kind of the turn.
PLANTED = {
  "quotient": (of_layers(quotient), LAYERS, X, {}, "div ({}) divided by zero, forward pass", [(2, 4, False)]),
  "root": (of_layers(root), LAYERS, X, {}, "div ({}) divided by zero, backward pass", [(2, 4, False)]),
  "reversed": (reversed_loop, VECTOR, np.float32(2), {}, AT_ZERO, [(1, 4, False)]),
  "logarithms": (logarithms, {"w": W}, WITHOUT_ROW, {"accumulate": 4}, AT_ZERO, [(2, 4, True)]),
  "products": (products, SMALL, X, {"policy": HIGH}, "dot_general ({}) overflowed in float16, back", []),
  "infinity": (written(np.inf), {"w": W}, X, {}, "({}) reads an infinity that the program itself holds", []),
  "nan": (written(np.nan), {"w": W}, X, {}, "({}) reads NaN that the program itself holds", []),
}


@pytest.mark.parametrize("planted", PLANTED)
def test_a_planted_fault_is_named_with_its_line_pass_and_turn(planted):
  loss, params, x, options, said, turns = PLANTED[planted]
  report = hunt(*of_loss(loss, params, **options), {"x": x})
  origin = report.origin
  assert origin.line == line_of("written" if origin.constant else planted, __file__)
  assert said.format(origin.line) in str(report)
  assert [(turn.index, turn.length, turn.micro_batch) for turn in origin.iterations] == turns
  assert all(str(turn) in report.verdict for turn in origin.iterations)
  assert origin.constant == (planted in ("infinity", "nan"))
  assert report.results.keys() == {"loss"} or not origin.constant
  assert 65504 < (origin.float32_largest or 65505) < 1e7


@jax.custom_vjp
def faulty_rule(x):
  return x * 2


faulty_rule.defvjp(lambda x: (x * 2, x), lambda x, g: (g * log_zero(x),))


def in_a_while_loop(x):
  turns = jnp.int32(x.sum() > 0) + 1
  return x + jax.lax.fori_loop(0, turns, lambda i, y: log_zero(y), jax.lax.stop_gradient(x))


INSIDE = {
  "checkpoint": jax.checkpoint(log_zero),
  "cond": lambda x: jax.lax.cond(x.sum() > 0, log_zero, none, x),
  "while": in_a_while_loop,
  "custom_vjp": faulty_rule,
  "custom_jvp": lambda x: jax.nn.relu(-x) + log_zero(jax.nn.relu(-x) + 1),
}


@pytest.mark.parametrize(
  ("inside", "policy"), [*((inside, "fp16") for inside in INSIDE), ("checkpoint", "cast")]
)
def test_faults_inside_calls_branches_and_loops_are_named(inside, policy):
  backward = inside == "custom_vjp"

  def loss(p, b):
    with jax.named_scope("layer"):
      return mean(INSIDE[inside](b["x"] @ p["w"]))  # line of: call

  report = hunt(*of_loss(loss, {"w": W}, POLICIES[policy]))
  origin = report.origin
  line = line_of("call", __file__) if backward else line_of("log_zero")
  assert (origin.primitive, origin.module, origin.line) == ("log", "layer", line)
  assert origin.backward == backward == ("loss" not in report.results)
  assert bool(origin.iterations) == (inside == "while")


def attend(p, b, mask):
  q = b["x"] @ p["w"]
  return mean(jax.nn.softmax(mask(q @ q.T)) @ q)


CAUSAL = np.tri(4, dtype=bool)
MASKS = {
  "literal": lambda s, b: jnp.where(b["keep"], s, -jnp.inf),
  "input": lambda s, b: s + b["bias"],
  "cast": lambda s, b: s + jnp.where(b["keep"], 0.0, -1e9).astype(s.dtype),
}


@pytest.mark.parametrize(
  ("mask", "policy"), [("literal", "fp16"), ("input", "fp16"), ("cast", "cast"), ("cast", "fp32")]
)
def test_infinities_of_a_mask_are_not_blamed_until_a_row_is_masked_everywhere(mask, policy):
  loss = lambda p, b: attend(p, b, lambda s: MASKS[mask](s, b))
  step, state = of_loss(loss, {"w": W}, POLICIES[policy])
  batch = lambda keep: {"x": X, "keep": keep, "bias": np.where(keep, 0, -np.inf).astype(np.float32)}
  assert hunt(step, state, batch(CAUSAL)).finite
  nothing = CAUSAL.copy()
  nothing[2] = False
  report = hunt(step, state, batch(nothing))
  assert report.finite == (mask == "cast" and policy != "cast")  # -1e9 stays finite in float32
  assert not report.inputs
  if mask != "cast":
    assert report.origin.primitive == "sub"
    assert "made NaN from infinities" in str(report)
    assert report.origin.nonfinite.nan == 4


def test_independent_faults_are_listed_once_each_and_the_first_is_the_first_in_the_program():
  loss = lambda p, b: mean(exp_large(b["x"] @ p["w"])) + mean(log_zero(b["x"] * p["v"]))
  report = hunt(*of_loss(loss, {"w": W, "v": np.ones(4, np.float32)}))
  assert report.origin.line == line_of("exp_large")
  assert line_of("log_zero") in {other.line for other in report.others}
  assert len(report.others) <= 8


@pytest.mark.parametrize("mapped", [False, True])
def test_a_batch_over_several_devices_is_searched_and_the_state_is_left_alone(mapped):
  mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
  batch = {"x": jax.device_put(X, NamedSharding(mesh, P("data")))}
  run = jax.shard_map(log_zero, mesh=mesh, in_specs=P("data"), out_specs=P("data")) if mapped else log_zero
  step, state = of_loss(lambda p, b: mean(run(b["x"] @ p["w"])), {"w": W})
  state = jax.device_put(state, NamedSharding(mesh, P()))
  origin = hunt(step, state, batch).origin
  assert (origin.primitive == "shard_map") == mapped
  assert mapped or origin.line == line_of("log_zero")
  assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(state))


def test_an_overflow_of_the_sum_over_devices_alone_is_told_as_such():
  policy = {"base": "fp16", "reduce_dtype": "float16", "loss_scaling": {"init_scale": 16}}
  steep = lambda p, batch: (p["w"] * batch["g"]).mean()
  step = of_loss(steep, {"w": np.zeros((), np.float32)}, policy, mesh=jax.make_mesh((8,), ("data",)))
  report = hunt(*step, {"g": np.full(16, 1000, np.float32)})
  assert report.origin is None
  assert "the sum of gradients in float16 over 8 devices overflowed" in str(report)
  assert "reduce_dtype: float32" in str(report)


def test_a_loss_function_is_looked_at_as_it_stands_or_under_a_policy():
  def loss(params, x, scale):
    return jnp.mean((x @ params["w"]) ** 2) * scale

  params, args = {"w": np.full((4, 4), 400.0, np.float32)}, (X, np.float32(1.0))
  assert find_nonfinite(loss, params, *args).finite
  found = find_nonfinite(loss, params, *args, policy="fp16")
  assert found.origin.dtype == "float16"
  assert found.in_float32 is False
  half = lambda params, x, scale: loss(jax.tree.map(jnp.float16, params), jnp.float16(x), scale)
  assert find_nonfinite(half, params, *args).origin.dtype == "float16"
  own = mpjax.autocast(loss, "fp16")  # looked at as the function inside, so that float32 is another
  assert find_nonfinite(own, {"w": np.full((4, 4), 4e4, np.float32)}, *args).in_float32 is False
  found = find_nonfinite(loss, params, X * np.inf, np.float32(1.0))
  assert list(found.inputs) == ["x"]
  assert "fix the argument x" in str(found)
  assert found.parts == ("loss", "gradients")
  assert find_nonfinite(lambda p, x, on: loss(p, x, 1.0) if on else 0.0, params, X, True).finite
  step, state = of_loss(lambda p, b: loss(p, *b), params)
  assert find_nonfinite(step, state, args).finite
  assert not find_nonfinite(step, state, args, policy="fp16").finite
