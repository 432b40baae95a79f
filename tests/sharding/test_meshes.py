"""Meshes from numbers of devices, also of several slices, and the rows that each process feeds them."""

import itertools
import os

import jax
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import NamedSharding

from mpjax.sharding import axis_sizes, batch_spec, make_mesh, place_rows, rows_of_process


@pytest.mark.parametrize(
  ("asked", "devices", "expected"),
  [
    ((-1, 1, 1), 8, (8, 1, 1)),
    ((2, -1, 2), 8, (2, 2, 2)),
    ((2, 1, 2), 8, (2, 1, 2)),
    ((3, 1, 1), 2, "data=3: there are 2 devices"),
    ((1, -1, 2), 1, "fsdp=-1, tensor=2: there is 1 device"),
    ((-1, 3, 1), 8, "data=-1, fsdp=3: there are 8 devices, which cannot be divided by 3"),
  ],
)
def test_minus_one_is_what_is_left(asked, devices, expected):
  axes = dict(zip(("data", "fsdp", "tensor"), asked, strict=True))
  if isinstance(expected, tuple):
    assert tuple(axis_sizes(axes, devices).values()) == expected
    return
  with pytest.raises(ValueError, match=expected):
    axis_sizes(axes, devices)


@pytest.fixture(scope="module")
def slices():
  """Eight devices of two described TPU slices."""
  pytest.importorskip("libtpu")
  os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
  os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
  return topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2", num_slices=2).devices


@pytest.mark.parametrize(
  ("sizes", "over"),
  [((-1, 1, 1), "data"), ((2, 4, 1), "data"), ((4, 1, 2), "data"), ((1, 8, 1), "fsdp"), ((1, 2, 4), "fsdp")],
)
def test_slices_divide_the_rows_first_and_no_product(slices, sizes, over):
  mixed = [*slices[::2], *slices[1::2]]
  mesh = make_mesh(dict(zip(("data", "fsdp", "tensor"), sizes, strict=True)), mixed)
  axis = mesh.axis_names.index(over)
  numbers = np.moveaxis(np.vectorize(lambda device: device.slice_index)(mesh.devices), axis, 0)
  half = len(numbers) // 2
  assert (numbers[:half] == 0).all()
  assert (numbers[half:] == 1).all()
  assert set(mesh.devices.flat) == set(slices)


def test_what_slices_cannot_be_divided_over_is_refused(slices):
  uneven = sorted(slices, key=lambda device: device.slice_index)[:6]
  with pytest.raises(ValueError, match="data=6: 2 slices cannot be divided alike"):
    make_mesh({"data": 6, "fsdp": 1, "tensor": 1}, uneven)
  with pytest.raises(ValueError, match=r"tensor=8: 2 slices cannot be divided over data=1 and fsdp=1"):
    make_mesh({"data": 1, "fsdp": 1, "tensor": 8}, slices)


class Elsewhere:
  """A sharding of which this process holds the devices of some rows."""

  def __init__(self, sharding, held):
    self.sharding, self.held = sharding, held

  def addressable_devices_indices_map(self, shape):
    every = self.sharding.devices_indices_map(shape)
    return {device: index for device, index in every.items() if device in self.held}


def test_every_row_is_fed_whatever_the_number_of_processes_and_slices(slices):
  for sizes, processes in itertools.product([(8, 1, 1), (2, 4, 1), (2, 2, 2)], [1, 2, 4, 8]):
    mesh = make_mesh(dict(zip(("data", "fsdp", "tensor"), sizes, strict=True)), slices)
    sharding = NamedSharding(mesh, batch_spec(mesh))
    parts = (slices[i * 8 // processes : (i + 1) * 8 // processes] for i in range(processes))
    fed = [np.arange(16)[rows_of_process(Elsewhere(sharding, set(held)), 16)] for held in parts]
    assert set(np.concatenate(fed)) == set(range(16)), (sizes, processes)


def test_rows_are_placed_as_they_are():
  mesh = make_mesh({"data": 2, "fsdp": 2, "tensor": 2}, jax.devices())
  sharding, batch = NamedSharding(mesh, batch_spec(mesh)), {"x": np.arange(8.0)}
  rows = rows_of_process(sharding, 8)
  assert rows == slice(0, 8)
  placed = place_rows(batch, sharding, 8)["x"]
  assert placed.sharding == sharding
  np.testing.assert_array_equal(placed, batch["x"])
