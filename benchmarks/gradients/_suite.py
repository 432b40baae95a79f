"""How far each gradient of a training step is from float32's: a tied GPT, a ViT and a ResNet in bfloat16.

    python scripts/bench.py gradients [--json FILE]

The first step of three configs of this repository on this machine, with the same parameters and batch: under
autocast and with parameters and batch cast by hand (`autocast: false`), under `jit` with all of XLA's
optimisations and outside it. An error is the norm of the difference over the norm of float32's gradient;
one that is zero in float32 is left out.
"""

from __future__ import annotations

import argparse
from typing import Any

import jax
import numpy as np

from benchmarks._record import origin
from mpjax.train import load_config, make_setup

CONFIGS = ("gpt_stdlib", "vit_digits", "resnet_digits")
POLICIES = {"autocast": "bf16", "by hand": "{base: bf16, autocast: false}"}


def gradients(config: str, policy: str, jitted: bool) -> dict[str, np.ndarray]:
  """The gradients of a config's first step, by the path of the parameter."""
  setup = make_setup(load_config(f"configs/{config}.yaml", [f"policy={policy}", "mesh.data=1"]))
  state = setup.first_state()
  batch = setup.place(next(setup.data.train()))
  run = setup.step.loss_and_gradients
  _, grads = (jax.jit(run) if jitted else run)(state, batch)
  leaves = jax.tree_util.tree_leaves_with_path(grads)
  return {
    jax.tree_util.keystr(path, simple=True, separator="/"): np.asarray(x, np.float64) for path, x in leaves
  }


def run(options: argparse.Namespace) -> dict[str, Any]:
  """Returns the error of each gradient, by config and by how it was computed."""
  errors: dict[str, dict[str, dict[str, float]]] = {}
  for config in CONFIGS:
    exact = gradients(config, "fp32", jitted=True)
    for name, policy in POLICIES.items():
      for jitted in (True, False):
        found = gradients(config, policy, jitted)
        row = {path: _error(found[path], want) for path, want in exact.items() if want.any()}
        column = f"{name}, {'jitted' if jitted else 'not jitted'}"
        errors.setdefault(config, {})[column] = row
        largest = sorted(row.values())
        print(
          f"{config:14} {column:22} median {largest[len(row) // 2]:.4f} largest {largest[-1]:.4f}", flush=True
        )
  return origin("gradients", "jaxlib", "flax") | {"errors": errors}


def _error(found: np.ndarray, exact: np.ndarray) -> float:
  return float(np.linalg.norm(found - exact) / np.linalg.norm(exact))


def add_arguments(parser: argparse.ArgumentParser) -> None:
  """It has none of its own."""
