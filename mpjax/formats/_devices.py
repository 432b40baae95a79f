"""The devices that `formats/devices/*.yaml` describe: memory, published rates, matrix units."""

from __future__ import annotations

import functools
import importlib.resources
from collections.abc import Mapping
from typing import Any, NotRequired, TypedDict

import yaml


class DeviceData(TypedDict):
  """The contents of a device's file.

  Attributes:
    device: the device, in words.
    kind: `gpu` or `tpu`.
    jax_names: JAX's names for it (`device_kind`), in lower case.
    memory: bytes.
    bandwidth: bytes/s of its memory.
    flops: published dense peaks in FLOP/s by dtype.
    interconnect: bytes/s from one device to the others.
    on_chip: bytes on the chip in which the compiler keeps values.
    matrix_units: name of a row of `mpjax.formats.MATRIX_UNITS`.
    speeds: what an estimate of time needs in addition: `clock`, the cycles/s of the estimates of a TPU's
      compiler; `ring`: an axis of that many chips of a TPU, or of a multiple, has its ends linked; `network`,
      bytes/s of one GPU to other hosts; `host`, bytes/s between a device and its host's memory.
    cuda: for a GPU, the content of XLA's `GpuTargetConfigProto`, with `compute_capability` as [major, minor].
    tpu: for a TPU, its compiler's names for slices (generation `topology`, and the smallest one, `default`),
      and the `devices` of a chip, 1 without it.
    source: the source of the figures.
  """

  device: str
  kind: str
  jax_names: list[str]
  memory: int
  bandwidth: float
  flops: dict[str, float]
  interconnect: NotRequired[float]
  on_chip: NotRequired[int]
  matrix_units: str
  speeds: NotRequired[dict[str, float]]
  cuda: NotRequired[dict[str, Any]]
  tpu: NotRequired[dict[str, Any]]
  source: str


@functools.cache
def described_devices() -> Mapping[str, DeviceData]:
  """Returns the contents of the device files, by the names that `mpjax.plan` takes as targets.

  ```python
  print(mpjax.formats.described_devices()["h200"]["memory"])  # bytes
  ```

  Returns:
    A read-only mapping from names to `DeviceData`.
  """
  folder = importlib.resources.files("mpjax").joinpath("formats", "devices")
  files = sorted((file for file in folder.iterdir() if file.name.endswith(".yaml")), key=lambda f: f.name)
  return {file.name.removesuffix(".yaml"): yaml.safe_load(file.read_text()) for file in files}


def fp8_time(device: str, recipe: str) -> float:
  """Returns the time of a step in FP8 over its time in bfloat16, by the compiler's figures; 0 if not known.

  ```python
  mpjax.formats.fp8_time("v6e", "current")  # 1.13: slower
  ```

  Args:
    device: its name as a target, in words (`DeviceData.device`), or as JAX has it (`device_kind`).
    recipe: as in `mpjax.fp8.Recipe`, but not `auto`.
  """
  for name, times in _fp8_times().items():
    data = described_devices()[name]
    if device.lower() in (name, data["device"].lower(), *data["jax_names"]):
      return times.get(recipe, 0.0)
  return 0.0


@functools.cache
def _fp8_times() -> dict[str, dict[str, float]]:
  return yaml.safe_load(importlib.resources.files("mpjax").joinpath("formats", "fp8_time.yaml").read_text())
