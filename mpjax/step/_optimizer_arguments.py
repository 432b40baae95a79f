"""The arguments that a step gives an optimiser's `update` in addition to gradients, state and parameters."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import optax

from mpjax._types import PyTree
from mpjax.dtypes import as_shapes, widen_floating
from mpjax.loss_scale import alike
from mpjax.patterns import named_leaves

_GIVEN = ("value", "grad")
_TRIED = (_GIVEN, ("value",), ("grad",), ())
_LOOP = (
  "If it needs more than a step gives, write the loop yourself: loss, grads = mpjax.value_and_grad(loss_fn, "
  "opt_state)(params, batch); updates, opt_state = tx.update(grads, opt_state, params, ...); params = "
  "mpjax.apply_updates(params, updates). In place of the dots is what it takes of value=loss, grad=grads, "
  "value_fn=lambda p: loss_fn(p, batch), grad_fn=jax.grad(lambda p, i: loss_fn(p, batch)). Some are made for "
  "pairs of parameters, or for the gradients of each example"
)


def with_step_arguments(tx: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
  """Wraps `tx` so that its update gets the loss and the gradients if it takes them, and only then.

  A signature does not tell: an update with `**extra_args` may pass them on to one that takes none, as
  `optax.chain` does. So an update of shapes is tried: by `init`, or if there was none, by `update`. That
  takes `value`, the unscaled loss; the `grad` of `tx` is the gradients given to it.

  Raises:
    ValueError: by `init`, if `tx` cannot run in a step: its update needs more than a step has, or has another
      shape than its parameter.
  """
  found: list[tuple[str, ...]] = []
  passes_others = isinstance(tx, optax.GradientTransformationExtraArgs)

  def init(params: PyTree) -> PyTree:
    leaves = jax.tree.leaves(params)
    given = set(map(id, leaves))
    # Copies, also for an optimiser that keeps the first parameters: a step reuses the buffers of both.
    state = jax.tree.map(lambda x: jnp.copy(x) if id(x) in given else x, tx.init(params))
    if leaves and all(hasattr(leaf, "dtype") for leaf in leaves):  # not from optax.tree_map_params
      found[:] = [_taken(tx, (params, widen_floating(params)), state, params)]
    return state

  def update(updates: PyTree, state: PyTree, params: PyTree = None, **extra: object) -> tuple[PyTree, PyTree]:
    if not found:
      found.append(_taken(tx, (updates,), state, params))
    given = {"grad": updates, **extra}
    taken = {k: x for k, x in given.items() if (passes_others if k not in _GIVEN else k in found[0])}
    return tx.update(updates, state, params, **taken)

  return optax.GradientTransformationExtraArgs(init, update)


def _taken(
  tx: optax.GradientTransformation, grads: tuple[PyTree, ...], state: PyTree, params: PyTree
) -> tuple[str, ...]:
  """Returns which of `value` and `grad` an update takes: as many as it works with. Computes nothing.

  `grads` are gradients in each of the dtypes in which a step may have them; one of them must work.
  """
  # Without shardings: a step runs on axes that the compiler divides.
  grads, state, params = as_shapes((grads, state, params))
  errors: list[Exception] = []
  for names, given in itertools.product(_TRIED, grads):
    extra = {"value": jax.ShapeDtypeStruct((), jnp.float32), "grad": given}
    try:
      updates, _ = jax.eval_shape(tx.update, given, state, params, **{name: extra[name] for name in names})
    except NameError:  # of a mapped axis that is missing here
      return names
    except Exception as error:
      errors.append(error)
      continue
    if not alike(updates, params):
      return names
    for (name, update), param in zip(named_leaves(updates), jax.tree.leaves(params), strict=True):
      if update.shape != param.shape:
        raise ValueError(
          f"the optimizer's update of parameter {name!r} has shape {list(update.shape)}: expected that of "
          f"the parameter, {list(param.shape)}. {_LOOP}"
        )
    return names
  most, least = (f"{type(error).__name__}: {str(error).rstrip('.')}" for error in (errors[0], errors[-1]))
  raise ValueError(
    f"this optimizer cannot run in a training step: its update with value= and grad= fails with {most}; "
    f"without them, with {least}. {_LOOP}"
  ) from errors[-1]
