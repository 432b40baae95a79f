"""`TrainState`: everything that a training step reads and writes, as one pytree."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax

from mpjax._lazy import nnx


@functools.partial(
  jax.tree_util.register_dataclass,
  data_fields=["step", "params", "model_state", "opt_state", "rng", "fp8_state"],
  meta_fields=["graphdef"],
)
@dataclasses.dataclass(frozen=True)
class TrainState:
  """Everything a step reads and writes, as one pytree.

  Attributes:
    step: i32[]; steps taken, skipped ones too.
    params: master weights in the policy's `param_dtype`.
    model_state: what the model carries besides parameters (BatchNorm statistics, counters), in its own
      dtypes; `{}` for none.
    opt_state: state of `TrainStep.tx`.
    rng: key from which each step's key is folded, or `None`.
    graphdef: structure of an `nnx.Module`, or `None`; static.
    fp8_state: amax histories of FP8 products under delayed scaling (`mpjax.init_fp8_state`); `{}` for none.
  """

  step: jax.Array
  params: Any
  model_state: Any
  opt_state: Any
  rng: jax.Array | None
  graphdef: Any = None
  fp8_state: Any = dataclasses.field(default_factory=dict)

  @property
  def model(self) -> nnx.Module:
    """The `nnx.Module` with the current master weights."""
    if self.graphdef is None:
      raise ValueError("this TrainState was not made from an nnx.Module: use .params and .model_state")
    return nnx.merge(self.graphdef, self.params, self.model_state)

  @property
  def step_key(self) -> jax.Array | None:
    """The key of the step that comes next; `None` without `rng`."""
    return None if self.rng is None else jax.random.fold_in(self.rng, self.step)

  def replace(self, **changes: Any) -> TrainState:
    """A copy with some fields replaced."""
    return dataclasses.replace(self, **changes)
