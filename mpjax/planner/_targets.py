"""The devices that a step can be planned for: this machine's, and those described in `formats/devices`."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import math
import os
import re
import types
from collections.abc import Mapping
from typing import Any

import jax

from mpjax._render.plain_text import pip_install
from mpjax.dtypes import did_you_mean
from mpjax.formats import LOW_PRECISION, DeviceData, described_devices, narrow_bits, runs_on
from mpjax.fp8 import in_force, lacks, matrix_units_of, on_units, slowness
from mpjax.policy import Policy

HERE = "here"
# JAX takes this share of a GPU's memory unless one of these variables sets another.
_GPU_SHARE = 0.75
_SHARE_VARIABLES = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")
# The workspace that XLA gives a cuBLAS call, from Hopper on and before.
_HOPPER, _WORKSPACE, _WORKSPACE_BEFORE = 9, 32 << 20, 4 << 20
# By kind of device the extra of mpjax that compiles for it, and its packages, one of each group.
_EXTRAS = {
  "tpu": ("plan-tpu", ("libtpu",), ("flatbuffers",)),
  "gpu": ("plan-cuda", ("jax_cuda13_plugin", "jax_cuda12_plugin"), ("flatbuffers",)),
}


@dataclasses.dataclass(frozen=True)
class Target:
  """A device, or several, to plan a step for.

  Attributes:
    name: as the user gave it, such as `h200:8`; `here` for this machine.
    device: what it is, in words.
    kind: `cpu`, `gpu` or `tpu`.
    devices: number of devices.
    memory: bytes of one device's memory; 0 if not known.
    usable: bytes of `memory` that JAX takes by default.
    matrix_units: name of a row of `mpjax.formats.MATRIX_UNITS`.
    bandwidth: bytes/s of one device's memory; 0 if not known.
    flops: published dense peak rates in FLOP/s by dtype.
    interconnect: bytes/s from one device to the others; 0 without an interconnect.
    workspace: the most bytes that the compiler sets aside for a call of a matrix library.
    on_chip: bytes of the chip's own memory in which the compiler keeps values.
    topology: what `jax.experimental.topologies` takes; empty for this machine.
    compute_capability: (major, minor) for a described GPU; (0, 0) for others.
    cuda: the other facts on a described GPU that XLA's CUDA compiler asks for.
    speeds: what estimates of time need in addition: `speeds` of `mpjax.formats.DeviceData`.
  """

  name: str
  device: str
  kind: str
  devices: int
  memory: int
  usable: int
  matrix_units: str
  bandwidth: float = 0.0
  flops: dict[str, float] = dataclasses.field(default_factory=dict)
  interconnect: float = 0.0
  workspace: int = 0
  on_chip: int = 0
  topology: str = ""
  compute_capability: tuple[int, int] = (0, 0)
  cuda: Mapping[str, float] = dataclasses.field(default_factory=dict)
  speeds: Mapping[str, Any] = dataclasses.field(default_factory=dict)

  @property
  def is_here(self) -> bool:
    """Returns whether it is this machine, with its own devices."""
    return not self.topology

  @property
  def sides(self) -> tuple[int, ...]:
    """Returns the sides of a slice in chips; for GPUs 1, the number of hosts, and of the GPUs of each."""
    return tuple(map(int, self.topology.rpartition(":")[2].split("x"))) if self.topology else (self.devices,)

  @property
  def has_rates(self) -> bool:
    """Returns whether peak rates are published for it."""
    return bool(self.flops) and bool(self.bandwidth)

  @property
  def cache(self) -> int:
    """Returns the bytes that a cache may keep from one pass over memory to the next."""
    return int(self.cuda.get("l2_cache_size", 0)) or self.on_chip

  def unit_rate(self, dtype: str) -> tuple[str, float]:
    """Returns the dtype in which its units multiply, and their published peak rate in FLOP/s.

    Args:
      dtype: NumPy's name of the operands' dtype, or `tensorfloat32`.
    """
    bits = narrow_bits(dtype)
    if bits:
      dtype = f"float{bits}" if runs_on(self.matrix_units, dtype) else "bfloat16"  # widened to it
    rate = self.flops.get(dtype) or self.flops.get("float32") or max(self.flops.values())
    return dtype, rate

  def gpu_description(self) -> str:
    """Returns a `GpuTargetConfigProto` as text, which XLA's compile-only CUDA target reads."""
    major, minor = self.compute_capability
    facts = "\n".join(f"  {name}: {value}" for name, value in self.cuda.items())
    return f"""gpu_device_info {{
{facts}
  cuda_compute_capability {{ major: {major} minor: {minor} }}
}}
runtime_version {{ major: 13 minor: 0 }}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 28 }}
device_description_str: "{self.device}\""""


def presets_of(target: Target) -> list[str]:
  """Returns the policy presets that a target has matrix units for, the least memory traffic first."""
  units = {"bf16": "bfloat16"}
  if target.kind == "gpu":
    units |= {"fp16": "float16", "tf32": "tensorfloat32"}
  found = [name for name, dtype in units.items() if runs_on(target.matrix_units, dtype)]
  return ["fp8"] * (target.matrix_units in LOW_PRECISION) + [*found, "fp32"]


def target_names() -> list[str]:
  """Returns the names that `get_target` takes, without their topologies."""
  return [HERE, *described_devices()]


def get_target(name: str | Target | None = None) -> Target:
  """Returns a target by name: `here`, `h200`, `h200:8` (GPUs), `h100:2x8` (hosts x GPUs), `v5e:2x4` (chips).

  Raises:
    ValueError: for an unknown name; the message lists the known ones.
  """
  if isinstance(name, Target):
    return name
  if name is None or name == HERE:
    return _here()
  base, _, shape = str(name).partition(":")
  base = base.strip().lower()
  if base not in described_devices():
    known = target_names()
    expected = f"expected one of {', '.join(known)}, with GPUs as in h200:8 or a slice as in v5e:2x4"
    raise ValueError(f"unknown target {name!r}: {expected}{did_you_mean(base, known)}")
  data = described_devices()[base]
  chips = data.get("tpu", {})
  least = str(chips.get("default", "1"))
  shape, sides = shape or least, least.count("x")
  form = rf"\d+(x\d+){{{sides}}}" if chips else r"\d+(x\d+)?"
  if not re.fullmatch(form, shape) or 0 in map(int, shape.split("x")):
    slices = f"a slice of chips, such as {base}:{'2x2x1' if sides == 2 else '2x4'}"
    wanted = slices if chips else f"a number of GPUs, such as {base}:8 or {base}:2x8"
    raise ValueError(f"target {name!r}: expected {wanted}, not {shape!r}")
  hosts, _, each = shape.rpartition("x")
  topology = f"{chips['topology']}:{shape}" if chips else f"1x{hosts or 1}x{each}"
  count = math.prod(map(int, shape.split("x"))) * chips.get("devices", 1)
  return _from_data(str(name), data, count, topology)


def _from_data(name: str, data: DeviceData, count: int, topology: str) -> Target:
  """Returns `count` devices of a described kind."""
  same = {field.name for field in dataclasses.fields(Target)}
  facts: dict[str, Any] = {key: value for key, value in data.items() if key in same}
  gpu = facts.get("cuda", {})
  capability = tuple(gpu.get("compute_capability", (0, 0)))
  facts["cuda"] = {key: value for key, value in gpu.items() if key != "compute_capability"}
  if gpu:
    facts["workspace"] = _WORKSPACE if capability[0] >= _HOPPER else _WORKSPACE_BEFORE
  facts["usable"] = int(data["memory"] * (_gpu_share() if gpu else 1))
  return Target(name=name, devices=count, topology=topology, compute_capability=capability, **facts)


def _gpu_share() -> float:
  """Returns the share of a GPU's memory that JAX takes, from the environment or JAX's default."""
  for name in _SHARE_VARIABLES:
    with contextlib.suppress(KeyError, ValueError):
      return min(1.0, float(os.environ[name]))
  return _GPU_SHARE


def _here() -> Target:
  """Returns this machine's default devices, with the published figures of their kind if known."""
  devices = jax.local_devices()
  device = devices[0]
  kind = {"cuda": "gpu", "rocm": "gpu"}.get(device.platform, device.platform)
  words = device.device_kind.lower()
  for data in described_devices().values():
    names = data["jax_names"]
    if any(words == n or (kind == "gpu" and re.match(rf"{re.escape(n)}(?![a-z0-9])", words)) for n in names):
      found = _from_data(HERE, data, len(devices), "")
      limit = device_memory(device) or found.usable
      return dataclasses.replace(found, device=device.device_kind, usable=limit)
  memory = device_memory(device)
  return Target(
    name=HERE,
    device=f"{device.device_kind} (this machine)",
    kind=kind if kind in ("cpu", "gpu", "tpu") else "cpu",
    devices=len(devices),
    memory=memory,
    usable=memory,
    matrix_units=matrix_units_of(device) or ("ampere" if kind == "gpu" else "cpu"),
  )


def device_memory(device: jax.Device | None) -> int:
  """Returns a device's memory in bytes, or this machine's for a CPU or `None`; 0 if not known."""
  if device is None or device.platform == "cpu":
    try:
      return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
      return 0
  return int((device.memory_stats() or {}).get("bytes_limit", 0))


def policy_on_target(policy: Policy, target: Target) -> tuple[Policy, str]:
  """Returns the policy as the target runs it, whatever this machine has, and the FP8 recipe in force there.

  The recipe `auto` becomes that of the target. The text is empty for a policy without a recipe.
  """
  recipe = policy.fp8
  if recipe is None:
    return policy, ""
  if target.is_here:
    return policy, "; ".join(filter(None, (in_force(recipe), slowness(recipe))))
  capability = ".".join(map(str, target.compute_capability))
  device: Any = types.SimpleNamespace(
    platform=target.kind, device_kind=target.device, compute_capability=capability
  )
  says = "; ".join(filter(None, (in_force(recipe, device), slowness(recipe, device))))
  if not recipe.emulate and lacks(recipe, device):
    return dataclasses.replace(policy, fp8=None), f"{says}: products run in {policy.compute_dtype.name}"
  # Its products must be traced as FP8 on this machine, too; the target decides which kernels they become.
  there = dataclasses.replace(on_units(recipe, target.matrix_units), emulate=True)
  return dataclasses.replace(policy, fp8=there), says


def missing(target: Target) -> str:
  """Returns one line that says what to install to compile for a target; empty if nothing is missing."""
  extra, *groups = ("",) if target.is_here else _EXTRAS[target.kind]
  if all(any(map(importlib.util.find_spec, group)) for group in groups):
    return ""
  return f"analytic only: {pip_install(extra)} to compile for {target.name} without the device"
