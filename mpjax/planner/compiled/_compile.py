"""Compiles a step for a target: in this process, or in another one for devices that are only described.

The other process has the environment that compilers without a device need, whatever JAX does in this one. If
it dies, this process lives. It gets the step as a `jax.export` program.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.export

from mpjax._types import Array, PyTree
from mpjax.planner._targets import Target
from mpjax.planner.compiled import _worker
from mpjax.planner.compiled._worker import figures

_TIMEOUT = 3600
_BLOCKS = b"xla.scaled_dot"  # a product of blocks in an exported program


class CompileError(RuntimeError):
  """The target's compiler did not compile the step; the text is the compiler's message.

  Attributes:
    out_of_memory: whether the reason is that the step does not fit the device.
  """

  def __init__(self, message: str, out_of_memory: bool = False):
    super().__init__(message)
    self.out_of_memory = out_of_memory


@dataclasses.dataclass(frozen=True)
class CompiledProgram:
  """A compiled program.

  Attributes:
    arguments, outputs, aliases, temporaries: bytes on one device.
    live: bytes of temporaries that are live at the peak, without gaps between them; 0 if not known.
    proto: the optimised program as a serialised `HloModuleProto`; empty if JAX does not give it.
    accessed: bytes of memory that it reads and writes, by the compiler's cost model; 0 without one.
  """

  arguments: int
  outputs: int
  aliases: int
  temporaries: int
  live: int
  proto: bytes
  accessed: float = 0.0

  @property
  def peak(self) -> int:
    """Returns the bytes that the program needs."""
    return self.arguments + self.outputs - self.aliases + self.temporaries


def compile_step(
  step: Callable[..., PyTree], args: tuple[PyTree, ...], donated: Sequence[int], target: Target
) -> CompiledProgram:
  """Compiles a function for a target.

  Args:
    step: any function that JAX can trace.
    args: shapes of its arguments, with shardings if it runs on several devices.
    donated: positions of the leaves of `args` whose memory the results may take.
    target: the target to compile for.

  Raises:
    CompileError: with the compiler's message.
  """
  leaves, structure = jax.tree.flatten(args)

  # An exported program cannot have the user's own tree types.
  def flat(*leaves: Array) -> list[Array]:
    return jax.tree.leaves(step(*jax.tree.unflatten(structure, leaves)))

  jitted = jax.jit(flat, donate_argnums=tuple(donated), keep_unused=True)
  if not target.is_here:
    return _compile_apart(jitted, leaves, donated, target)
  try:
    compiled = jitted.lower(*leaves).compile()
    return CompiledProgram(**figures(compiled))
  except RuntimeError as error:
    raise CompileError(_first_lines(str(error)), _is_memory(str(error))) from error


def _compile_apart(
  jitted: jax.stages.Wrapped, leaves: Sequence[Any], donated: Sequence[int], target: Target
) -> CompiledProgram:
  program = _exported(jitted, leaves, target)
  meshes = [leaf.sharding.mesh for leaf in leaves if getattr(leaf, "sharding", None) is not None]
  # Names, sizes and types of the axes; none for one device.
  axes = [[*zip(m.shape, m.shape.values(), (t.name for t in m.axis_types), strict=True)] for m in meshes[:1]]
  request = {"kind": target.kind, "topology": target.topology, "donated": list(donated)}
  request |= {"mesh": axes[0] if axes else [], "description": target.gpu_description()}
  message = ""
  with tempfile.TemporaryDirectory(prefix="mpjax-plan-") as name:
    folder = pathlib.Path(name)
    (folder / "program").write_bytes(program)
    (folder / "request.json").write_text(json.dumps(request))
    for flags in _flags(target, program):
      code, message = _run(folder, flags)
      if code == 0:
        result = json.loads((folder / "result.json").read_text())
        if "error" not in result:
          return CompiledProgram(**result, proto=(folder / "program.pb").read_bytes())
        message = result["error"]
        if _is_memory(message):
          break
  raise CompileError(f"{target.name}: {_first_lines(message)}", _is_memory(message))


def _exported(jitted: jax.stages.Wrapped, args: Sequence[Any], target: Target) -> bytes:
  platform = "cuda" if target.kind == "gpu" else target.kind
  calls: list[str] = []
  while True:
    checks = [jax.export.DisabledSafetyCheck.custom_call(name) for name in calls]
    try:
      exported = jax.export.export(jitted, platforms=[platform], disabled_checks=checks)(*args)
      return bytes(exported.serialize())
    except (ValueError, TypeError, NotImplementedError, RuntimeError) as error:
      # By default an exported program may call only stable libraries; this one is compiled at once.
      found = re.findall(r"custom_call @([\w$.]+)", str(error))
      if calls or not found:  # such as a callback to this machine
        why = _first_lines(str(error))
        raise CompileError(f"the step cannot be taken to {target.name}: {why}") from error
      calls = found


def _flags(target: Target, program: bytes) -> tuple[str, ...]:
  """Returns XLA's flags to try: without a GPU to tune them on, Triton's products may not compile.

  Triton alone multiplies blocks; without it, XLA multiplies in bfloat16 what they stand for.
  """
  if target.kind != "gpu":
    return ("",)
  base = "--xla_gpu_autotune_level=0"
  without = f"{base} --xla_gpu_enable_triton_gemm=false"
  return (base, without) if _BLOCKS in program else (without, base)


def _run(folder: pathlib.Path, flags: str) -> tuple[int, str]:
  environment = {
    **os.environ,
    "JAX_PLATFORMS": "cpu",  # the plug-ins then only compile, and do not look for a device
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip(),
  }
  # Run as a file, which imports only JAX; -P: imports nothing from the current folder.
  command = [sys.executable, "-P", _worker.__file__, str(folder)]
  output: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
  try:
    done = subprocess.run(command, env=environment, timeout=_TIMEOUT, check=False, **output)
  except subprocess.TimeoutExpired as error:
    raise CompileError(f"the compiler was stopped after {_TIMEOUT} s") from error
  return done.returncode, done.stdout


def _is_memory(message: str) -> bool:
  return any(sign in message for sign in ("RESOURCE_EXHAUSTED", "Ran out of memory", "out of memory"))


def _first_lines(message: str) -> str:
  lines = [line.strip() for line in message.splitlines() if line.strip()]
  told = [line for line in lines if any(sign in line for sign in ("Error", "error", "RESOURCE"))]
  return (told[:1] or lines[-1:] or ["the compiler stopped without a message"])[0][:600]
