"""The devices that `formats/devices/*.yaml` describe: memory, published rates, matrix units."""

from __future__ import annotations

import functools
import importlib.resources
from collections.abc import Mapping
from typing import Any, NotRequired, TypedDict

import yaml


class TpuData(TypedDict):
  """Names that a TPU's compiler has for slices of a device: the generation, and the smallest slice."""

  topology: str
  default: str


class DeviceData(TypedDict):
  """The contents of a device's file.

  Attributes:
    device: what it is, in words.
    kind: `gpu` or `tpu`.
    jax_names: what JAX may call it (`device_kind`), in lower case.
    memory: bytes.
    bandwidth: bytes/s of its memory.
    flops: published dense peaks in FLOP/s by dtype.
    interconnect: bytes/s from one device to the others.
    on_chip: bytes on the chip in which the compiler keeps values.
    matrix_units: name of a row of `mpjax.formats.MATRIX_UNITS`.
    cuda: of a GPU, what XLA's `GpuTargetConfigProto` holds, with `compute_capability` as [major, minor].
    tpu: of a TPU.
    source: where the figures are from.
  """

  device: str
  kind: str
  jax_names: list[str]
  memory: int
  bandwidth: float
  flops: dict[str, float]
  interconnect: NotRequired[float]
  on_chip: NotRequired[float]
  matrix_units: str
  cuda: NotRequired[dict[str, Any]]
  tpu: NotRequired[TpuData]
  source: str


@functools.cache
def described_devices() -> Mapping[str, DeviceData]:
  """Returns what the files say, by the name that `mpjax.plan` takes for a target."""
  folder = importlib.resources.files("mpjax").joinpath("formats", "devices")
  files = sorted((file for file in folder.iterdir() if file.name.endswith(".yaml")), key=lambda f: f.name)
  return {file.name.removesuffix(".yaml"): yaml.safe_load(file.read_text()) for file in files}
