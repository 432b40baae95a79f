"""`make_train_step`: a `TrainStep` from a loss function, an optimiser and a policy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Never

import optax

from mpjax._calls import refuse_keywords
from mpjax._lazy import nnx
from mpjax._types import LossFunction, Mesh, PolicyLike
from mpjax.policy import get_policy, warn_of_bare_dtype
from mpjax.sharding import Dims, ShardingRule, ShardingRules
from mpjax.step._layout import make_layout
from mpjax.step._loss import StepOptions
from mpjax.step._train_step import TrainStep
from mpjax.step._trained import Chosen

# Other libraries' names of arguments, with what to write here.
_ELSEWHERE = {
  "dtype compute_dtype precision mixed_precision": "pass policy='bf16'",
  "loss_scale loss_scaling scaler": (
    "it is part of the policy: pass policy={'base': 'fp16', 'loss_scaling': 'grad_scaler'}"
  ),
  "accumulate_grad_batches gradient_accumulation_steps grad_accum accumulation_steps": "pass accumulate=4",
  "clip clip_norm max_grad_norm gradient_clip_val": (
    "clip in the optimiser: tx = optax.chain(optax.clip_by_global_norm(1.0), tx)"
  ),
  "optimizer_dtype master_weights param_dtype grad_dtype fp8": (
    "it is part of a policy, as in policy={'base': 'bf16_pure', 'optimizer_dtype': 'int8'}"
  ),
  "has_aux": "return (loss, metrics) from loss_fn, metrics being a dict of arrays",
  "donate_argnums": "pass donate=True or donate=False",
}


def make_train_step(
  loss_fn: LossFunction,
  tx: optax.GradientTransformation,
  policy: PolicyLike = "auto",
  *,
  accumulate: int = 1,
  skip_nonfinite: bool = False,
  cast_batch: bool = True,
  donate: bool = True,
  wrt: Chosen | nnx.filterlib.Filter | None = None,
  recompute: str = "islands",
  mesh: Mesh | None = None,
  sharding: Mapping[str, Dims | None] | ShardingRule | ShardingRules | None = None,
  gather: str = "step",
  offload: str | None = None,
  grad_norm: bool = False,
  model_state: str = "last",
  **unknown: Never,
) -> TrainStep:
  """Makes one jitted training step: casting, loss scaling, accumulation, the update and metrics.

  ```python
  step = mpjax.make_train_step(loss_fn, optax.adamw(1e-3), policy="fp16", accumulate=4)
  state = step.init(params)
  state, metrics = step(state, batch)
  ```

  `loss_fn(params, batch)` returns the loss (floating []), or `(loss, metrics)` with a dict of arrays, or
  `(loss, metrics, model_state)` if it takes `model_state`. A plain scalar is averaged over micro-batches
  and devices as if each counted the same; if they do not, return `mpjax.Average`. Metrics may also be
  averages.

  `loss_fn` gets more arguments by keyword if its signature names them. `model_state` is the model's state.
  `rng` is a fresh key for each step, micro-batch and part of a batch. `row_rngs`, an alternative, is a fresh
  key for each row of the batch; with it, results do not depend on the division of rows. For an `nnx.Module`,
  `params` is the module itself, and its changes (BatchNorm statistics) are kept. In an Equinox module, or
  another tree with leaves that are not floating arrays, only the floating arrays are trained; `loss_fn` gets
  the whole tree, and the state returns it.

  A step runs `loss_fn` under `mpjax.autocast` if the policy says `autocast`. Otherwise it casts parameters
  and the floating leaves of the batch to `compute_dtype` (once, also under accumulation), never
  `model_state`. It casts the results of `loss_fn` to `output_dtype`, scales the loss if the policy says so,
  and gives the optimiser gradients in the master dtype. Under a loss scale, or `skip_nonfinite`, a step
  with non-finite gradients leaves parameters, optimiser and model state as they were. A step with finite
  gradients also does, if it would make parameters or model state non-finite; then the loss scale stays,
  and `metrics["updates_finite"]` is false.

  Args:
    loss_fn: the loss function, as described above.
    tx: any optax transform; the policy's loss scaling is put around it. If it has its own loss
      scale, the policy must have none. Its update gets the unscaled loss as `value` and the
      unscaled gradients as `grad`, if it takes them; `init` refuses a transform that needs more.
    policy: what `mpjax.get_policy` takes.
    accumulate: number of micro-batches that a batch is split into. Gradients and floating metrics are
      averaged over them in float32, an `Average` by its counts, and integer metrics are summed.
      Micro-batch `i` is rows `i::accumulate`.
    skip_nonfinite: also guard a policy without loss scaling, by `static_loss_scale(tx, 1)`.
    cast_batch: cast the floating leaves of the batch to the compute dtype; if false, `loss_fn` casts
      the inputs itself (and may keep targets in float32).
    donate: reuse the state's buffers for the new state: the old one cannot be used again.
    wrt: the parameters to train; by default all. For a tree of parameters it is a regular expression
      on their paths (`".*/lora_[ab]"`) or a list of them, a tree of booleans, or a function of path and leaf.
      For an `nnx.Module` it is a filter for its variables, such as `nnx.LoRAParam`. Other parameters have no
      gradient, no optimiser state and no check, keep their dtype and every bit, and are divided on a mesh
      as usual. A parameter whose updates are zeros, by `optax.set_to_zero`, also has no gradient.
    recompute: what the backward pass recomputes instead of keeping it, as in `mpjax.autocast`. Without
      autocast it changes nothing.
    mesh: devices with axes among `data`, `fsdp` and `tensor`. Each device runs `loss_fn` on its rows of the
      batch, which are divided over `data` and `fsdp`, as micro-batches are. Losses, floating metrics and
      model state are averaged, integer metrics summed (`mpjax.batch_axes` is for statistics over all rows).
      Gradients are reduced once per step, in the policy's `reduce_dtype`. Parameters and the optimiser's
      state are divided over `fsdp`, and gathered in the compute dtype if nothing reads them in a wider one.
      Without a mesh, the compiler handles arrays that are sharded.
    sharding: the sharding of parameters: axes by regular expression on the parameter's path, as in
      `{".*/kernel": ("fsdp", "tensor")}`, or a function of path and shape. A parameter without a rule has its
      largest dimension divided over `fsdp`.
    gather: when to gather parameters that are divided over `fsdp`. `"step"`: once per step; they are kept
      until the backward pass has read them. `"block"`: each right before its use, and again in the backward
      pass, so that the model need not fit on a device; gradients are then divided as soon as they are
      computed, for each micro-batch.
    offload: `"optimizer"` keeps the optimiser's state in the host's memory between steps. Each step moves it
      to the device and back, except arrays of fewer than 1024 entries. Needs `mesh`, which may have one
      device.
    grad_norm: report `grad_norm` among the metrics, f32[]: the global norm of the unscaled gradients, before
      any clipping. This reads each gradient once more.
    model_state: the model state that a micro-batch starts from: the state after the `"last"` one, as
      BatchNorm needs; or the state before the `"step"`, with an average over micro-batches as over devices.
      The second is for state that moves once a step, such as a teacher's average or a codebook.

  Returns:
    A `TrainStep`: `step.init(params)`, then `step(state, batch)`; or in place, with an `nnx.Optimizer(model,
    step.tx, wrt=...)`, `metrics = step(model, optimizer, batch)`. Metrics include `learning_rate` if
    `optax.inject_hyperparams` keeps it.

  Raises:
    TypeError: for arguments that are swapped, unknown, or of another kind.
    ValueError: if the policy is invalid or asks for something that this step does not do, or
      `accumulate` is not a positive integer.

  Warns:
    PrecisionWarning: for a bare half-precision dtype as a policy, which puts parameters, gradients and
      optimiser state in that dtype too, without loss scaling.
  """
  refuse_keywords(make_train_step, unknown, _ELSEWHERE)
  warn_of_bare_dtype(policy)
  options = StepOptions(
    policy=get_policy(policy),
    wrt=wrt,
    accumulate=accumulate,
    skip_nonfinite=skip_nonfinite,
    cast_batch=cast_batch,
    donate=donate,
    recompute=recompute,
    layout=make_layout(mesh, sharding, gather, offload),
    grad_norm=grad_norm,
    model_state=model_state,
  )
  return TrainStep(loss_fn, tx, options)
