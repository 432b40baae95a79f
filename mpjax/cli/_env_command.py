"""`mpjax env`: versions, devices and flags, for a bug report. Needs no extra and no device."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import re

import jax

import mpjax

_FLAGS = re.compile(r"(JAX|XLA|MPJAX)_\w+|LIBTPU_INIT_ARGS|CUDA_VISIBLE_DEVICES|NVIDIA_TF32_OVERRIDE")
_PACKAGES = re.compile(r"flax|optax|jmp|numpy|ml.dtypes|grain|orbax.*|pydantic|rich|safetensors|libtpu|jax.*")


def run(options: argparse.Namespace) -> None:
  """Runs the command."""
  try:
    jax_says = str(jax.print_environment_info(return_string=True)).strip()
  except RuntimeError as error:  # no device
    jax_says = f"jax: {jax.__version__}\ndevices: none: {error}"
  there = {found.name: found.version for found in importlib.metadata.distributions()}
  versions = {"mpjax": mpjax.__version__} | {n: there[n] for n in sorted(there) if _PACKAGES.fullmatch(n)}
  flags = {name: value for name, value in sorted(os.environ.items()) if _FLAGS.fullmatch(name)}
  if options.json:
    print(json.dumps({"jax": jax_says, "versions": versions, "flags": flags}, indent=1))
    return
  print(jax_says)
  for name, value in (versions | flags).items():
    print(f"{name}: {value}")
