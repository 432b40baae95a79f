"""Makes the optimiser that a config names: an optax transform with its schedule and clipping."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from mpjax.dtypes import did_you_mean
from mpjax.registry import TARGETS
from mpjax.train._errors import ConfigError
from mpjax.train.config._config import OptimizerConfig
from mpjax.train.config._plugins import place

_OF_OPTAX = (
  "adafactor adagrad adam adamax adamw adan amsgrad lamb lars lion muon nadam nadamw radam rmsprop sgd yogi"
)
OPTIMIZERS = tuple(_OF_OPTAX.split())


def make_optimizer(config: OptimizerConfig, steps: int) -> optax.GradientTransformation:
  """Makes the optax chain of a config: clipping by global norm, then the optimiser with its schedule.

  If the optimiser has a mask for weight decay, only leaves of two or more dimensions (matrices and kernels)
  decay; biases and norms do not.

  ```python
  config = mpjax.train.load_config("gpt_stdlib")
  tx = mpjax.train.make_optimizer(config.optimizer, steps=config.train.steps)
  ```

  Args:
    config: the `optimizer` section.
    steps: number of steps of the run; the schedule ends there unless `schedule_steps` is set.

  Returns:
    An optax transform, without a loss scale.

  Raises:
    ConfigError: for an unknown optimiser, or an option that it does not take.
  """
  schedule = make_schedule(config, steps)
  if config.target is not None:
    title, build, options = f"target={config.target}", TARGETS.find(config.target).fun, dict(config.options)
  else:
    title, (build, options) = f"options={config.options}", _of_optax(config)
  # A TypeError of a plug-in needs its traceback.
  mistakes = (ValueError, TypeError) if config.target is None else (ValueError,)
  try:
    made = build(schedule, **options)
    if not (hasattr(made, "init") and hasattr(made, "update")):
      raise ValueError(f"its function returned a {type(made).__name__}: expected an optax transform")
    if config.target is None:
      # An update of small parameters finds options of a wrong type before training.
      tx, small = optax.with_extra_args_support(made), {"w": jnp.ones((2, 2))}
      jax.eval_shape(lambda x: tx.update(x, tx.init(x), x, value=jnp.ones(())), small)
  except mistakes as error:
    raise ConfigError(f"optimizer.{title}: {' '.join(str(error).split())}{place(error)}") from error
  optimizer: optax.GradientTransformation = made
  return (
    optax.chain(optax.clip_by_global_norm(config.clip_norm), optimizer) if config.clip_norm else optimizer
  )


def _of_optax(config: OptimizerConfig) -> tuple[Callable[..., Any], dict[str, Any]]:
  """Returns the function of an optimiser of optax, and its options."""
  if config.name not in OPTIMIZERS:
    raise ConfigError(
      f"unknown optimizer.name {config.name!r}: expected one of {', '.join(OPTIMIZERS)}"
      + did_you_mean(str(config.name), OPTIMIZERS)
      + "; for an optimizer of a plug-in, write optimizer.target"
    )
  build = getattr(optax, config.name, None) or getattr(optax.contrib, config.name)
  takes = [name for name in inspect.signature(build).parameters if name != "learning_rate"]
  options: dict[str, Any] = dict(config.options)
  for key in options:
    if key not in takes:
      raise ConfigError(f"unknown key 'optimizer.options.{key}': {config.name} takes {', '.join(takes)}")
  decay_key = next((key for key in ("weight_decay", "weight_decay_rate") if key in takes), None)
  if decay_key is not None:
    options.setdefault(decay_key, config.weight_decay)
  elif config.weight_decay:
    raise ConfigError(f"optimizer.weight_decay={config.weight_decay}: {config.name} has no weight decay")
  for mask in {"mask", "weight_decay_mask"}.intersection(takes):
    options.setdefault(mask, lambda params: jax.tree.map(lambda p: p.ndim > 1, params))
  return build, options


def make_schedule(config: OptimizerConfig, steps: int) -> optax.Schedule:
  """Returns the learning rate as a function of the step: a linear warm-up, then what `schedule` says.

  `cosine` and `linear` fall after the warm-up. `wsd` stays constant, and falls linearly in the last
  `decay_fraction` of the steps. The fall ends at step `schedule_steps`, or else at `steps`, at
  `final_fraction` of `learning_rate`. A run shorter than its warm-up ends during the warm-up.
  """
  steps = config.schedule_steps or steps
  peak, left = config.learning_rate, max(steps - config.warmup_steps, 1)
  final = peak * config.final_fraction
  falling = min(max(round(config.decay_fraction * steps), 1), left)
  after: optax.Schedule = {
    "constant": lambda: optax.constant_schedule(peak),
    "cosine": lambda: optax.cosine_decay_schedule(peak, left, alpha=config.final_fraction),
    "linear": lambda: optax.linear_schedule(peak, final, left),
    "wsd": lambda: optax.linear_schedule(peak, final, falling, left - falling),
  }[config.schedule]()
  if not config.warmup_steps:
    return after
  # The warm-up starts one step's share above zero, so the first step changes the parameters.
  warmup = optax.linear_schedule(peak / config.warmup_steps, peak, config.warmup_steps - 1)
  return optax.join_schedules([warmup, after], [config.warmup_steps])


def describe_optimizer(config: OptimizerConfig, steps: int) -> str:
  """Describes an optimiser and its schedule in one line, with the step at which the schedule ends."""
  steps = config.schedule_steps or steps
  parts = [str(config.target or config.name), f"learning rate {config.learning_rate:g}"]
  if config.warmup_steps:
    parts.append(f"warm-up to step {config.warmup_steps}")
  if config.schedule != "constant":
    final = config.learning_rate * config.final_fraction
    parts.append(f"{config.schedule} to {final:g} at step {steps}")
  if config.clip_norm:
    parts.append(f"gradients clipped to norm {config.clip_norm:g}")
  return ", ".join(parts)
