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
    sizes = [axis.size for axis in groups.mesh.axes]
    devices = np.arange(np.prod(sizes)).reshape(sizes)
    exchanged = [axis.mesh_axis_index for axis in groups.axes]
    kept = [i for i in range(len(sizes)) if i not in exchanged]
    return tuple(
      devices.transpose(*kept, *exchanged).reshape(-1, np.prod([sizes[i] for i in exchanged]))[0].tolist()
    )
  if proto.source_target_pairs:
    pair = proto.source_target_pairs[0]
    return (pair.source, pair.target)
  return ()
