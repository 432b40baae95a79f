"""Meshes: their axes, how they are made of devices, and which rows of a batch each process feeds them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from mpjax._types import Mesh, PyTree

# Axes: copies of the model; parameters divided over devices with different rows; parts of one product.
AXES = ("data", "fsdp", "tensor")
BATCH_AXES = ("data", "fsdp")

# Rows of a batch, by position.
Rows = slice | np.ndarray


def axis_sizes(asked: Mapping[str, int], devices: int) -> dict[str, int]:
  """Returns the number of devices along each axis, with -1 on one axis replaced by all that are left.

  Raises:
    ValueError: if there are too few devices, or those that are left cannot be divided.
  """
  fixed = math.prod(n for n in asked.values() if n != -1)
  there = "there is 1 device" if devices == 1 else f"there are {devices} devices"
  if fixed > devices:
    raise ValueError(f"{_shown(asked)}: {there}")
  if -1 in asked.values() and devices % fixed:
    raise ValueError(f"{_shown(asked)}: {there}, which cannot be divided by {fixed}")
  return {axis: devices // fixed if n == -1 else n for axis, n in asked.items()}


def make_mesh(asked: Mapping[str, int], devices: Sequence[jax.Device]) -> jax.sharding.Mesh:
  """Makes a mesh of devices of one slice or several, with axes that the compiler divides automatically.

  The connection between slices is slower than within one. So `data` is divided over slices first, then
  `fsdp`; the parts of one product stay within a slice. In one process the mesh may leave out the last
  devices.

  Raises:
    ValueError: as for `axis_sizes`; if a process has no part; or if slices cannot be divided over the axes.
  """
  sizes = axis_sizes(asked, len(devices))
  count, processes = math.prod(sizes.values()), len({device.process_index for device in devices})
  if count < len(devices) and processes > 1:
    raise ValueError(
      f"{_shown(asked)}: {processes} processes have {len(devices)} devices, and each has to take part; use "
      "-1 for one axis"
    )
  used, types = devices[:count], (AxisType.Auto,) * len(AXES)
  slices = len({getattr(device, "slice_index", 0) for device in used})
  if slices == 1:
    return jax.make_mesh(tuple(sizes.values()), AXES, devices=used, axis_types=types)
  over_data = math.gcd(sizes["data"], slices)
  over_fsdp = math.gcd(sizes["fsdp"], slices // over_data)
  if over_data * over_fsdp < slices:
    raise ValueError(
      f"{_shown(asked)}: {slices} slices cannot be divided over data={sizes['data']} and "
      f"fsdp={sizes['fsdp']}: expected a multiple of {slices} for one of them"
    )
  outer = (over_data, over_fsdp, 1)
  inner = tuple(size // n for size, n in zip(sizes.values(), outer, strict=True))
  try:
    grid = mesh_utils.create_hybrid_device_mesh(inner, outer, used)
  except ValueError as error:  # slices of unequal size
    raise ValueError(f"{_shown(asked)}: {slices} slices cannot be divided alike: {error}") from error
  return jax.sharding.Mesh(grid, AXES, axis_types=types)


def _shown(asked: Mapping[str, int]) -> str:
  return ", ".join(f"{axis}={n}" for axis, n in asked.items() if n != 1) or "data=1"


def batch_axes() -> tuple[str, ...]:
  """Returns the mesh axes over which a training step has divided the batch; `()` if it has not divided it.

  ```python
  mean = jax.lax.pmean(x, mpjax.batch_axes())  # inside the loss function
  ```

  For statistics over the whole batch in code that sees only one device's rows; call it while tracing.
  With flax, write `nn.BatchNorm(axis_name=mpjax.batch_axes() or None)`.

  Returns:
    A tuple of axis names.
  """
  mesh = jax.sharding.get_abstract_mesh()
  types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
  return tuple(name for name in BATCH_AXES if types.get(name) == AxisType.Manual)


def check_mesh(mesh: object) -> Mesh:
  """Returns the mesh as a training step takes it: with axes that the compiler divides automatically.

  Raises:
    ValueError: for another object than a mesh, or an unknown axis.
  """
  if not isinstance(mesh, (jax.sharding.Mesh, jax.sharding.AbstractMesh)):
    raise ValueError(f"mesh={mesh!r}: expected a jax.sharding.Mesh, as jax.make_mesh makes it")
  unknown = [name for name in mesh.axis_names if name not in AXES]
  if unknown:
    raise ValueError(
      f"mesh axis {unknown[0]!r}: expected axes among {', '.join(AXES)}: rows of the batch are divided over "
      "data and fsdp, parameters over fsdp and tensor"
    )
  return with_axis_types(mesh, (AxisType.Auto,) * len(mesh.axis_names))


def with_axis_types(mesh: Mesh, types: tuple[AxisType, ...]) -> Mesh:
  """Returns the same mesh with other axis types."""
  if mesh.axis_types == types:
    return mesh
  if isinstance(mesh, jax.sharding.Mesh):
    return jax.sharding.Mesh(mesh.devices, mesh.axis_names, axis_types=types)
  return mesh.update(axis_types=types)


def has_explicit_axes(mesh: Mesh) -> bool:
  """Returns whether an axis is explicit, so that types of arrays include their sharding."""
  return AxisType.Explicit in mesh.axis_types


def axes_of_batch(mesh: Mesh) -> tuple[str, ...]:
  """Returns the axes of a mesh that divide the rows of the batch."""
  return tuple(name for name in BATCH_AXES if name in mesh.axis_names)


def batch_shards(mesh: Mesh) -> int:
  """Returns the number of parts that a mesh divides a batch into."""
  return math.prod(mesh.shape[name] for name in axes_of_batch(mesh))


def batch_spec(mesh: Mesh) -> PartitionSpec:
  """Returns the spec of a batch: its first dimension over the devices."""
  return PartitionSpec(axes_of_batch(mesh) or None)


def rows_of_process(sharding: NamedSharding, batch_size: int) -> Rows:
  """Returns the rows of a global batch that this process holds: a slice, or positions if it has gaps."""
  held = np.zeros(batch_size, bool)
  for index in sharding.addressable_devices_indices_map((batch_size,)).values():
    held[index] = True
  rows = np.flatnonzero(held)
  start, stop = int(rows[0]), int(rows[-1]) + 1
  return slice(start, stop) if stop - start == len(rows) else rows


def place_rows(batch: PyTree, sharding: NamedSharding, batch_size: int) -> PyTree:
  """Returns this process's rows, as `rows_of_process` names them, as global arrays."""
  if sharding.is_fully_addressable:
    return jax.device_put(batch, sharding)
  place = jax.make_array_from_process_local_data
  return jax.tree.map(lambda rows: place(sharding, rows, (batch_size, *rows.shape[1:])), batch)
