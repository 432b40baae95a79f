"""Compiles one exported program for a described device: `python _worker.py FOLDER`, without mpjax.

FOLDER has `program` and `request.json`; `result.json` and `program.pb` are written there. `_compile.py` sets
the environment.
"""

from __future__ import annotations

import json
import pathlib
import sys
from typing import Any

import jax
import jax.export
from jax.experimental import topologies
from jax.sharding import AxisType


def main(folder: pathlib.Path) -> None:
  """Compiles the program in a folder and writes the result there."""
  request = json.loads((folder / "request.json").read_text())
  try:
    result = _compile(folder, request)
  except Exception as error:
    result = {"error": f"{type(error).__name__}: {error}"}
  (folder / "program.pb").write_bytes(result.pop("proto", b""))
  (folder / "result.json").write_text(json.dumps(result))


def figures(compiled: jax.stages.Compiled) -> dict[str, Any]:
  """Returns the fields of a `Program` from what JAX compiled.

  Raises:
    RuntimeError: if the compiler gives no figures for the memory.
  """
  memory = compiled.memory_analysis()
  if memory is None:
    raise RuntimeError("the compiler has no memory analysis")
  costs = compiled.cost_analysis() or {}
  return {
    "arguments": memory.argument_size_in_bytes,
    "outputs": memory.output_size_in_bytes,
    "aliases": memory.alias_size_in_bytes,
    "temporaries": memory.temp_size_in_bytes,
    "live": _live(memory),
    "proto": module_proto(compiled),
    "accessed": costs.get("bytes accessed", 0.0),
  }


def module_proto(compiled: jax.stages.Compiled) -> bytes:
  """Returns the serialised `HloModuleProto` of the program; empty if JAX or the runtime does not give it."""
  executable: Any = compiled.runtime_executable()
  try:
    return bytes(executable.hlo_modules()[0].as_serialized_hlo_module_proto())
  except (AttributeError, IndexError, TypeError, NotImplementedError, jax.errors.JaxRuntimeError):
    return b""


def _live(memory: Any) -> int:
  # The CPU compiler's figure leaves temporaries out.
  arguments = memory.argument_size_in_bytes + memory.host_argument_size_in_bytes
  live = getattr(memory, "peak_memory_in_bytes", 0) - arguments
  return live if live > memory.temp_size_in_bytes // 4 else 0


def _compile(folder: pathlib.Path, request: dict[str, Any]) -> dict[str, Any]:
  exported = jax.export.deserialize(bytearray((folder / "program").read_bytes()))
  devices = _devices(request)
  if exported.nr_devices > len(devices):
    raise ValueError(f"the step runs on {exported.nr_devices} devices, and the target has {len(devices)}")
  names, sizes, types = zip(*(request["mesh"] or [("devices", 1, "Auto")]), strict=True)
  # In the order of a real run: a TPU's neighbours are neighbours in the mesh.
  mesh = jax.make_mesh(
    sizes,
    names,
    devices=devices[: exported.nr_devices],
    axis_types=tuple(AxisType[kind] for kind in types),
  )
  shardings = exported.in_shardings_jax(mesh)
  one = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
  args = [
    jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding or one)
    for aval, sharding in zip(exported.in_avals, shardings, strict=True)
  ]
  jitted = jax.jit(exported.call, donate_argnums=tuple(request["donated"]), keep_unused=True)
  return figures(jitted.lower(*args).compile())


def _devices(request: dict[str, Any]) -> Any:
  asked = {"platform": "tpu", "topology_name": request["topology"]}
  if request["kind"] == "gpu":
    asked = {"platform": "cuda", "topology": request["topology"], "target_config": request["description"]}
  return topologies.get_topology_desc(**asked).devices


if __name__ == "__main__":
  main(pathlib.Path(sys.argv[1]))
