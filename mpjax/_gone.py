"""Old names of mpjax and old keys of its policies and configs: what to write in their place."""

from __future__ import annotations

from typing import Any

# What to write in place of old names, spaces between them: an attribute by its package or class, a key by
# the mapping that had it, a value by its key, or a flag by its command: `optim.name`, `loss_scaling.key`,
# `recompute.value`, `numerics.--flag`.
_TABLE = {
  "loss_scale.import_loss_scale loss_scale.export_loss_scale": (
    "the presets have the rules of other libraries, tx = mpjax.with_loss_scaling(tx, 'grad_scaler'); "
    "tx.init(params)._replace(scale=jnp.float32(s), good_steps=jnp.int32(n)) goes on from a scale"
  ),
  "loss_scale.track_skips loss_scale.skip_report loss_scale.scale_history": (
    "mpjax.get_loss_scale(opt_state) has the scale and counts skips, "
    "mpjax.loss_scale.nonfinite_leaves(grads) names leaves, mpjax.find_nonfinite the operation"
  ),
  "optim.quantize_state optim.dequantize_state": (
    "an optimiser whose state is kept in 8 bits is mpjax.quantized_state(tx, 'int8'); step.adopt(state, "
    "before) keeps the state of another step so, step.user_state(state) returns it in float32"
  ),
  "optim.split_master_weights optim.merge_master_weights optim.find_master_weights": (
    "step.adopt(state, before) and train.init_from give a step or run the master weights of another, "
    "step.user_state(state) returns them in float32"
  ),
  "recompute.dots": "islands keep as little; jax.checkpoint around a block, or train.recompute: blocks, less",
  "config.${}": "write a plain value; a shell puts in one of the environment, as in out=$HOME/runs/x",
  "mesh.gather_prefetch": "leave it out, the compiler orders the gathers",
  "loss_scaling.consecutive_hysteresis": "leave it out: growth restores the patience of hysteresis",
  "numerics.compare_fp8_recipes numerics.Fp8Comparison numerics.Fp8Operand": (
    "mpjax.tune measures the gradient error of each recipe: candidates=['bf16', {'base': 'fp8', 'fp8': ...}]"
  ),
  "numerics.significant_digits numerics.SignificantDigits": (
    "mpjax.inspect_numerics(...).error_by_module('weight gradient') has the errors against float32"
  ),
  "numerics.logprob_mismatch numerics.LogprobMismatch": (
    "the guide to switching the policy compares log-probabilities in a few lines of JAX"
  ),
  "numerics.NumericsFigures": "mpjax.NumericsReport has its attributes",
  "NumericsReport.save_pictures numerics.--pictures": (
    "save_html writes a page that draws them, --html says where"
  ),
  "NumericsReport.descent_quality NumericsReport.descent_quality_in": (
    "lost_updates() has the shares of updates that weights of each format lose"
  ),
  "numerics.--no-advice": "leave it out: advice runs nothing",
  "numerics.Measured": "advice is not tried: mpjax.tune measures policies",
  "numerics.inspection_programs": "mpjax.inspect_numerics runs them",
  "fp8.include fp8.exclude": (
    "overrides choose modules: {'.*/head': bf16} leaves one out, {mlp: fp8, '.*': bf16} takes no others"
  ),
  "fp8.amax_compute": "leave it out: delayed scaling goes by the largest amax of its history",
  "fp8.pow2_scales": "leave it out: scales of a tensor are powers of two, those of a channel any numbers",
  "casting.register_kernel": (
    "wrap the function that calls the kernel, also one of another's module: module.kernel = "
    "mpjax.half_precision(module.kernel)"
  ),
  "ExplainedOperation.rule": "code is the reason, and why has it in words",
  "ExplainedIsland.copied": "operations has them",
  "Explanation.fragile": "mpjax.inspect_numerics measures differences and angles and has their lines",
  "tune.minutes tune.--minutes tune.trials": (
    "leave it out: a search takes less than a minute, and candidates (policy=bf16,fp8,fp32) makes it shorter"
  ),
  "tune.recompute TuneResult.recompute": (
    "mpjax.cheapest and mpjax plan --cheapest choose what the backward pass computes again"
  ),
  "train.make_task": "make_setup(config).task has the model with its loss",
  "train.parse_config": "load_config takes a mapping of keys, too",
  "tune.plan_of": "leave it out: tune plans the TrainStep that it is given, on its mesh",
  "tune.--prove tune.--seeds": "train both: mpjax train tuned.yaml, and mpjax train CONFIG policy=fp32",
  "explain.--by numerics.--by": "write --table modules",
  "plan.--multiple": "leave it out: batches are multiples of what the mesh and train.accumulate divide",
  "tune.--picture TuneResult.save_picture TuneResult.front": (
    "result.trials (--json FILE) have the cost and the error of every policy"
  ),
  "Noise.how": "the noise is from the difference of neighbouring batches, or of the halves of a single one",
  "GradientError.loss": "leave it out: a policy is judged by its gradient",
  "GradientError.loss_scale": "leave it out: it is the policy's, halved until the gradient is finite",
  "TuneResult.save_json": "pathlib.Path(file).write_text(json.dumps(result.to_dict()))",
  "TuneResult.conclusion": "str(result) begins with it",
  "formats.print_formats": "print(mpjax.formats.format_table())",
  "formats.MatrixUnit": "mpjax.formats.MATRIX_UNITS[name] has the multiples by dtype",
  "formats.SpeedData": "mpjax.formats.DeviceData explains the keys of speeds",
  "formats.utilisation": "math.prod(sizes) / math.prod(mpjax.formats.padded(unit, dtype, *sizes))",
  "planner.KernelGroup Plan.fused": "fused kernels are the rows of Plan.products that have a kernel's name",
  "plan.--picture": "--json FILE has the bytes of each part; docs/notebooks/plan_7b.ipynb draws them",
  "Plan.inference Plan.checkpoint": "multiply Plan.parameters by the bytes that each takes there",
  "ProductGroup.operation": "path and source have the line; kernel names a fused kernel",
  "planner.PlanFigures": "mpjax.Plan has its attributes",
  "Memory.training_state": "Plan.bytes_per_parameter('master weights', 'optimizer state') has what stays",
  "Memory.gathered": "compute copies has the gathered weights at the peak, Plan.collectives what is gathered",
  "Floor.touched_bytes Floor.cache": "moved_bytes has the least bytes, whatever a cache keeps",
  "Compiled.seconds": "time the call of mpjax.plan",
  "Compiled.difference": "compare Plan.memory.parts with Plan.compiled.memory.parts",
  "loss_scale.scaled_region": (
    "give each loss an optimiser and a scale of its own, and call mpjax.value_and_grad(loss_fn, opt_state) "
    "once for each loss"
  ),
}
INSTEAD = {name: text for names, text in _TABLE.items() for name in names.split()}

# What to write in place of the top-level names of other libraries, and of names that are public in a package.
_ELSEWHERE = {
  "layerwise_loss_scale loss_scale_metrics gradient_norm nonfinite_leaves check_loss_scaling": (
    "it is mpjax.loss_scale.NAME"
  ),
  "GradScaler DynamicLossScale LossScaleOptimizer DynamicScale": (
    "the loss scale is part of the optimiser: tx = mpjax.dynamic_loss_scale(tx), and loss, grads = "
    "mpjax.value_and_grad(loss_fn, opt_state)(params, batch)"
  ),
  "StaticLossScale": "tx = mpjax.static_loss_scale(tx, 1024.0)",
  "NoOpLossScale": "leave it out: mpjax.value_and_grad serves an optimiser without a loss scale, too",
  "cast_to_compute cast_to_param cast_to_output": "mpjax.get_policy('bf16').cast_to_compute(tree)",
  "mixed_precision set_global_policy set_policy initialize amp": (
    "no policy is global: wrap the function, loss = mpjax.autocast(loss_fn, 'bf16'), or the whole step, "
    "step = mpjax.make_train_step(loss_fn, tx, policy='bf16')"
  ),
  "filter_grad filter_value_and_grad": (
    "mpjax.value_and_grad(loss_fn, opt_state), or mpjax.make_train_step, which takes Equinox modules"
  ),
  "DDP FSDP DistributedDataParallel FullyShardedDataParallel no_sync": (
    "a step divides batch and parameters over a mesh: mpjax.make_train_step(loss_fn, tx, policy, mesh=mesh)"
  ),
  "clip_grad_norm_ clip_grad_norm unscale_": (
    "the optimiser inside the loss scale sees unscaled gradients: tx = "
    "mpjax.dynamic_loss_scale(optax.chain(optax.clip_by_global_norm(1.0), tx))"
  ),
  "Adam8bit AdamW8bit adamw8bit": "mpjax.quantized_state(optax.adamw(1e-3, b2=0.95), 'int8')",
  "half": "mpjax.half_precision(f), a region that runs in half precision, or mpjax.get_policy('half')",
  "select_tree": "mpjax.keep_if_finite(opt_state, new, old)",
  "is_finite": "mpjax.all_finite(tree)",
}

# The configs of older runs have every key: those that went, with the value that they had there, or a function
# that gives it for their mapping.
_IN_OLDER_RUNS: dict[str, Any] = {
  "policy.loss_scaling.consecutive_hysteresis": False,
  "mesh.gather_prefetch": 1,
  "policy.fp8.include": [],
  "policy.fp8.exclude": [],
  "policy.fp8.amax_compute": "max",
  # Kernels are chosen, not named.
  "model.attention": lambda model: (
    model["attention"]
    if model.get("kind") in ("gpt", "vit") and model["attention"] in ("auto", "cudnn", "splash")
    else None
  ),
  "policy.fp8.pow2_scales": lambda fp8: fp8.get("recipe") != "per_channel",
}


def without_old_keys(config: Any, place: str = "") -> Any:
  """Returns a config, or its part at `place`, without keys that went and that say what holds anyway."""
  if not isinstance(config, dict):
    return config
  kept = {f"{place}{key}": (key, value) for key, value in config.items()}

  def is_old(path: str, value: Any) -> bool:
    usual = _IN_OLDER_RUNS.get(path)
    return path in _IN_OLDER_RUNS and bool(value == (usual(config) if callable(usual) else usual))

  return {
    key: without_old_keys(value, f"{path}.") for path, (key, value) in kept.items() if not is_old(path, value)
  }


def instead(name: str, place: str = "") -> str:
  """Returns `": "` and what to write in place of an old name or key; `""` for any other.

  Args:
    name: the name or key, without dots.
    place: the package, or the mapping that the key was in; `""` finds the name in each.
  """
  olds = [old for old in INSTEAD if old == f"{place}.{name}" or (not place and old.endswith(f".{name}"))]
  return f": {INSTEAD[olds[0]]}" if olds else ""


def missing(module: str, name: str) -> AttributeError:
  """Returns the error of a module without an attribute, for its `__getattr__`.

  Args:
    module: its full name; `mpjax` knows the old names of its packages, too.
    name: the attribute.
  """
  place = module.removeprefix("mpjax").removeprefix(".")
  way = instead(name, place)
  if not place:
    texts = [text for names, text in _ELSEWHERE.items() if name in names.split()]
    way += "".join(f": {text.replace('NAME', name)}" for text in texts)
  return AttributeError(f"module {module!r} has no attribute {name!r}{way}")
