"""Meshes of a training step: which axes they may have, and how they divide a batch."""

import jax
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import mpjax
from mpjax.sharding import axes_of_batch, batch_shards, batch_spec, check_mesh


@pytest.mark.parametrize("mesh", [jax.make_mesh((2, 4), ("data", "fsdp")), jax.sharding.AbstractMesh((2, 4), ("data", "fsdp"))])  # fmt: skip
def test_axes_become_those_that_the_compiler_divides(mesh):
  checked = check_mesh(mesh)
  assert checked.axis_types == (AxisType.Auto,) * 2
  assert checked.shape == mesh.shape
  assert check_mesh(checked) is checked


@pytest.mark.parametrize(
  ("mesh", "words"),
  [(8, ["mesh=8", "jax.make_mesh"]), (jax.sharding.AbstractMesh((8,), ("rows",)), ["'rows'", "data, fsdp"])],
)
def test_what_is_no_mesh_of_a_step_is_named(mesh, words):
  with pytest.raises(ValueError) as error:
    check_mesh(mesh)
  assert all(word in str(error.value) for word in words), error.value


@pytest.mark.parametrize(
  ("names", "axes", "shards"),
  [
    (("data", "fsdp", "tensor"), ("data", "fsdp"), 6),
    (("tensor",), (), 1),
    (("fsdp", "tensor"), ("fsdp",), 2),
  ],
)
def test_a_batch_is_divided_over_data_and_fsdp(names, axes, shards):
  sizes = {"data": 3, "fsdp": 2, "tensor": 4}
  mesh = jax.sharding.AbstractMesh(tuple(sizes[name] for name in names), names)
  assert axes_of_batch(mesh) == axes
  assert batch_shards(mesh) == shards
  assert batch_spec(mesh) == P(axes or None)


def test_outside_of_a_step_no_axes_divide_the_batch():
  assert mpjax.batch_axes() == ()
