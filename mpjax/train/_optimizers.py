"""The optimiser that a config names: an optax transform with its schedule and clipping."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from mpjax._types import PyTree
from mpjax.dtypes import did_you_mean
from mpjax.train._config import OptimizerConfig
from mpjax.train._errors import ConfigError

OPTIMIZERS = (
  "adafactor",
  "adagrad",
  "adam",
  "adamax",
  "adamw",
  "adan",
  "amsgrad",
  "lamb",
  "lars",
  "lion",
  "nadam",
  "nadamw",
  "radam",
  "rmsprop",
  "sgd",
  "yogi",
)


def make_optimizer(config: OptimizerConfig, steps: int) -> optax.GradientTransformation:
  """Returns the optax chain of a config: clipping by global norm, then the optimiser on its schedule.

  Weight decay, where the optimiser has a mask for it, applies to matrices and kernels alone (leaves of
  two or more dimensions), not to biases and norms.

  Args:
    config: the `optimizer` section.
    steps: length of the run, where the schedule ends.

  Raises:
    ConfigError: for an unknown optimiser, or an option that it does not take.
  """
  if config.name not in OPTIMIZERS:
    raise ConfigError(
      f"unknown optimizer.name {config.name!r}: expected one of {', '.join(OPTIMIZERS)}"
      + did_you_mean(config.name, OPTIMIZERS)
    )
  build = getattr(optax, config.name)
  takes = inspect.signature(build).parameters
  options: dict[str, Any] = dict(config.options)
  for key in options:
    if key not in takes or key == "learning_rate":
      names = ", ".join(name for name in takes if name != "learning_rate")
      raise ConfigError(f"unknown key 'optimizer.options.{key}': {config.name} takes {names}")
  decay_key = next((key for key in ("weight_decay", "weight_decay_rate") if key in takes), None)
  if decay_key is not None:
    options.setdefault(decay_key, config.weight_decay)
  elif config.weight_decay:
    raise ConfigError(f"optimizer.weight_decay={config.weight_decay}: {config.name} has no weight decay")
  for mask in ("mask", "weight_decay_mask"):
    if mask in takes:
      options.setdefault(mask, _matrices)
  try:
    optimizer = build(make_schedule(config, steps), **options)
    jax.eval_shape(_trial_step(optimizer), {"w": jnp.ones((2, 2))})
  except (TypeError, ValueError) as error:
    raise ConfigError(f"optimizer.options={config.options}: {' '.join(str(error).split())}") from error
  return (
    optax.chain(optax.clip_by_global_norm(config.clip_norm), optimizer) if config.clip_norm else optimizer
  )


def make_schedule(config: OptimizerConfig, steps: int) -> optax.Schedule:
  """Returns the learning rate by step: a linear warm-up, then constant, cosine or linear decay.

  The decay ends at step `steps`, at `final_fraction` of `learning_rate`; a run shorter than its warm-up
  ends within the ramp.
  """
  peak, left = config.learning_rate, max(steps - config.warmup_steps, 1)
  after: optax.Schedule = {
    "constant": lambda: optax.constant_schedule(peak),
    "cosine": lambda: optax.cosine_decay_schedule(peak, left, alpha=config.final_fraction),
    "linear": lambda: optax.linear_schedule(peak, peak * config.final_fraction, left),
  }[config.schedule]()
  if not config.warmup_steps:
    return after
  # The first step already moves: the ramp starts one step's share above zero.
  warmup = optax.linear_schedule(peak / config.warmup_steps, peak, config.warmup_steps - 1)
  return optax.join_schedules([warmup, after], [config.warmup_steps])


def _trial_step(optimizer: optax.GradientTransformation) -> Callable[[Any], Any]:
  """Returns a step on small parameters: an option of the wrong type shows here, not in a training step."""
  tx = optax.with_extra_args_support(optimizer)
  return lambda params: tx.update(params, tx.init(params), params, value=jnp.ones(()))


def _matrices(params: PyTree) -> PyTree:
  return jax.tree.map(lambda p: p.ndim > 1, params)
