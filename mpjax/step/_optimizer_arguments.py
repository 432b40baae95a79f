"""The arguments that a step gives an optimiser's `update` in addition to gradients, state and parameters."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import optax.contrib
from jax.tree_util import PyTreeDef

from mpjax._types import PyTree
from mpjax.dtypes import as_shapes, widen_floating
from mpjax.patterns import named_leaves

_GIVEN = ("value", "grad")
_REFUSED = re.compile(r"unexpected keyword argument '(\w+)'")

_LOOP = (
  "write the loop yourself: loss, grads = mpjax.value_and_grad(loss_fn, opt_state)({params}, batch); "
  "updates, opt_state = tx.update(grads, opt_state, params{more}); "
  "params = mpjax.apply_updates(params, updates)"
)
_LOSS = "lambda p: loss_fn(p, batch)"
# From the name in an error of `update` to the arguments that give it in a loop.
_MISSING = {
  "value_fn": f", value=loss, grad=grads, value_fn={_LOSS}",
  "grad_fn": ", grad_fn=jax.grad(lambda p, i: loss_fn(p, batch))",
  "obj_fn": f", obj_fn={_LOSS}",
}


def with_step_arguments(tx: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
  """Wraps `tx` so that its update gets the loss and the gradients if it takes them, and only then.

  An update that names its keyword arguments takes those. One with `**extra_args` may pass them on to another
  that does not (`optax.chain(optax.contrib.sam(...))`), so an update of shapes is tried once: by `init`, or
  if there was none, by `update`.

  Args:
    tx: any optax transform.

  Returns:
    A transform with the state of `tx`. Its `update` takes `value`, the unscaled loss; the `grad` of `tx` is
    the gradients given to `update`.

  Raises:
    ValueError: by `init`, if `tx` cannot run in a step: its update needs more than a step has, or has another
      shape than its parameter.
  """
  names, is_open = _keywords(tx.update)
  found: list[tuple[str, ...]] = [] if is_open else [names]
  passes_others = is_open and isinstance(tx, optax.GradientTransformationExtraArgs)

  def init(params: PyTree) -> PyTree:
    leaves = jax.tree.leaves(params)
    given = set(map(id, leaves))
    # Copies, also for an optimiser that keeps the first parameters: a step reuses the buffers of both.
    state = jax.tree.map(lambda x: jnp.copy(x) if id(x) in given else x, tx.init(params))
    if leaves and all(hasattr(leaf, "dtype") for leaf in leaves):  # not from optax.tree_map_params
      found[:] = [_tried(tx, names, (params, widen_floating(params)), state, params)]
    return state

  def update(updates: PyTree, state: PyTree, params: PyTree = None, **extra: object) -> tuple[PyTree, PyTree]:
    if not found:
      found.append(_tried(tx, names, (updates,), state, params))
    given = {"grad": updates, **extra}
    taken = {k: x for k, x in given.items() if k in found[0] or (passes_others and k not in _GIVEN)}
    return tx.update(updates, state, params, **taken)

  return optax.GradientTransformationExtraArgs(init, update)


def _keywords(update: Callable[..., Any]) -> tuple[tuple[str, ...], bool]:
  """Returns which keyword arguments of a step an update may take, and whether only a trial can show it."""
  try:
    parameters = inspect.signature(update).parameters
  except (TypeError, ValueError):  # from a compiled function, for example
    return _GIVEN, True
  if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
    return _GIVEN, True
  return tuple(name for name in _GIVEN if name in parameters), False


def _tried(
  tx: optax.GradientTransformation,
  names: tuple[str, ...],
  grads: tuple[PyTree, ...],
  state: PyTree,
  params: PyTree,
) -> tuple[str, ...]:
  """Returns which of `names` an update takes; computes nothing.

  Args:
    tx: the transform.
    names: names of keyword arguments.
    grads: gradients in each of the dtypes in which a step may have them; one of them must work.
    state: a state of `tx`.
    params: tree of parameters.

  Raises:
    ValueError: if the update fails with each, or has another shape than its parameter.
  """
  for i, updates in enumerate(grads):
    try:
      taken, new = _shapes_of_update(tx, names, updates, state, params)
    except Exception as error:
      if isinstance(error, NameError) and "axis name" in str(error):  # a mapped axis that is missing here
        return names
      if i < len(grads) - 1:
        continue
      raise ValueError(_refusal(error, state)) from error
    _require_shapes(new, params, state)
    return taken
  raise AssertionError("there is always a gradient to try")


def _shapes_of_update(
  tx: optax.GradientTransformation, names: tuple[str, ...], grads: PyTree, state: PyTree, params: PyTree
) -> tuple[tuple[str, ...], PyTree]:
  """Returns which of `names` an update takes, and the shapes of its updates."""
  # Without shardings: a step runs on axes that the compiler divides.
  grads, state, params = as_shapes((grads, state, params))
  given = {"value": jax.ShapeDtypeStruct((), jnp.float32), "grad": grads}
  while True:
    try:
      updates, _ = jax.eval_shape(tx.update, grads, state, params, **{name: given[name] for name in names})
      return names, updates
    except TypeError as error:
      refused = _REFUSED.search(str(error))
      if refused is None or refused[1] not in names:
        raise
      names = tuple(name for name in names if name != refused[1])


def _require_shapes(updates: PyTree, params: PyTree, state: PyTree) -> None:
  of_updates: PyTreeDef = jax.tree.structure(updates)
  if of_updates != jax.tree.structure(params):
    return
  for (name, update), param in zip(named_leaves(updates), jax.tree.leaves(params), strict=True):
    if update.shape != param.shape:
      raise ValueError(
        f"the optimizer's update of parameter {name!r} has shape {list(update.shape)}: expected that of the "
        f"parameter, {list(param.shape)}. {_way_out('', state)}"
      )


def _refusal(error: Exception, state: PyTree) -> str:
  return (
    "this optimizer cannot run in a training step, which gives it gradients, state, parameters, value and "
    f"grad: {type(error).__name__}: {str(error).rstrip('.')}. {_way_out(str(error), state)}"
  )


def _way_out(reason: str, state: PyTree) -> str:
  """Returns the end of a refusal: what a transform needs, if known, and how a loop gives it."""
  if _holds(state, optax.contrib.DifferentiallyPrivateAggregateState):
    return (
      "It needs the gradients of each example: write the loop yourself: grads = jax.vmap(jax.grad(loss_fn), "
      "(None, 0))(params, batch); updates, opt_state = tx.update(grads, opt_state, params)"
    )
  if _holds(state, optax.LookaheadState):
    pair = "It needs a pair of parameters, params = optax.LookaheadParams.init_synced(params): "
    return pair + _LOOP.format(params="params.fast", more="")
  name = next((name for name in _MISSING if name in reason), None)
  needs = "To give it what it needs, " if name is None else f"It needs {name}: "
  return needs + _LOOP.format(params="params", more=_MISSING.get(name or "", ""))


def _holds(state: PyTree, kind: type) -> bool:
  is_kind = lambda x: isinstance(x, kind)
  return any(map(is_kind, jax.tree.leaves(state, is_leaf=is_kind)))
