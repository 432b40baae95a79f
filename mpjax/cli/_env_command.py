"""`mpjax env`: versions, devices and flags, for a bug report. Needs no extra and no device."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import re
from typing import Any

import jax

import mpjax

_FLAGS = re.compile(r"(JAX|XLA|MPJAX)_\w+|LIBTPU_INIT_ARGS|CUDA_VISIBLE_DEVICES|NVIDIA_TF32_OVERRIDE")
_PACKAGE = re.compile(r"[\w.-]+")


def run(options: argparse.Namespace) -> None:
  """Runs the command."""
  found = environment()
  if options.json:
    print(json.dumps(found, indent=1))
    return
  print(found["jax"])
  for name, version in (found["versions"] | found["config"] | found["flags"]).items():
    print(f"{name}: {version}")


def environment() -> dict[str, Any]:
  """Returns what JAX says of itself and its devices, versions of packages, and flags, as plain data."""
  try:
    jax_says = str(jax.print_environment_info(return_string=True)).strip()
  except RuntimeError as error:  # no device
    jax_says = f"jax: {jax.__version__}\ndevices: none: {error}"
  try:
    required = importlib.metadata.requires("mpjax") or []
  except importlib.metadata.PackageNotFoundError:  # a checkout on the path without metadata
    required = []
  names = {found[0] for found in map(_PACKAGE.match, required) if found} - {"mpjax"}
  return {
    "jax": jax_says,
    "versions": {"mpjax": mpjax.__version__} | {name: _version(name) for name in sorted(names)},
    "config": {
      name: getattr(jax.config, name) for name in ("jax_enable_x64", "jax_default_matmul_precision")
    },
    "flags": {name: value for name, value in sorted(os.environ.items()) if _FLAGS.fullmatch(name)},
  }


def _version(name: str) -> str:
  try:
    return importlib.metadata.version(name)
  except importlib.metadata.PackageNotFoundError:
    return "not installed"
