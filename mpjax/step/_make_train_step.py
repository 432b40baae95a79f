"""`make_train_step`: a `TrainStep` of a loss function, an optimiser and a policy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Never

import optax

from mpjax._calls import refuse_keywords
from mpjax._lazy import nnx
from mpjax._types import LossFunction, Mesh, PolicyLike
from mpjax.policy import get_policy
from mpjax.policy._precision_warning import warn_of_bare_dtype
from mpjax.sharding import Dims, ShardingRule, ShardingRules
from mpjax.step._layout import make_layout
from mpjax.step._options import StepOptions
from mpjax.step._train_step import TrainStep
from mpjax.step._trained import Chosen

_POLICY, _SCALING = "policy='bf16'", "policy={'base': 'fp16', 'loss_scaling': 1024}"
# What other libraries call an argument, and what to write.
_ELSEWHERE = {
  **dict.fromkeys(("dtype", "compute_dtype", "precision", "mixed_precision"), f"pass {_POLICY}"),
  **dict.fromkeys(("loss_scale", "loss_scaling", "scaler"), f"it is part of a policy: pass {_SCALING}"),
  **dict.fromkeys(
    ("accumulate_grad_batches", "gradient_accumulation_steps", "grad_accum", "accumulation_steps"),
    "pass accumulate=4",
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
  gather_prefetch: int = 1,
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
  `(loss, metrics, model_state)` when it takes `model_state`. A plain scalar is averaged over micro-batches
  and devices as if each counted the same; return `mpjax.Average` where they do not. Metrics may be averages,
  too.

  It takes more arguments by keyword if its
  signature names them: `model_state`; and either `rng`, a fresh key for each step, micro-batch and part of a
  batch, or `row_rngs`, a fresh key for each row of the batch, with which results do not depend on how rows
  are divided. For an `nnx.Module`, `params` is the module itself, and what it mutates (BatchNorm statistics)
  is kept. Of an Equinox module, or any other tree with leaves that are no floating arrays, those alone are
  trained that are; `loss_fn` takes it whole, and the state gives it back.

  A step runs `loss_fn` under `mpjax.autocast` if the policy says `autocast`; otherwise it casts parameters
  and the floating leaves of the batch to `compute_dtype` (once, also under accumulation), never
  `model_state`. It casts what `loss_fn` returns to `output_dtype`; scales the loss if the policy says so;
  and hands gradients in the master dtype to the optimiser. Under a loss scale, or `skip_nonfinite`, a step
  with non-finite gradients leaves parameters, optimiser and model state as they were. So does a step whose
  gradients are finite and which would make parameters or model state non-finite; the loss scale stays then,
  and `metrics["updates_finite"]` is false.

  Args:
    loss_fn: see above.
    tx: any optax transform; the loss scaling that the policy asks for is put around it. If it has a loss
      scale of its own, the policy must have none. Its update is given the unscaled loss as `value`, and the
      unscaled gradients as `grad`, where it takes them; `init` refuses one that needs more.
    policy: whatever `mpjax.get_policy` takes.
    accumulate: number of micro-batches that a batch is split into; gradients and floating metrics are
      averaged over them in float32, an `Average` by what each counts, and integer metrics are summed.
      Micro-batch `i` is rows `i::accumulate`.
    skip_nonfinite: guard a policy without loss scaling too, by `static_loss_scale(tx, 1)`.
    cast_batch: cast the floating leaves of the batch to the compute dtype; without it `loss_fn` casts
      the inputs itself (and may keep targets in float32).
    donate: give the state's buffers to the new state: the old one cannot be used again.
    wrt: what is trained; all parameters, if not given. For a tree of parameters it is a regular expression
      on their paths (`".*/lora_[ab]"`) or a list of them, a tree of booleans, or a function of path and leaf;
      for an `nnx.Module` a filter for its variables, such as `nnx.LoRAParam`. What is not trained has no
      gradient, no optimiser's state and no check, keeps its dtype and every bit, and is divided on a mesh as
      parameters are. A parameter whose updates are zeros, by `optax.set_to_zero`, costs no gradient either.
    recompute: what the backward pass computes again instead of keeping it: as `mpjax.autocast` takes it;
      without autocast `"dots"` keeps the results of matrix products alone, and the others change nothing.
    mesh: devices with axes among `data`, `fsdp` and `tensor`. Each device runs `loss_fn` on its rows of the
      batch, which are divided over `data` and `fsdp`, as micro-batches are: losses, floating metrics and
      model state are averaged, integer metrics summed (`mpjax.batch_axes` is for statistics over all rows).
      Gradients are reduced once a step, in the policy's `reduce_dtype`; parameters and the optimiser's state
      are divided over `fsdp`, and gathered in the compute dtype where nothing reads them in a wider one.
      Without a mesh, arrays that are sharded are left to the compiler.
    sharding: where parameters lie on the mesh: axes by regular expression on the parameter's path, as in
      `{".*/kernel": ("fsdp", "tensor")}`, or a function of path and shape; what they say nothing of has its
      largest dimension over `fsdp`.
    gather: when parameters that are divided over `fsdp` are gathered: once a `"step"`, and kept until the
      backward pass has read them; or `"block"`: each right before it is read, and again in the backward
      pass, so that the model need not fit on a device. Gradients are then divided as soon as they are made,
      for each micro-batch.
    gather_prefetch: with `"block"`, 1 leaves it to the compiler to gather a parameter while the block before
      its reader runs, 0 has it wait for what else the reader needs.
    grad_norm: report `grad_norm` among the metrics, f32[]: the global norm of the unscaled gradients, before
      any clipping. It reads each gradient once more.
    model_state: which state of the model a micro-batch goes on from: that of the `"last"` one, BatchNorm's
      way; or that before the `"step"`, and what micro-batches give is averaged as over devices. The second is
      for state that moves once a step, such as a teacher's average or a codebook.

  Returns:
    A `TrainStep`. First `state = step.init(params)`, then `state, metrics = step(state, batch)`; or, with an
    `nnx.Optimizer(model, step.tx, wrt=...)`, `metrics = step(model, optimizer, batch)` in place.
    `learning_rate` is among the metrics where `optax.inject_hyperparams` keeps it.

  Raises:
    ValueError: if the policy is not understood, asks for something that this step does not do, or
      `accumulate` is not a positive integer.

  Warns:
    PrecisionWarning: for a bare half-precision dtype as a policy, which has also parameters, gradients and
      optimiser state in that dtype, and no loss scaling.
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
    layout=make_layout(mesh, sharding, gather, gather_prefetch),
    grad_norm=grad_norm,
    model_state=model_state,
  )
  return TrainStep(loss_fn, tx, options)
