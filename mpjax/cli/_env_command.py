"""`mpjax env`: versions, devices and flags, for a bug report. Needs no extra and no device."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax

import mpjax
from mpjax._render.plain_text import bytes_text, table
from mpjax.planner import device_memory

_PACKAGES = ("jax", "jaxlib", "flax", "optax", "jmp", "jaxtyping", "numpy")
# The extras for users; others are for developers of mpjax.
_EXTRAS = ("train", "plan", "numerics", "plan-cuda", "plan-tpu", "cuda13", "tpu")
_FLAGS = re.compile(r"(JAX|XLA|MPJAX)_\w+|LIBTPU_INIT_ARGS|CUDA_VISIBLE_DEVICES|NVIDIA_TF32_OVERRIDE")
_REQUIREMENT = re.compile(r"([\w.-]+)(?:\[([\w,.-]+)\])?")
_EXTRA = re.compile(r"extra == ['\"]([\w-]+)['\"]")


def run(options: argparse.Namespace) -> None:
  """Runs the command."""
  found = environment()
  print(json.dumps(found, indent=1) if options.json else _text(found))


def environment() -> dict[str, Any]:
  """Returns versions, extras, devices and flags as plain data."""
  return {
    "versions": {"mpjax": mpjax.__version__, "python": platform.python_version(), **_versions(_PACKAGES)},
    "platform": platform.platform(),
    "memory": device_memory(None),
    "extras": _extras(),
    **_devices(),
    "config": {
      name: getattr(jax.config, name) for name in ("jax_enable_x64", "jax_default_matmul_precision")
    },
    "flags": {name: value for name, value in sorted(os.environ.items()) if _FLAGS.fullmatch(name)},
  }


def _versions(names: Sequence[str]) -> dict[str, str | None]:
  """Returns the versions of packages; `None` for a package that is not installed."""
  found: dict[str, str | None] = {}
  for name in names:
    try:
      found[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
      found[name] = None
  return found


def _extras() -> dict[str, dict[str, str | None]]:
  """Returns the packages of each extra, by mpjax's metadata, with their versions."""
  found = {extra: list(_packages_of("mpjax", extra)) for extra in _EXTRAS}
  return {extra: _versions(names) for extra, names in found.items() if names}


def _packages_of(name: str, extra: str) -> Iterator[str]:
  """Yields the packages that an extra requires, directly and through other extras."""
  try:
    requirements = importlib.metadata.requires(name) or []
  except importlib.metadata.PackageNotFoundError:
    return  # not installed, or a checkout on the path without metadata
  for requirement in requirements:
    found, condition = _REQUIREMENT.match(requirement), _EXTRA.search(requirement)
    if found is None or condition is None or condition[1] != extra:
      continue
    if found[1] != "mpjax":
      yield found[1]
    for inner in filter(None, (found[2] or "").split(",")):
      yield from _packages_of(found[1], inner)


def _devices() -> dict[str, Any]:
  """Returns the backend and its devices, equal ones once; if there are none, JAX's error."""
  try:
    devices = jax.devices()
  except RuntimeError as error:
    return {"backend": None, "devices": [], "error": str(error)}
  alike: dict[tuple[str, int], int] = {}
  for device in devices:
    key = device.device_kind, device_memory(device) if device.process_index == jax.process_index() else 0
    alike[key] = alike.get(key, 0) + 1
  return {
    "backend": devices[0].platform,
    "devices": [{"kind": kind, "count": count, "memory": memory} for (kind, memory), count in alike.items()],
    "runtime": " ".join(str(devices[0].client.platform_version).split()),
  }


def _text(found: Mapping[str, Any]) -> str:
  """Returns the environment as text, one fact per line."""
  rows = [[name, version or "not installed"] for name, version in found["versions"].items()]
  rows.append(["platform", f"{found['platform']}, {_size(found['memory'])}"])
  for name, packages in found["extras"].items():
    lacks = [package for package, version in packages.items() if version is None]
    state = f"lacks {', '.join(lacks)}" if lacks else ", ".join(f"{p} {v}" for p, v in packages.items())
    rows.append([f"extra {name}", state])
  rows += [["devices", f"{d['count']} x {d['kind']}, {_size(d['memory'])}"] for d in found["devices"]]
  rows.append(["runtime", found["runtime"]] if found["devices"] else ["devices", f"none: {found['error']}"])
  rows += [[name, str(value)] for name, value in (*found["config"].items(), *found["flags"].items())]
  return "\n".join(line for row in table(rows, left=(0, 1)) for line in row)


def _size(memory: int) -> str:
  return f"{bytes_text(memory)} of memory" if memory else "memory unknown"
