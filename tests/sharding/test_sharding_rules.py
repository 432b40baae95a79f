"""Meshes of a training step, and where parameters lie on them: patterns, the model's rule, the default."""

import jax
import numpy as np
import optax
import pytest
from jax.sharding import AbstractMesh, AxisType, PartitionSpec as P

import mpjax
from mpjax import sharding
from mpjax.optim import Quantized
from mpjax.sharding import ShardingRules, check_mesh, specs_like


def test_axes_become_those_that_the_compiler_divides():
  for mesh in (jax.make_mesh((2, 4), ("data", "fsdp")), AbstractMesh((2, 4), ("data", "fsdp"))):
    checked = check_mesh(mesh)
    assert checked.axis_types == (AxisType.Auto,) * 2
    assert checked.shape == mesh.shape
    assert check_mesh(checked) is checked


def says(words, function, *args):
  """Whether an error has all of some words."""
  with pytest.raises(ValueError) as error:
    function(*args)
  return all(word in str(error.value) for word in words)


def test_what_is_no_mesh_of_a_step_is_named():
  assert says(["mesh=8", "jax.make_mesh"], check_mesh, 8)
  assert says(["'rows'", "data, fsdp"], check_mesh, AbstractMesh((8,), ("rows",)))


def test_a_batch_is_divided_over_data_and_fsdp():
  sizes = {"data": 3, "fsdp": 2, "tensor": 4}
  for names, axes, shards in (
    (("data", "fsdp", "tensor"), ("data", "fsdp"), 6),
    (("tensor",), (), 1),
    (("fsdp", "tensor"), ("fsdp",), 2),
  ):
    mesh = AbstractMesh(tuple(sizes[name] for name in names), names)
    assert (sharding.axes_of_batch(mesh), sharding.batch_shards(mesh)) == (axes, shards), names
    assert sharding.batch_spec(mesh) == P(axes or None)
  assert mpjax.batch_axes() == ()  # outside of a step


def shape(*dims):
  return jax.ShapeDtypeStruct(dims, np.float32)


BLOCKS = [{"kernel": shape(64, 128)}, {"kernel": shape(128, 6)}]
PARAMS = {"in": shape(64, 64), "scale": shape(64), "blocks": BLOCKS, "small": shape(8, 8)}


def mesh(data=1, fsdp=1, tensor=1):
  return AbstractMesh((data, fsdp, tensor), ("data", "fsdp", "tensor"))


def test_patterns_come_before_the_models_rule_and_that_before_the_largest_dimension():
  kernels = lambda path, shape: ("tensor",) + (None,) * (len(shape) - 1) if "kernel" in path else None
  everywhere = lambda path, shape: ("fsdp",) * len(shape)
  by_default = {"in": P("fsdp"), "scale": P(), "small": P()}  # one of one dimension, and one of 64 entries
  blocks = lambda *specs: by_default | {"blocks": [{"kernel": spec} for spec in specs]}
  patterns = {"blocks/0": ("fsdp", "tensor"), "small": None}
  for params, rules, sizes, expected in (
    (PARAMS, ShardingRules(), {"data": 2, "fsdp": 4}, blocks(P(None, "fsdp"), P())),  # 768 entries are whole
    ({"w": shape(4096, 3), "v": shape(63, 65)}, ShardingRules(), {"fsdp": 4}, {"w": P("fsdp"), "v": P()}),
    (
      PARAMS,
      ShardingRules(patterns, kernels),
      {"fsdp": 4, "tensor": 2},
      blocks(P("fsdp", "tensor"), P("tensor")),
    ),
    # What a shape does not allow of the model's rule is left out, and an axis of one device divides nothing.
    ({"w": shape(8, 6)}, ShardingRules(model=everywhere), {"fsdp": 4}, {"w": P("fsdp")}),
    ({"w": shape(64, 64)}, ShardingRules({"w": ("fsdp", "tensor")}), {"tensor": 2}, {"w": P(None, "tensor")}),
  ):
    assert rules.specs(params, mesh(**sizes)) == expected, expected


def test_unfit_rules_are_named():
  for rules, words in (
    ({"nothing": ("fsdp",)}, ["'nothing' matches no parameter", "blocks/0/kernel"]),
    ({"in": ("fsdp",)}, ["in[64, 64]", "each of its 2 dimensions"]),
    ({"blocks/1": (None, "fsdp")}, ["blocks/1/kernel[128, 6]", "dimension of 6", "fsdp=4"]),
    ({"in": ("data", None)}, ["'in'", "fsdp, tensor or null"]),
    ({"in": "fsdp"}, ["'in'", "fsdp, tensor or null"]),
    ({"in": ("fsdp", "fsdp")}, ["'in'", "twice"]),
    ({"in(": ()}, ["'in('", "regular expression"]),
  ):
    assert says(words, lambda rules=rules: ShardingRules(rules).specs(PARAMS, mesh(fsdp=4))), rules


def state_of(tx, params):
  return jax.eval_shape(lambda: tx.init(jax.tree.map(lambda x: jax.numpy.zeros(x.shape), params)))


def test_an_optimisers_state_lies_as_its_parameters_do():
  specs = ShardingRules().specs(PARAMS, mesh(fsdp=4))
  laid = specs_like(state_of(optax.adam(1e-3), PARAMS), PARAMS, specs, mesh(fsdp=4))
  assert laid[0].mu == laid[0].nu == specs
  assert laid[0].count == P()
  factored = {"mu": {"in": shape(64)}}  # a parameter's path, another shape
  assert specs_like(factored, PARAMS, specs, mesh(fsdp=4)) == {"mu": {"in": P()}}


def test_quantised_state_lies_as_its_parameters_do_and_a_scalar_is_whole():
  params = {"rows": shape(64, 48), "columns": shape(6, 1024), "narrow": shape(6, 256), "scalar": shape()}
  specs = {"rows": P("fsdp"), "columns": P(None, "fsdp"), "narrow": P(None, "fsdp"), "scalar": P()}
  state = state_of(mpjax.quantized_state(optax.adam(1e-3), min_size=0), params)
  laid = specs_like(state, params, specs, mesh(fsdp=4)).inner_state[0].nu
  assert laid == {
    "rows": Quantized(P("fsdp"), P("fsdp")),
    "columns": Quantized(P(None, "fsdp"), P(None, "fsdp")),
    "narrow": Quantized(P(None, "fsdp"), P()),  # two groups on four devices
    "scalar": Quantized(P(), P()),
  }
