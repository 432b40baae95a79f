"""`mpjax.tune` for several devices: what gradients and parameters that cross in few bits do, and when to."""

import dataclasses
import functools

import jax
import ml_dtypes
import numpy as np
import optax
import pytest
import yaml
from jax.sharding import AbstractMesh, AxisType

import mpjax
from tests.planner._plans import a_plan, a_time
from tests.tuning._planted_models import planted

AXES, AUTO = ("data", "fsdp"), (AxisType.Auto,) * 2
MESH = AbstractMesh((2, 4), AXES, axis_types=AUTO)
REDUCED = {"base": "bf16", "reduce_dtype": "bfloat16"}
GATHERED = {"base": "bf16", "gather_dtype": "float8_e4m3fn"}
NARROW = {"base": "fp32", "reduce_dtype": "bfloat16"}
PARAMS, [BATCH, _], LOSS = planted()


def on_mesh(loss_fn=LOSS, mesh=MESH, params=PARAMS):
  """A step on a mesh, whose devices need not be there, and a state on the device that is."""
  step = mpjax.make_train_step(loss_fn, optax.sgd(0.1), "bf16", mesh=mesh)
  return step, mpjax.make_train_step(loss_fn, optax.sgd(0.1), "bf16").init(params)


def errors_of(*policies, loss_fn=LOSS, mesh=MESH):
  tune = functools.partial(mpjax.tune, *on_mesh(loss_fn, mesh), [BATCH], target="h200:8")
  return [trial.error.gradient for trial in tune(candidates=policies, tolerance=1e6).table]


@functools.cache
def usual_errors():
  """Of bfloat16, with reduced sums, with gathered parameters, and of the sums alone."""
  return errors_of("bf16", REDUCED, GATHERED, NARROW)


def relative(grads, exact):
  pairs = [(np.asarray(a, np.float64), np.asarray(b, np.float64)) for a, b in zip(grads, exact, strict=True)]
  return (sum(np.sum((a - b) ** 2) for a, b in pairs) / sum(np.sum(b**2) for _, b in pairs)) ** 0.5


@pytest.mark.parametrize("is_sum", [False, True], ids=["mean", "sum"])
def test_gradients_are_rounded_and_added_device_by_device(is_sum):
  loss = lambda params, batch: LOSS(params, batch) * (len(batch["x"]) if is_sum else 1)
  gradient = jax.jit(jax.grad(loss))
  devices = []
  for i in range(8):
    rows = {name: x[32 * i : 32 * (i + 1)] for name, x in BATCH.items()}
    devices.append([np.asarray(g) for g in jax.tree.leaves(gradient(PARAMS, rows))])
  exact = [np.sum(each, 0, np.float64) for each in zip(*devices, strict=True)]
  dtypes = (ml_dtypes.bfloat16, np.float16)
  found = errors_of(*({"base": "fp32", "reduce_dtype": np.dtype(d).name} for d in dtypes), loss_fn=loss)
  for dtype, error in zip(dtypes, found, strict=True):
    add = lambda a, b, dtype=dtype: [(x + y).astype(dtype) for x, y in zip(a, b, strict=True)]
    crossing = [[g.astype(dtype) for g in grads] for grads in devices]
    # Over the four of `fsdp`, over which all of them are divided, and then over the two of `data`.
    narrow = add(functools.reduce(add, crossing[:4]), functools.reduce(add, crossing[4:]))
    expected = relative(narrow, exact)
    assert 1e-5 < expected < 0.01
    assert error == pytest.approx(expected, rel=0.02), dtype


@pytest.mark.parametrize("factor", [1e-24, 1e22])
def test_a_loss_of_any_size_has_the_same_error(factor):
  [found] = errors_of(NARROW, loss_fn=lambda params, batch: factor * LOSS(params, batch))
  assert found == pytest.approx(usual_errors()[-1], rel=0.05)


def test_what_the_policy_and_the_devices_round_adds_up():
  alone, crossing, _, only = usual_errors()
  assert crossing == pytest.approx((alone**2 + only**2) ** 0.5, rel=0.1)


def test_parameters_are_those_that_devices_gather():
  found = usual_errors()[2]
  mesh = jax.make_mesh((2, 4), AXES, axis_types=AUTO)
  step = mpjax.make_train_step(LOSS, optax.sgd(0.1), GATHERED, mesh=mesh)
  _, there = step.gradients(step.init(PARAMS), BATCH)
  exact = jax.jit(jax.grad(LOSS))(PARAMS, BATCH)
  assert found == pytest.approx(relative(jax.tree.leaves(there), jax.tree.leaves(exact)), rel=0.02)
  # Whole parameters are not gathered, and so not rounded.
  [whole] = errors_of(GATHERED, mesh=AbstractMesh((8, 1), AXES, axis_types=AUTO))
  assert whole < found / 4


def test_a_loss_scale_falls_until_sums_between_devices_are_finite():
  large = lambda params, batch: 30 * LOSS(params, batch)
  policy = {"base": "fp16", "reduce_dtype": "float16", "loss_scaling": {"init_scale": 2.0**24}}
  result = mpjax.tune(*on_mesh(large), [BATCH], target="h200:8", candidates=[policy], tolerance=1.0)
  error = result.table[0].error
  assert error.gradient < 0.01
  assert 1 <= error.loss_scale < 2.0**24


def seconds_of(matrix, wire):
  """A planner of steps that matrix units and links take so long for, in bfloat16 and float32."""

  def plan_of(policy, recompute):
    products = matrix * {"float32": 2.0}.get(policy.compute_dtype.name, 1.0)
    excluded = sum(not override.fp8 for _, override in policy.overrides) / 6
    parts = {
      "matrix units": products * (0.5 + 0.5 * excluded if policy.fp8 else 1.0),
      "interconnect": wire * (0.5 if policy.reduce_dtype else 1.0) * (0.75 if policy.gather_dtype else 1.0),
    }
    return dataclasses.replace(a_plan(compiled=False), time=a_time(max(parts.values())))

  return plan_of


@pytest.fixture(scope="module")
def searched(tmp_path_factory):
  """Returns the result of a search, which measures only what no search before it did."""
  file = tmp_path_factory.mktemp("searched") / "trials.jsonl"

  def search(tolerance=0.25, **of):
    common = {"target": "h200:8", "tolerance": tolerance, "trials": file}
    return mpjax.tune(*on_mesh(), [BATCH], plan_of=seconds_of(**of), **common)

  return search


def test_nothing_crosses_in_fewer_bits_where_links_do_not_decide(searched):
  result = searched(matrix=1.0, wire=0.1)
  assert (result.policy.reduce_dtype, result.policy.gather_dtype) == (None, None)
  assert not any("dtype" in trial.label for trial in result.table)
  assert result.policy.fp8 is not None


def test_what_crosses_is_chosen_where_links_decide(searched):
  result = searched(matrix=0.1, wire=1.0)
  assert result.chosen.label == "bf16 + reduce_dtype=bfloat16 + gather_dtype=float8_e4m3fn"
  assert result.policy == mpjax.get_policy(REDUCED | GATHERED)
  assert mpjax.get_policy(yaml.safe_load(result.yaml)["policy"]) == result.policy
  assert "reduce_dtype: bfloat16  # gradients cross devices in half the bytes" in result.yaml


def test_what_crosses_stays_in_float32_where_the_tolerance_is_small(searched):
  result = searched(matrix=0.1, wire=1.0, tolerance=0.0005)
  assert result.policy == mpjax.get_policy("fp32")
  assert [t.label for t in result.table if not t.passes][-1] == "fp32 + gather_dtype=float8_e4m3fn"


def test_presets_that_cost_the_same_may_leave_different_room_for_what_crosses(searched):
  alone, crossing, *_ = usual_errors()
  result = searched(matrix=0.1, wire=1.0, tolerance=(alone + crossing) / 2)
  assert not next(t for t in result.table if t.label == "bf16 + reduce_dtype=bfloat16").passes
  assert result.chosen.label == "fp16 + reduce_dtype=bfloat16"
  assert result.chosen.cost.seconds == 0.5


@pytest.mark.parametrize("wire", [0.8, 1.5])
def test_products_are_chosen_once_the_links_do_not_decide_and_what_crosses_is_looked_at_again(wire, searched):
  # Halved, links of 1.5 take less than products in bfloat16, so that FP8 gains again, and then gathers in FP8 do.
  result = searched(matrix=1.0, wire=wire)
  assert result.policy.fp8 is not None
  assert result.policy.across_devices["reduce_dtype"] == "bfloat16"
  tried = {trial.label for trial in result.table}
  assert wire < 1 or "fp8 + reduce_dtype=bfloat16 + gather_dtype=float8_e4m3fn" in tried
  assert result.chosen.cost.seconds < 0.8
  assert mpjax.get_policy(yaml.safe_load(result.yaml)["policy"]) == result.policy


def test_one_device_has_nothing_to_cross(tmp_path):
  kept, lines = {"trials": tmp_path / "trials.jsonl", "tolerance": 0.25, "candidates": ["bf16", REDUCED]}, []
  first = mpjax.tune(*on_mesh(), [BATCH], target="h200:8", **kept)
  # Errors that do not depend on the devices are those of any number of them.
  half = on_mesh(mesh=AbstractMesh((2, 2), AXES, axis_types=AUTO))
  again = mpjax.tune(*half, [BATCH], target="h200:8", progress=lines.append, **kept)
  assert lines == ["float32", "policy 2 of 2: bf16,reduce_dtype=bfloat16"]
  assert again.table[0].error == first.table[0].error
  with pytest.raises(ValueError, match=r"policy key reduce_dtype='bfloat16' .* needs a mesh"):
    mpjax.tune(LOSS, PARAMS, [BATCH], target="h200", candidates=[REDUCED])
  alone = mpjax.tune(LOSS, PARAMS, [BATCH], target="h200:8", candidates=["fp32"], tolerance=0.25)
  assert alone.notes == ("h200:8 has 8 devices, and the step runs on 1: a mesh uses the others",)


def test_a_mesh_and_rows_that_do_not_fit_are_named():
  tune = functools.partial(mpjax.tune, *on_mesh(), tolerance=1.0)
  with pytest.raises(ValueError, match="a mesh of 8 devices is larger than target h200, which has 1"):
    tune([BATCH], target="h200", candidates=["bf16"])
  odd = {name: x[:100] for name, x in BATCH.items()}
  with pytest.raises(ValueError, match=r"expected a first dimension that can be divided over 8 devices"):
    tune([odd], target="h200:8", candidates=[REDUCED])


def test_a_mesh_that_is_not_here_may_be_set_explicitly():
  given = *on_mesh(), [BATCH]
  with jax.sharding.use_abstract_mesh(MESH.update(axis_types=(AxisType.Explicit,) * 2)):
    result = mpjax.tune(*given, target="h200:8", candidates=[REDUCED], tolerance=1.0)
  assert 0 < result.chosen.error.gradient < 0.02


@pytest.mark.parametrize("types", [AxisType.Auto, AxisType.Explicit])
def test_a_state_on_a_mesh_has_the_errors_of_one_device(types):
  expected = usual_errors()[1]
  mesh = jax.make_mesh((2, 4), AXES, axis_types=(types,) * 2)
  with jax.set_mesh(mesh):
    step = mpjax.make_train_step(LOSS, optax.sgd(0.1), "bf16", mesh=mesh)
    state = step.init(PARAMS)
    laid = jax.device_put(BATCH, step.layout.batch_sharding)
    result = mpjax.tune(step, state, [laid], target="h200:8", candidates=[REDUCED], tolerance=1.0)
    assert result.table[0].error.gradient == pytest.approx(expected, rel=0.02)
    assert not any(x.is_deleted() for x in jax.tree.leaves((state, laid)))
