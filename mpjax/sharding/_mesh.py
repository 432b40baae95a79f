"""The axes of a mesh: their names, and the axes that divide the batch."""

from __future__ import annotations

import math

import jax
from jax.sharding import AxisType, PartitionSpec

from mpjax._types import Mesh

# Axes: copies of the model; parameters divided over devices with different rows; parts of one product.
AXES = ("data", "fsdp", "tensor")
BATCH_AXES = ("data", "fsdp")


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
