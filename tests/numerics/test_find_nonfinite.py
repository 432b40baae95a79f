"""`find_nonfinite`: planted faults are named by operation, module, line, pass and turn; masks are not blamed."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

import mpjax
from mpjax.numerics import find_nonfinite
from tests.numerics._faults import (
  FAULTS,
  PRIMITIVE,
  LinenModel,
  NnxModel,
  W,
  exp_large,
  line_of,
  log_zero,
  none,
  overflow,
  plain,
)

RNG = np.random.default_rng(0)
X = RNG.uniform(0.5, 1.5, size=(4, 4)).astype(np.float32)
BATCH = {"x": X}
FP16 = {"base": "fp16", "loss_scaling": {"init_scale": 4.0}}
CAST = {
  "param_dtype": "float32",
  "compute_dtype": "float16",
  "output_dtype": "float32",
}  # no autocast, no scale
POLICIES = {"fp16": FP16, "bf16": "bf16", "fp32": "fp32", "cast": CAST}


def is_hit(fault, policy):
  return fault not in ("none", "overflow") or (fault == "overflow" and policy in ("fp16", "cast"))


def mean(y):
  return y.astype(jnp.float32).mean()


def build(kind, faults, policy, **options):
  if kind == "nnx":
    step = mpjax.make_train_step(lambda m, b: mean(m(b["x"])), optax.sgd(0.1), policy, **options)
    return step, step.init(NnxModel(faults))
  if kind == "linen":
    model = LinenModel(tuple(faults))
    variables = model.init(jax.random.key(0), X)
    apply = lambda params, x: model.apply({"params": params}, x)
    return of_loss(lambda p, b: mean(apply(p, b["x"])), variables["params"], policy, **options)
  model, params = plain(faults)
  return of_loss(lambda p, b: mean(model(p, b["x"])), params, policy, **options)


def of_loss(loss, params, policy="fp32", **options):
  step = mpjax.make_train_step(loss, optax.sgd(0.1), policy, **options)
  return step, step.init(params)


def hunt(step, state, batch=None, reference=False):
  return find_nonfinite(step, state, BATCH if batch is None else batch, reference=reference)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_named_by_its_operation_module_line_and_pass(fault, policy):
  report = hunt(*build("plain", ["none", fault, "none"], POLICIES[policy]))
  if not is_hit(fault, policy):
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
  assert (
    origin.dtype == ("float16" if policy == "cast" or fault == "overflow" else "float32") or policy == "bf16"
  )
  assert str(report).startswith(f"layer_1: {origin.primitive} ({line_of(fault)})")


@pytest.mark.parametrize("kind", ["nnx", "linen"])
@pytest.mark.parametrize("policy", ["fp16", "cast"])
@pytest.mark.parametrize("fault", ["overflow", "sqrt_zero"])
def test_modules_are_named_by_their_path(kind, policy, fault):
  report = hunt(*build(kind, ["none", "none", fault], POLICIES[policy]))
  path = {"nnx": "NnxModel/blocks/2", "linen": "LinenModel/block_2"}[kind]
  assert (report.origin.module, report.origin.line) == (path, line_of(fault))


def test_an_overflow_says_how_far_and_its_override_mends_it():
  step, state = build("plain", ["none", "overflow", "none"], FP16)
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
  report = hunt(*build("plain", ["exp_large"], POLICIES[policy]), reference=True)
  assert report.in_float32 is True
  assert ("In float32 it is non-finite too" in str(report)) == (policy == "fp16")
  assert "learning rate" in str(report)
  if policy == "fp16":
    assert report.reference.origin.line == report.origin.line


def test_an_overflow_of_the_scaled_gradient_is_mended_by_the_scale_that_is_advised():
  loss = lambda p, b: mean(jnp.sin(b["x"] @ p["w"]) * 100)
  policy = lambda scale: {"base": "fp16", "loss_scaling": {"kind": "static", "init_scale": scale}}
  step, state = of_loss(loss, {"w": jnp.asarray(W)}, policy(2.0**20))
  report = hunt(step, state, reference=True)
  assert report.origin.backward
  assert report.loss_scale == 2.0**20
  assert "loss" not in report.results
  assert report.in_float32 is False
  assert f"a loss scale of at most {report.largest_scale:g}" in str(report)
  for _ in range(3):  # what comes after the first overflow may want less still
    scale = report.largest_scale
    assert scale < report.loss_scale
    report = hunt(*of_loss(loss, {"w": jnp.asarray(W)}, policy(scale)))
    if report.finite:
      break
  assert report.finite
  assert not hunt(*of_loss(loss, {"w": jnp.asarray(W)}, policy(2 * scale))).finite


def test_a_product_that_overflows_in_the_backward_pass_says_how_far():
  """Its operand is rounded from float32, to which the gradient goes."""
  loss = lambda p, b: mean((jnp.tanh(b["x"] @ p["w"]) @ p["v"]) ** 2)
  params = {"w": np.full((4, 16), 0.1, np.float32), "v": np.full((16, 4), 4.0, np.float32)}
  policy = {"base": "fp16", "loss_scaling": {"init_scale": 2.0**13}}
  report = hunt(*of_loss(loss, params, policy))
  assert (report.origin.primitive, report.origin.dtype) == ("dot_general", "float16")
  assert report.origin.backward
  assert 65504 < report.origin.float32_largest < 1e7


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_data_and_parameters_that_are_not_finite_are_named_without_an_operation(value):
  step, state = build("plain", ["none", "none"], FP16)
  x = X.copy()
  x[0, :3] = value
  report = hunt(step, state, {"x": x}, reference=True)
  kind = "NaN" if np.isnan(value) else "+inf"
  assert report.origin is None
  assert str(report).startswith(f"batch['x'] holds 3 {kind} of 16")
  assert "mend the data" in str(report)
  params = {"w": [state.params["w"][0], state.params["w"][1].at[1, 1].set(value)]}
  report = hunt(step, state.replace(params=params))
  assert report.origin is None
  assert report.inputs.keys() == {"params['w'][1]"}
  assert "checkpoint" in str(report)


def test_data_that_does_not_reach_the_gradients_is_not_named():
  step, state = of_loss(lambda p, b: mean(p["w"] * b["x"][1:]), {"w": jnp.ones(4)})
  x = X.copy()
  x[0] = np.nan
  assert hunt(step, state, {"x": x}).finite


def scanned(fault):
  """Four layers of stacked weights, the third with a fault."""

  def layer(x, w):
    w, factor = w
    return fault(x @ w, factor), None

  def loss(p, b):
    return mean(jax.lax.scan(layer, b["x"], (p["w"], jnp.asarray([1.0, 1.0, 0.0, 1.0])))[0])

  return loss, {"w": jnp.stack([jnp.asarray(W)] * 4)}


@pytest.mark.parametrize("fault", ["forward", "backward"])
def test_a_fault_in_one_layer_of_a_scan_is_named_with_its_turn(fault):
  faults = {
    "forward": lambda x, factor: x / factor,
    "backward": lambda x, factor: jnp.sqrt(jnp.abs(x) * factor),
  }
  report = hunt(*of_loss(*scanned(faults[fault])))
  (turn,) = report.origin.iterations
  assert (turn.index, turn.length) == (2, 4)
  assert report.origin.primitive == "div"
  assert report.origin.backward == (fault == "backward")
  assert "iteration 3 of 4" in str(report)


@jax.custom_vjp
def faulty_rule(x):
  return x * 2


faulty_rule.defvjp(lambda x: (x * 2, x), lambda x, g: (g * log_zero(x),))

INSIDE = {
  "jit": (jax.jit(log_zero), False),
  "checkpoint": (jax.checkpoint(log_zero), False),
  "cond": (lambda x: jax.lax.cond(x.sum() > 0, log_zero, none, x), False),
  "while": (
    lambda x: (
      x + jax.lax.fori_loop(0, jnp.int32(x.sum() > 0) + 1, lambda i, y: log_zero(y), jax.lax.stop_gradient(x))
    ),
    False,
  ),
  "custom_vjp": (faulty_rule, True),
  "custom_jvp": (lambda x: jax.nn.relu(-x) + log_zero(jax.nn.relu(-x) + 1), False),
  "grad": (lambda x: jax.vjp(lambda x: log_zero(x), x)[0], False),
}


@pytest.mark.parametrize("inside", INSIDE)
@pytest.mark.parametrize("policy", ["fp16", "cast"])
def test_faults_inside_calls_branches_and_loops_are_named(inside, policy):
  call, backward = INSIDE[inside]

  def loss(p, b):
    with jax.named_scope("layer"):
      return mean(call(b["x"] @ p["w"]))  # line of: call

  report = hunt(*of_loss(loss, {"w": jnp.asarray(W)}, POLICIES[policy]))
  origin = report.origin
  assert (origin.primitive, origin.module, origin.line) == (
    "log",
    "layer",
    line_of("call" if backward else "log_zero"),
  )
  assert origin.backward == backward == ("loss" not in report.results)
  assert bool(origin.iterations) == (inside == "while")


def attend(p, b, mask):
  q = b["x"] @ p["w"]
  scores = mask(q @ q.T)
  return mean(jax.nn.softmax(scores) @ q)


CAUSAL = np.tri(4, dtype=bool)
MASKS = {
  "literal": lambda mask: lambda s: jnp.where(mask, s, -jnp.inf),
  "input": lambda mask: lambda s: s + jnp.where(mask, 0, -jnp.inf),
  "cast": lambda mask: lambda s: s + jnp.where(mask, 0.0, -1e9).astype(s.dtype),
}


@pytest.mark.parametrize("policy", ["fp16", "cast", "fp32"])
@pytest.mark.parametrize("mask", MASKS)
def test_infinities_of_a_mask_are_not_blamed_until_a_row_is_masked_everywhere(mask, policy):
  bias = lambda keep: np.where(keep, 0, -np.inf).astype(np.float32)

  def loss(p, b):
    if mask == "input":
      return attend(p, b, lambda s: s + b["bias"])
    return attend(p, b, MASKS[mask](b["keep"]))

  step, state = of_loss(loss, {"w": jnp.asarray(W)}, POLICIES[policy])
  batch = lambda keep: {"x": X, "keep": keep, "bias": bias(keep)}
  assert hunt(step, state, batch(CAUSAL)).finite
  nothing = CAUSAL.copy()
  nothing[2] = False
  report = hunt(step, state, batch(nothing))
  if mask == "cast" and policy != "cast":  # -1e9 stays finite in float32
    assert report.finite
    return
  assert report.origin.primitive == ("sub" if mask != "cast" else report.origin.primitive)
  assert not report.inputs
  if mask != "cast":
    assert "made NaN of infinities" in str(report)
    assert report.origin.nonfinite.nan == 4


def test_a_fault_beside_a_mask_is_named_and_the_mask_is_not():
  loss = lambda p, b: attend(p, b, MASKS["literal"](CAUSAL)) + mean(log_zero(b["x"] @ p["w"]))
  report = hunt(*of_loss(loss, {"w": jnp.asarray(W)}))
  assert report.origin.line == line_of("log_zero")
  assert report.others == ()


@pytest.mark.parametrize("value", [jnp.inf, jnp.nan])
def test_what_the_program_itself_writes_is_named_where_it_leads_to_the_loss(value):
  def loss(p, b):
    return mean(jnp.where(b["x"] > 1, b["x"] @ p["w"], value))  # line of: written

  report = hunt(*of_loss(loss, {"w": jnp.asarray(W)}))
  assert report.origin.constant
  assert "that the program itself holds" in str(report)
  assert report.origin.line == line_of("written")
  assert report.results.keys() == {"loss"}


def test_independent_faults_are_listed_once_each_and_the_first_is_the_first_in_the_program():
  loss = lambda p, b: mean(exp_large(b["x"] @ p["w"])) + mean(log_zero(b["x"] * p["v"]))
  report = hunt(*of_loss(loss, {"w": jnp.asarray(W), "v": jnp.ones(4)}))
  assert report.origin.line == line_of("exp_large")
  assert line_of("log_zero") in {other.line for other in report.others}
  assert len(report.others) <= 8


def test_the_micro_batch_of_a_fault_is_named():
  step, state = build("plain", ["none", "overflow"], FP16, accumulate=4)
  x = X * 1e-4
  x[2] = X[2]
  report = hunt(step, state, {"x": x})
  (turn,) = report.origin.iterations
  assert (turn.index, turn.length, turn.micro_batch) == (2, 4, True)
  assert report.origin.line == line_of("overflow")
  assert "micro-batch 3 of 4" in str(report)


@pytest.mark.parametrize("mapped", [False, True])
def test_a_batch_over_several_devices_is_searched_and_the_state_is_left_alone(mapped):
  mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
  batch = {"x": jax.device_put(X, NamedSharding(mesh, PartitionSpec("data")))}
  run = overflow
  if mapped:
    spec = PartitionSpec("data")
    run = jax.shard_map(log_zero, mesh=mesh, in_specs=spec, out_specs=spec)
  step, state = of_loss(lambda p, b: mean(run(b["x"] @ p["w"])), {"w": jnp.asarray(W)}, FP16)
  state = jax.device_put(state, NamedSharding(mesh, PartitionSpec()))
  origin = hunt(step, state, batch).origin
  assert (origin.primitive == "shard_map") == mapped
  assert mapped or origin.line == line_of("overflow")
  assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(state))


SAFE = (
  lambda x: jnp.sin(x),
  lambda x: jnp.tanh(x),
  lambda x: x * 0.5,
  lambda x: x + 1,
  lambda x: jnp.where(x > 0, x, -x),
)
PLANTED = (
  lambda x: 1 / (x * 0),
  lambda x: jnp.log(x * 0 - 1),
  lambda x: jnp.exp(x * 0 + 1e3),
  lambda x: jnp.arcsin(x * 0 + 2),
)


@pytest.mark.slow
@settings(max_examples=12, deadline=None, derandomize=True)
@given(st.lists(st.integers(0, 4), max_size=6), st.lists(st.integers(0, 4), max_size=3), st.integers(0, 3))
def test_one_fault_in_a_chain_of_operations_is_found_at_its_line(before, after, planted):
  chain = [*(SAFE[i] for i in before), PLANTED[planted], *(SAFE[i] for i in after)]

  def loss(p, b):
    x = p["w"]
    for operation in chain:
      x = operation(x)
    return x.sum()

  step, state = of_loss(loss, {"w": jnp.ones(4)})
  report = hunt(step, state, {})
  assert report.origin.line == f"test_find_nonfinite.py:{PLANTED[planted].__code__.co_firstlineno}"
