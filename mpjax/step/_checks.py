"""Errors of a training step: policies, parameters, states, batches and loss functions that do not fit."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Float

from mpjax._average import Average, is_average
from mpjax._calls import is_linen_module
from mpjax._lazy import nnx
from mpjax._types import Array, PyTree
from mpjax.casting import make_rules
from mpjax.loss_scale import is_inexact
from mpjax.patterns import named_leaves, path_text
from mpjax.policy import Policy, brief
from mpjax.sharding import on_device
from mpjax.step._train_state import TrainState
from mpjax.step._trained import in_containers

METRICS_OF_SCALER = ("grads_finite", "updates_finite", "skipped_steps", "consecutive_skips")
_CALLS = (
  "make one with state = step.init(params), of an nnx.Module step.init(model), and call step(state, batch), "
  "or step(model, optimizer, batch) with optimizer = nnx.Optimizer(model, step.tx, wrt=nnx.Param)"
)


def require_honoured(policy: Policy, over_devices: bool = True) -> None:
  """Raises `ValueError` for a key of the policy that has no effect in a step; `over_devices`: with a mesh."""
  for keys, is_met, what in (
    (("accum_dtype", "grad_dtype", "overrides", "fp8"), policy.autocast, "autocast: true in the policy"),
    (("reduce_dtype", "gather_dtype"), over_devices, "a mesh: make_train_step(..., mesh=jax.make_mesh(...))"),
  ):
    for key in keys:
      value = brief(getattr(policy, key))
      if not is_met and value not in (None, {}):
        raise ValueError(f"policy key {key}={value!r} has no effect here: it needs {what}")
  if policy.autocast:
    make_rules(policy)
  if policy.optimizer_dtype == jnp.float16:
    few = "float32, bfloat16, int8 or float8_e4m3fn"
    raise ValueError(f"policy key optimizer_dtype='float16': second moments leave its range; expected {few}")


def require_arrays(params: PyTree) -> None:
  """Raises `ValueError` for a number instead of an array, and for what is not a tree of parameters."""
  if jax.tree_util.all_leaves([params]) and (is_linen_module(params) or not hasattr(params, "dtype")):
    raise ValueError(
      f"params is a {type(params).__name__}: expected a tree of parameters, an Equinox module or an "
      "nnx.Module; for a linen module step.init(model.init(key, x)['params'])"
    )
  for path, leaf in jax.tree_util.tree_leaves_with_path(params):
    if type(leaf) in (int, float, complex) and in_containers(path):
      raise ValueError(f"parameter {path_text(path)!r} is a {type(leaf).__name__}: expected an array")


def require_differentiable(params: PyTree) -> None:
  """Raises `ValueError` for a parameter that has no gradient."""
  for name, leaf in named_leaves(params):
    if not is_inexact(leaf):
      raise ValueError(
        f"parameter {name!r} is {jnp.result_type(leaf)} and cannot be trained: put it into model_state, or "
        "let loss_fn close over it"
      )


def require_makings(loss_fn: object, tx: object) -> None:
  """Raises `TypeError` for an object that is not a loss function, or not an optax transform."""
  if hasattr(loss_fn, "update") and hasattr(loss_fn, "init") and callable(tx):
    raise TypeError("the arguments are swapped: call make_train_step(loss_fn, tx, policy)")
  if isinstance(loss_fn, nnx.Module) or is_linen_module(loss_fn):
    raise TypeError(
      f"loss_fn is the module {type(loss_fn).__name__}: expected a function, def loss_fn(model, batch): ...; "
      "for a linen module def loss_fn(params, batch): logits = model.apply({'params': params}, ...); ..."
    )
  if not callable(loss_fn):
    raise TypeError(f"loss_fn is a {type(loss_fn).__name__}: expected a function (params, batch) -> loss")
  if not (hasattr(tx, "init") and hasattr(tx, "update")):
    raise TypeError(f"tx is a {type(tx).__name__}: expected an optax transform")


def require_state(state: object, batch: PyTree) -> None:
  """Raises `TypeError` if a step's first argument is not a `TrainState`, or its second one is."""
  if isinstance(batch, TrainState):
    raise TypeError("a TrainState instead of a batch, or the arguments are swapped: call step(state, batch)")
  if not isinstance(state, TrainState):
    raise TypeError(f"expected a TrainState, not a {type(state).__name__}: {_CALLS}")


def require_state_and_batch(tool: str, args: tuple[Any, ...]) -> tuple[TrainState, PyTree]:
  """Returns the arguments of a tool for a step, the state on the device; `TypeError` for others."""
  if len(args) != 2:
    call = f"mpjax.{tool}(step, state, batch)"
    raise TypeError(f"mpjax.{tool} got a TrainStep: call {call}, with policy= by keyword")
  require_state(*args)
  state, batch = args  # tools may take an iterator of batches, which is not a tree
  return on_device(state), batch


def require_in_place(model: object, optimizer: object, tx: optax.GradientTransformation) -> None:
  """Raises `TypeError` or `ValueError` unless there is a module and an optimizer with a step's `tx`."""
  if not isinstance(model, nnx.Module) or not isinstance(optimizer, nnx.Optimizer):
    given = f"a {type(model).__name__} and a {type(optimizer).__name__}"
    raise TypeError(f"expected a TrainState, not {given}: {_CALLS}")
  if optimizer.tx is not tx:
    raise ValueError("the optimizer was not made with this step's tx: nnx.Optimizer(model, step.tx, wrt=...)")


def require_param_dtype(params: PyTree, policy: Policy) -> None:
  """Raises `ValueError` for parameters that are not in the policy's `param_dtype`."""
  expected = jax.eval_shape(policy.cast_to_param, params)
  for (name, p), q in zip(named_leaves(params), jax.tree.leaves(expected), strict=True):
    if p.dtype != q.dtype:
      raise ValueError(
        f"parameter {name!r} is {p.dtype.name}, but the policy has param_dtype={q.dtype.name}: first call "
        "nnx.update(model, policy.cast_to_param(nnx.state(model, nnx.Param))), then make the optimizer"
      )


def kept(state: TrainState) -> TrainState:
  """Returns a state; raises `ValueError` for one whose buffers an earlier step has reused."""
  leaf = state.step  # JAX's own check would end the process on a mesh of CPU devices
  if isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer) and leaf.is_deleted():
    raise ValueError(
      "this TrainState is deleted, because a step reuses the buffers of its state: use the new one, or keep "
      "the old one with make_train_step(..., donate=False)"
    )
  return state


def require_given(keywords: tuple[str, ...], name: str, value: object, call: str) -> None:
  """Raises `ValueError` if `loss_fn` takes an argument that a call leaves out, or does not take one given."""
  if name in keywords and value is None:
    raise ValueError(f"loss_fn takes {name!r}, which was not given: pass it with {call}")
  if name not in keywords and value is not None:
    raise ValueError(f"loss_fn does not take {name!r}, which {call} gives: leave it out")


def unpack(
  out: PyTree, takes_state: bool, grad_norm: bool = False
) -> tuple[Float[Array, ""] | Average, dict[str, Array | Average], PyTree | None]:
  """Returns loss, metrics and model state (or `None`) from the output of a loss function that `takes_state`.

  Raises `ValueError` for another form, and for a metric that a step reports, as `grad_norm` may be.
  """
  parts = out if isinstance(out, tuple) else (out,)
  expected = "(loss, metrics, model_state)" if takes_state else "loss or (loss, metrics)"
  if len(parts) not in ((3,) if takes_state else (1, 2)):
    raise ValueError(f"loss_fn returned {len(parts)} value(s): expected {expected}")
  given: tuple[Any, ...] = (*parts, *({}, None)[len(parts) - 1 :])
  loss, metrics, model_state = given
  if not (is_average(loss) or hasattr(loss, "dtype") or isinstance(loss, (int, float))):
    raise ValueError(f"loss_fn returned a loss of type {type(loss).__name__}: expected {expected}")
  if not isinstance(metrics, dict):
    raise ValueError(
      f"loss_fn returned metrics of type {type(metrics).__name__}: expected a dict of arrays. If aux is "
      "something else, pass the loss alone, as in lambda *args: loss_fn(*args)[0]"
    )
  reported = {"loss", "loss_scale", *METRICS_OF_SCALER, *(["grad_norm"] if grad_norm else [])}
  if taken := metrics.keys() & reported:
    raise ValueError(f"loss_fn returned a metric named {min(taken)!r}, which a step reports: rename it")
  loss, metrics = jax.tree.map(jnp.asarray, (loss, metrics))
  for name, average in {"loss": loss, **metrics}.items():
    if is_average(average) and jnp.shape(average.total) + jnp.shape(average.count) != ():
      raise ValueError(
        f"loss_fn returned a {name} whose total is {jax.typeof(average.total)} and whose count is "
        f"{jax.typeof(average.count)}: expected scalars, as in Average(jnp.sum(losses * mask), jnp.sum(mask))"
      )
  total = jax.typeof(loss.total if is_average(loss) else loss)
  if total.shape or not jnp.issubdtype(total.dtype, jnp.floating):
    raise ValueError(f"loss_fn returned a loss of {total}: expected a floating scalar")
  return loss, metrics, model_state
