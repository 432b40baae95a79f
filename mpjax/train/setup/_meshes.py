"""Makes a config's mesh from the available devices, and finds the rows that each process feeds."""

from __future__ import annotations

import math

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding

from mpjax._types import PyTree
from mpjax.sharding import AXES, BATCH_AXES, lacks_host_memory
from mpjax.train._errors import ConfigError
from mpjax.train.config._config import Config, MeshConfig
from mpjax.train.data import Rows


def mesh_sizes(spec: MeshConfig, available: int, target: str | None = None) -> dict[str, int]:
  """Returns the number of devices along each axis, with -1 replaced.

  Args:
    spec: the config's `mesh` section.
    available: the number of devices.
    target: the planner's target, if the devices are the target's.

  Raises:
    ConfigError: if there are too few devices, or the rest cannot be divided.
  """
  asked = {axis: getattr(spec, axis) for axis in AXES}
  fixed = math.prod(n for n in asked.values() if n != -1)
  count = "1 device" if available == 1 else f"{available} devices"
  there = f"target {target} has {count}" if target else f"there {'is' if available == 1 else 'are'} {count}"
  shown = ", ".join(f"mesh.{axis}={n}" for axis, n in asked.items() if n != 1) or "mesh.data=1"
  if fixed > available:
    larger = "; name a larger one, as in target=h200:8 or target=v5e:2x4" if target else "; mesh={} uses all"
    raise ConfigError(f"{shown}: {there}{larger}")
  if -1 in asked.values() and available % fixed:
    raise ConfigError(f"{shown}: {there}, which cannot be divided by {fixed}")
  return {axis: available // fixed if n == -1 else n for axis, n in asked.items()}


def on_devices_here(config: Config) -> Config:
  """Returns the config with all state on devices, on one if its mesh does not fit this machine; for tools."""
  try:
    _check_rows(config, mesh_sizes(config.mesh, len(jax.devices())))
  except ConfigError:
    return config.model_copy(update={"mesh": MeshConfig(data=1)})
  return config.model_copy(update={"mesh": config.mesh.model_copy(update={"offload": None})})


def make_mesh(config: Config) -> Mesh:
  """Makes the mesh of a run, over all processes.

  Raises:
    ConfigError: if the mesh does not fit the devices or the batch, leaves out devices of a process, or needs
      memory of the host that its devices do not reach.
  """
  devices = jax.devices()
  sizes = mesh_sizes(config.mesh, len(devices))
  _check_rows(config, sizes)
  count = math.prod(sizes.values())
  if jax.process_count() > 1 and count < len(devices):
    raise ConfigError(
      f"mesh of {count} devices: {jax.process_count()} processes have {len(devices)}, and each has to take "
      "part; use -1 for one axis"
    )
  shape = tuple(sizes.values())
  mesh = jax.make_mesh(shape, AXES, devices=devices[:count], axis_types=(AxisType.Auto,) * len(AXES))
  if config.mesh.offload and (why := lacks_host_memory(mesh)):
    raise ConfigError(f"mesh.offload={config.mesh.offload}: {why}")
  return mesh


def _check_rows(config: Config, sizes: dict[str, int]) -> None:
  """Raises `ConfigError` if the batch cannot be divided over the devices."""
  batch = config.data.batch_size
  micro_batch = batch // config.train.accumulate
  count = math.prod(sizes[axis] for axis in BATCH_AXES)
  if micro_batch % count:
    raise ConfigError(
      f"data.batch_size={batch} in train.accumulate={config.train.accumulate} micro-batches of {micro_batch} "
      f"rows is not divisible by {count} devices (mesh.data x mesh.fsdp)"
    )


def rows_of_process(sharding: NamedSharding, batch_size: int) -> Rows:
  """Returns the rows of a global batch that this process holds: a slice, or positions if it has gaps."""
  held = np.zeros(batch_size, bool)
  for index in sharding.addressable_devices_indices_map((batch_size,)).values():
    held[index] = True
  rows = np.flatnonzero(held)
  start, stop = int(rows[0]), int(rows[-1]) + 1
  return slice(start, stop) if stop - start == len(rows) else rows


def place_rows(batch: PyTree, sharding: NamedSharding, rows: Rows, batch_size: int) -> PyTree:
  """Returns this process's rows as global arrays."""
  if jax.process_count() == 1:
    return jax.device_put(batch, sharding)
  positions = np.arange(batch_size)[rows]

  def one(local: np.ndarray) -> jax.Array:
    def part(index: tuple[slice, ...] | None) -> np.ndarray:
      assert index is not None
      first, last, _ = index[0].indices(batch_size)
      start = int(np.searchsorted(positions, first))
      return local[start : start + last - first]

    return jax.make_array_from_callback((batch_size, *local.shape[1:]), sharding, part)

  return jax.tree.map(one, batch)
