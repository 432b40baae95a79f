"""The devices that exchange with each other in a collective of a compiled program."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mpjax.planner.compiled._hlo import HloInstruction


def group_of(collective: HloInstruction) -> Sequence[int]:
  """Returns the numbers of the devices of the first group; empty if the program does not state them."""
  proto = collective.proto
  listed = proto.replica_groups or proto.collective_device_list.replica_groups
  if listed:
    return tuple(listed[0].replica_ids)
  for iota in (proto.iota_replica_groups, proto.collective_device_list.iota_replica_group_list):
    if iota.num_devices_per_group:
      sides = tuple(iota.iota_reshape_dims) or (iota.num_replica_groups * iota.num_devices_per_group,)
      order = tuple(iota.iota_transpose_perm) or tuple(range(len(sides)))
      devices = np.arange(np.prod(sides)).reshape(sides).transpose(order)
      return tuple(devices.reshape(-1, iota.num_devices_per_group)[0].tolist())
  groups = proto.mesh_replica_groups
  if groups.axes:
    # An axis of which a part is exchanged is three: before it, the part, and after it.
    parts = {axis.mesh_axis_index: axis.sub_axis_info for axis in groups.axes}
    sizes: list[int] = []
    exchanged: list[int] = []
    for i, axis in enumerate(groups.mesh.axes):
      before, size = (parts[i].pre_size or 1, parts[i].size or axis.size) if i in parts else (axis.size, 1)
      exchanged += [len(sizes) + 1] if i in parts else []
      sizes += [before, size, axis.size // (before * size)]
    devices = np.arange(np.prod(sizes)).reshape(sizes)
    kept = [i for i in range(len(sizes)) if i not in exchanged]
    return tuple(
      devices.transpose(*kept, *exchanged).reshape(-1, np.prod([sizes[i] for i in exchanged]))[0].tolist()
    )
  if proto.source_target_pairs:
    pair = proto.source_target_pairs[0]
    return (pair.source, pair.target)
  return ()
