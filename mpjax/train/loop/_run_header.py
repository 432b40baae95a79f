"""The header of a run: rows that say what it is about to do."""

from __future__ import annotations

import pathlib

import jax

from mpjax.fp8._hardware import in_force
from mpjax.policy import Policy
from mpjax.step import Layout, TrainState
from mpjax.train.setup._optimizers import describe_optimizer
from mpjax.train.setup._setup import Setup


def header_rows(
  setup: Setup, state: TrainState, directory: pathlib.Path, begins: str, processes: int
) -> dict[str, str]:
  """Returns the rows of the header, by title.

  Args:
    setup: the run's setup.
    state: the run's first state.
    directory: the run directory.
    begins: says where the first state comes from; empty for a new state.
    processes: number of processes.
  """
  policy = setup.policy
  parameters = sum(leaf.size for leaf in jax.tree.leaves(state.arrays))
  scaling, config = policy.loss_scaling, setup.config
  return {
    "policy": policy.reason or policy.full_label,
    **fp8_row(policy),
    **({} if scaling is None else {"loss scale": f"{scaling.kind}, from {scaling.init_scale:g}"}),
    "model": f"{setup.config.model.kind}, {parameters:,} parameters",
    "data": setup.info.description,
    "optimizer": describe_optimizer(config.optimizer, config.train.steps),
    **({} if (decay := config.train.average) is None else {"average": f"of the weights, decay {decay:g}"}),
    "devices": _devices(setup.layout, policy) + (f", in {processes} processes" if processes > 1 else ""),
    "run": f"{directory}" + (f", {begins}" if begins else ""),
  }


def _devices(layout: Layout, policy: Policy) -> str:
  text = f"{layout.mesh.size} x {jax.devices()[0].device_kind}"
  if layout.mesh.size == 1:
    return text
  axes = " x ".join(f"{axis} {size}" for axis, size in layout.mesh.shape.items() if size > 1)
  dtype = "float32" if policy.reduce_dtype is None else policy.reduce_dtype.name
  return f"{text} ({axes})" + (f", gradients cross in {dtype}" if layout.shards > 1 else "")


def fp8_row(policy: Policy) -> dict[str, str]:
  """Returns a row with the recipe and the formats in force on this machine, or none without a recipe."""
  return {} if policy.fp8 is None else {"fp8": in_force(policy.fp8)}
