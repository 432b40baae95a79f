"""The devices that a step can be planned for: this machine's, and those that `targets/` describes."""

from __future__ import annotations

import dataclasses
import math
import os
import re
from typing import Any

import jax

from mpjax.dtypes import did_you_mean
from mpjax.formats._matrix_units import described_devices

HERE = "here"
# JAX preallocates this share of a GPU's memory unless it is told otherwise.
_GPU_SHARE = 0.75
# What XLA gives a cuBLAS call to work in, from Hopper on and before.
_WORKSPACE = {9: 32 << 20, 10: 32 << 20, 12: 32 << 20}
_WORKSPACE_BEFORE = 4 << 20
# How JAX calls the devices whose data we have.
_KINDS = {
  "h200": ("nvidia h200",),
  "h100": ("nvidia h100 80gb hbm3", "nvidia h100 sxm"),
  "a100": ("nvidia a100-sxm4-80gb", "nvidia a100 80gb pcie"),
  "b200": ("nvidia b200", "nvidia gb200"),
  "l4": ("nvidia l4",),
  "rtx4090": ("nvidia geforce rtx 4090",),
  "v5e": ("tpu v5 lite", "tpu v5e"),
  "v5p": ("tpu v5", "tpu v5p"),
  "v6e": ("tpu v6 lite", "tpu v6e"),
}


@dataclasses.dataclass(frozen=True)
class Target:
  """A device, or several, that a step is planned for.

  Attributes:
    name: as the user gave it, `h200:8`; `here` for this machine.
    device: what it is, in words.
    kind: `cpu`, `gpu` or `tpu`.
    devices: how many there are.
    memory: bytes of one; 0 if not known.
    usable: bytes of that that JAX takes by default.
    bandwidth: bytes/s of its memory; 0 if not known.
    flops: published dense peaks in FLOP/s by dtype.
    interconnect: bytes/s from one device to the others; 0 if there is none.
    matrix_units: name of a row of `mpjax.formats.MATRIX_UNITS`.
    workspace: bytes that the compiler sets aside for a call of a matrix library.
    on_chip: bytes of memory on the chip in which the compiler keeps values, rather than in the device's.
    topology: what `jax.experimental.topologies` takes; empty for this machine.
    data: the file.
  """

  name: str
  device: str
  kind: str
  devices: int
  memory: int
  usable: int
  bandwidth: float
  flops: dict[str, float]
  interconnect: float
  matrix_units: str
  workspace: int
  on_chip: int
  topology: str
  data: dict[str, Any]

  @property
  def is_here(self) -> bool:
    """Whether it is this machine, with its own devices."""
    return not self.topology

  @property
  def extra(self) -> str:
    """The extra of mpjax whose packages compile for it."""
    return {"gpu": "plan-cuda", "tpu": "plan-tpu"}.get(self.kind, "")

  def gpu_description(self) -> str:
    """What XLA's compile-only CUDA target reads, a `GpuTargetConfigProto` as text."""
    facts = dict(self.data["cuda"])
    major, minor = facts.pop("compute_capability")
    lines = [f"  {name}: {value}" for name, value in facts.items()]
    lines.append(f"  cuda_compute_capability {{ major: {major} minor: {minor} }}")
    return "\n".join(
      (
        "gpu_device_info {",
        *lines,
        "}",
        "runtime_version { major: 13 minor: 0 }",
        'platform_name: "CUDA"',
        "dnn_version_info { major: 9 minor: 28 }",
        f'device_description_str: "{self.device}"',
      )
    )


def target_names() -> list[str]:
  """The names that `get_target` takes, without their topologies."""
  return [HERE, *described_devices()]


def get_target(name: str | Target | None = None) -> Target:
  """The target of a name: `here`, `h200`, `h200:8` (GPUs), `h100:2x8` (hosts x GPUs), `v5e:2x4` (chips).

  Raises:
    ValueError: for an unknown one; lists those there are.
  """
  if isinstance(name, Target):
    return name
  if name is None or name == HERE:
    return _here()
  base, _, shape = str(name).partition(":")
  base = base.strip().lower()
  if base not in described_devices():
    known = target_names()
    raise ValueError(
      f"unknown target {name!r}: expected one of {', '.join(known)}, with GPUs as in h200:8 or a slice as in "
      f"v5e:2x4{did_you_mean(base, known)}"
    )
  data = described_devices()[base]
  if data["kind"] == "tpu":
    least = str(data["tpu"]["default"])
    shape = shape or least
    sides = least.count("x")
    if not re.fullmatch(rf"\d+(x\d+){{{sides}}}", shape) or 0 in map(int, shape.split("x")):
      example = "2x2x1" if sides == 2 else "2x4"
      raise ValueError(f"target {name!r}: expected a slice of chips, such as {base}:{example}, not {shape!r}")
    topology = f"{data['tpu']['topology']}:{shape}"
    count = math.prod(map(int, shape.split("x")))
  else:
    shape = shape or "1"
    if not re.fullmatch(r"\d+(x\d+)?", shape) or 0 in map(int, shape.split("x")):
      raise ValueError(
        f"target {name!r}: expected a number of GPUs, such as {base}:8 or {base}:2x8, not {shape!r}"
      )
    hosts, _, each = shape.rpartition("x")
    topology = f"1x{hosts or 1}x{each}"
    count = int(hosts or 1) * int(each)
  return _from_data(str(name), data, count, topology)


def _from_data(name: str, data: dict[str, Any], count: int, topology: str) -> Target:
  gpu = data["kind"] == "gpu"
  memory = int(data["memory"])
  major = data["cuda"]["compute_capability"][0] if gpu else 0
  return Target(
    name=name,
    device=data["device"],
    kind=data["kind"],
    devices=count,
    memory=memory,
    usable=int(memory * _GPU_SHARE) if gpu else memory,
    bandwidth=float(data["bandwidth"]),
    flops={dtype: float(rate) for dtype, rate in data["flops"].items()},
    interconnect=float(data.get("interconnect", 0)),
    matrix_units=data["matrix_units"],
    workspace=_WORKSPACE.get(major, _WORKSPACE_BEFORE) if gpu else 0,
    on_chip=int(data.get("on_chip", 0)),
    topology=topology,
    data=data,
  )


def _here() -> Target:
  """This machine's default devices, with the published figures of their kind where we have them."""
  devices = jax.local_devices()
  device = devices[0]
  kind = {"cuda": "gpu", "rocm": "gpu"}.get(device.platform, device.platform)
  words = device.device_kind.lower()
  for name, kinds in _KINDS.items():
    if any(words == k or (kind == "gpu" and re.match(rf"{re.escape(k)}(?![a-z0-9])", words)) for k in kinds):
      found = _from_data(HERE, described_devices()[name], len(devices), "")
      limit = _memory(device) or found.usable
      return dataclasses.replace(found, device=device.device_kind, usable=limit)
  memory = _memory(device)
  return Target(
    name=HERE,
    device=f"{device.device_kind} (this machine)",
    kind=kind if kind in ("cpu", "gpu", "tpu") else "cpu",
    devices=len(devices),
    memory=memory,
    usable=memory,
    bandwidth=0.0,
    flops={},
    interconnect=0.0,
    matrix_units={"gpu": "ampere", "tpu": "tpu"}.get(kind, "cpu"),
    workspace=0,
    on_chip=0,
    topology="",
    data={},
  )


def _memory(device: Any) -> int:
  if device.platform == "cpu":
    try:
      return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
      return 0
  return int((device.memory_stats() or {}).get("bytes_limit", 0))
