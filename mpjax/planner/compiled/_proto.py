"""Decodes a serialised HLO module: the messages and fields that the readers of a program use.

Source of the field numbers: openxla/xla, `xla/service/hlo.proto` and `xla/xla_data.proto`. Programs of JAX
0.10 and 0.12 show those of the replica groups 92 and 93, which are newer.
"""

from __future__ import annotations

import functools
from typing import Any

# NAME:NUMBER:TYPE of each field, with a star if it is repeated.
_MESSAGES = {
  "Tile": "dimensions:1:int64*",
  "Layout": "minor_to_major:1:int64* tiles:6:Tile* memory_space:8:int64",
  "Shape": "element_type:2:int32 dimensions:3:int64* tuple_shapes:4:Shape* layout:5:Layout",
  "Literal": "s32s:4:int32* s64s:5:int64* u32s:6:uint32* u64s:7:uint64*",
  "Metadata": "op_name:2:string",
  "WindowDimension": "size:1:int64 stride:2:int64 padding_low:3:int64 window_dilation:5:int64"
  " base_dilation:6:int64",
  "Window": "dimensions:1:WindowDimension*",
  "Convolution": "kernel_input_feature_dimension:3:int64 input_spatial_dimensions:11:int64*"
  " output_batch_dimension:9:int64 output_feature_dimension:10:int64 output_spatial_dimensions:12:int64*",
  "Dot": "lhs_contracting_dimensions:1:int64* rhs_contracting_dimensions:2:int64*"
  " lhs_batch_dimensions:3:int64*",
  "Precision": "operand_precision:1:int32* algorithm:2:int32",
  "ReplicaGroup": "replica_ids:1:int64*",
  "IotaGroups": "num_replica_groups:1:int64 num_devices_per_group:2:int64 iota_reshape_dims:3:int64*"
  " iota_transpose_perm:4:int32*",
  "DeviceList": "replica_groups:1:ReplicaGroup* iota_replica_group_list:2:IotaGroups",
  "MeshAxis": "name:1:string size:2:int64",
  "Mesh": "axes:1:MeshAxis*",
  "SubAxis": "pre_size:1:int64 size:2:int64",
  "AxisRef": "mesh_axis_index:1:int64 sub_axis_info:2:SubAxis",
  "MeshGroups": "mesh:1:Mesh axes:2:AxisRef*",
  "SourceTarget": "source:1:int64 target:2:int64",
  "Aliasing": "output_shape_index:1:int64* operand_index:2:int64 operand_shape_index:3:int64*",
  "Attribute": "key:1:string value:2:string",
  "Attributes": "map:1:Attribute*",
  "Instruction": "name:1:string opcode:2:string shape:3:Shape metadata:7:Metadata literal:8:Literal"
  " parameter_number:9:int64 fusion_kind:11:string tuple_index:13:int64 dimensions:14:int64* window:15:Window"
  " convolution_dimension_numbers:16:Convolution custom_call_target:28:string dot_dimension_numbers:30:Dot"
  " id:35:int64 operand_ids:36:int64* called_computation_ids:38:int64* backend_config:43:bytes"
  " replica_groups:49:ReplicaGroup* precision_config:51:Precision source_target_pairs:52:SourceTarget*"
  " comparison_direction:63:string frontend_attributes:68:Attributes output_operand_aliasing:74:Aliasing*"
  " collective_device_list:87:DeviceList iota_replica_groups:92:IotaGroups mesh_replica_groups:93:MeshGroups",
  "Computation": "name:1:string instructions:2:Instruction* id:5:int64 root_id:6:int64",
  "Sequence": "instruction_ids:1:int64*",
  "ScheduleEntry": "key:1:int64 value:2:Sequence",
  "Schedule": "sequences:1:ScheduleEntry*",
  "StackFrames": "file_names:1:string*",
  "Module": "name:1:string computations:3:Computation* entry_computation_id:6:int64 schedule:7:Schedule"
  " stack_frame_index:17:StackFrames",
}
TUPLE, TOKEN, BUFFER = 13, 17, 34
# Names of the other element types by number.
_NUMBERED = (
  "1:pred 2:s8 3:s16 4:s32 5:s64 6:u8 7:u16 8:u32 9:u64 10:f16 11:f32 12:f64 14:opaque 15:c64 16:bf16 18:c128"
  " 19:f8e5m2 20:f8e4m3fn 21:s4 22:u4 23:f8e4m3b11fnuz 24:f8e5m2fnuz 25:f8e4m3fnuz 26:s2 27:u2 28:f8e4m3"
  " 29:f8e3m4 30:s1 31:u1 32:f4e2m1fn 33:f8e8m0fnu"
)
DTYPES = {int(number): name for number, name in (text.split(":") for text in _NUMBERED.split())}


@functools.cache
def module_class() -> Any:
  """Returns the class of a module's message, made by `google.protobuf`, which is imported here."""
  from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

  file = descriptor_pb2.FileDescriptorProto(name="mpjax_hlo.proto", package="mpjax", syntax="proto3")
  for name, fields in _MESSAGES.items():
    message = file.message_type.add(name=name)
    for field, number, kind in (text.split(":") for text in fields.split()):
      made = message.field.add(name=field, number=int(number))
      made.label = made.LABEL_REPEATED if kind.endswith("*") else made.LABEL_OPTIONAL
      if (kind := kind.rstrip("*")) in _MESSAGES:
        made.type, made.type_name = made.TYPE_MESSAGE, f".mpjax.{kind}"
      else:
        made.type = made.Type.Value(f"TYPE_{kind.upper()}")
  pool = descriptor_pool.DescriptorPool()
  pool.Add(file)
  return message_factory.GetMessageClass(pool.FindMessageTypeByName("mpjax.Module"))
