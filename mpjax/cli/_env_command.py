"""`mpjax env`: versions, devices and flags, for a bug report. Needs no extra and no device."""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import os
import re

import jax

import mpjax

_FLAGS = re.compile(r"(JAX|XLA|MPJAX)_\w+|LIBTPU_INIT_ARGS|CUDA_VISIBLE_DEVICES|NVIDIA_TF32_OVERRIDE")
_PACKAGE = re.compile(r"[\w.-]+")


def run(options: argparse.Namespace) -> None:
  """Runs the command."""
  try:
    jax_says = str(jax.print_environment_info(return_string=True)).strip()
  except RuntimeError as error:  # no device
    jax_says = f"jax: {jax.__version__}\ndevices: none: {error}"
  versions = {"mpjax": mpjax.__version__}
  with contextlib.suppress(
    importlib.metadata.PackageNotFoundError
  ):  # a checkout on the path without metadata
    required = map(_PACKAGE.match, importlib.metadata.requires("mpjax") or [])
    for name in sorted({found[0] for found in required if found} - {"mpjax"}):
      try:
        versions[name] = importlib.metadata.version(name)
      except importlib.metadata.PackageNotFoundError:
        versions[name] = "not installed"
  settings = {name: getattr(jax.config, name) for name in ("jax_enable_x64", "jax_default_matmul_precision")}
  flags = {name: value for name, value in sorted(os.environ.items()) if _FLAGS.fullmatch(name)}
  if options.json:
    print(json.dumps({"jax": jax_says, "versions": versions, "config": settings, "flags": flags}, indent=1))
    return
  print("\n".join([jax_says, *(f"{name}: {value}" for name, value in (versions | settings | flags).items())]))
