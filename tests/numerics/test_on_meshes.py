"""The tools on steps with meshes of 4 and 8 devices: they find what they find without the mesh."""

import collections
import contextlib
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, PartitionSpec as P

import mpjax
from mpjax.numerics import find_nonfinite, inspect_numerics
from mpjax.numerics._tensors import KINDS
from tests.numerics._faults import line_of

RNG = np.random.default_rng(0)
BATCH = {
  "x": RNG.normal(size=(16, 32)).astype(np.float32),
  "y": RNG.normal(size=(16, 4)).astype(np.float32),
  "counts": RNG.random(16) > 0.4,
}
BROKEN = {**BATCH, "x": np.where(np.arange(16)[:, None] == 5, 0, BATCH["x"])}
PARAMS = {
  "in": RNG.normal(size=(32, 32)).astype(np.float32) / 6,
  "out": RNG.normal(size=(32, 4)).astype(np.float32) / 6,
}
FP16 = {"base": "fp16", "loss_scaling": {"init_scale": 256.0}}


def errors(p, batch, tanh=jnp.tanh):
  return ((tanh(batch["x"] @ p["in"]) @ p["out"] - batch["y"]) ** 2).mean(1)


def plain(p, batch):
  return errors(p, batch).mean()


def average(p, batch, tanh=jnp.tanh):
  found = errors(p, batch, tanh)
  metrics = {"all": mpjax.Average(found.sum(), jnp.float32(len(found)))}
  return mpjax.Average((found * batch["counts"]).sum(), batch["counts"].sum()), metrics


def divided(p, batch):
  """The same, with a constraint on the axis that divides products."""
  return average(p, batch, lambda x: jax.lax.with_sharding_constraint(jnp.tanh(x), P(None, "tensor")))


def logarithm(p, batch):
  found = jnp.log((batch["x"] @ p["in"]) ** 2).mean(1)  # line of: a row of zeros
  return mpjax.Average(found.sum(), jnp.float32(len(found)))


# Which types of the step have axes: those of `nothing`, the `batch`, or `all`.
Case = collections.namedtuple("Case", "loss axes explicit accumulate options", defaults=["nothing", 1, {}])
OVER_TENSOR = {"sharding": {"in": ("fsdp", "tensor"), "out": ("tensor", None)}}
BLOCK = {"gather": "block"}
CASES = [
  Case(average, {"data": 4}),
  Case(plain, {"fsdp": 8}, accumulate=2),
  Case(average, {"data": 4, "fsdp": 2}, accumulate=2, options=BLOCK),
  Case(average, {"data": 2, "fsdp": 4}, "batch", accumulate=2),
  Case(divided, {"data": 2, "fsdp": 2, "tensor": 2}, "all", accumulate=2, options=OVER_TENSOR | BLOCK),
]
on_meshes = lambda cases: pytest.mark.parametrize(
  "case", cases, ids=lambda case: "-".join([case.loss.__name__, *case.axes, case.explicit])
)


@contextlib.contextmanager
def on_mesh(case, loss):
  """Yields a step, its state, and what places a batch; inside `jax.set_mesh` if all axes are explicit."""
  types = (AxisType.Auto if case.explicit == "nothing" else AxisType.Explicit,) * len(case.axes)
  sizes = tuple(case.axes.values())
  mesh = jax.make_mesh(sizes, tuple(case.axes), devices=jax.devices()[: math.prod(sizes)], axis_types=types)
  step = step_of(loss, mesh=mesh, accumulate=case.accumulate, **case.options)
  at = jax.NamedSharding(mesh, P(tuple(axis for axis in case.axes if axis != "tensor")))
  with jax.set_mesh(mesh) if case.explicit == "all" else contextlib.nullcontext():
    yield step, step.init(PARAMS), lambda batch: jax.device_put(batch, at)


def step_of(loss, **options):
  return mpjax.make_train_step(loss, optax.adam(1e-2), FP16, **options)


@functools.cache
def alone(loss, accumulate):
  """Returns the same step without a mesh, and its state."""
  step = step_of(average if loss is divided else loss, accumulate=accumulate)
  return step, step.init(PARAMS)


@functools.cache
def inspected_alone(loss, accumulate):
  return inspect_numerics(*alone(loss, accumulate), BATCH, advise=False)


def by_hand(loss, accumulate):
  """Returns the mean of the loss over micro-batches, in float64."""
  found = errors(*({k: np.float64(x) for k, x in tree.items()} for tree in (PARAMS, BATCH)), tanh=np.tanh)
  counts = np.ones(16) if loss is plain else BATCH["counts"]
  return np.mean([np.average(found[i::accumulate], weights=counts[i::accumulate]) for i in range(accumulate)])


def tensors(report):
  return {(t.kind, t.module, t.name, t.path): t for t in report.tensors}


@on_meshes(CASES)
def test_an_inspection(case):
  with on_mesh(case, case.loss) as (step, state, place):
    report = inspect_numerics(step, state, place(BATCH), advise=False)
  assert report.reference_loss == pytest.approx(by_hand(case.loss, case.accumulate), rel=1e-5)
  assert report.loss == pytest.approx(report.reference_loss, rel=1e-3)
  found, expected = tensors(report), tensors(inspected_alone(case.loss, case.accumulate))
  assert {kind for kind, *_ in found} == {*KINDS}
  assert found.keys() == expected.keys()
  for key, tensor in found.items():
    assert tensor.magnitudes.count == expected[key].magnitudes.count, key
    assert (tensor.norm or 0.0) == pytest.approx(expected[key].norm or 0.0, rel=1e-3), key
    if tensor.kind != "update":
      assert tensor.error == pytest.approx(expected[key].error, rel=0.2, abs=1e-4), key


@on_meshes([case for case in CASES if case.explicit != "nothing"])
def test_a_search_on_explicit_axes(case):
  expected = find_nonfinite(*alone(logarithm, case.accumulate), BROKEN, reference=False)
  with on_mesh(case, logarithm) as (step, state, place):
    assert find_nonfinite(step, state, place(BATCH)).finite
    found = find_nonfinite(step, state, place(BROKEN), reference=False)
  one, other = found.origin, expected.origin
  assert (one.primitive, one.line) == ("log", line_of("a row of zeros", __file__))
  assert (one.nonfinite, one.iterations) == (other.nonfinite, other.iterations)
  assert found.results == expected.results


@on_meshes([case for case in CASES if case.explicit == "all"])
def test_an_iterator_makes_its_batches_on_the_axes_that_are_set(case):
  ones = lambda x: jnp.ones((), x.dtype, out_sharding=P())
  with on_mesh(case, case.loss) as (step, state, place):
    batches = (jax.tree.map(lambda x: x * ones(x), place(BATCH)) for _ in range(2))
    report = inspect_numerics(step, state, batches, advise=False)
  assert report.batches == 2 * case.accumulate
  assert report.reference_loss == pytest.approx(by_hand(case.loss, case.accumulate), rel=1e-5)
