"""`find_nonfinite`: runs a training step operation by operation to find the first NaN or infinity."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.tree_util import KeyPath, keystr

from mpjax._types import Array, PolicyLike, PyTree
from mpjax.dtypes import cast_like
from mpjax.loss_scale import (
  NonFinite,
  apply_updates,
  find_loss_scales,
  find_scaler,
  get_loss_scale,
  is_inexact,
  keep_dtypes,
  map_parts,
)
from mpjax.numerics._arguments import arguments_of, on_axes_of, step_of
from mpjax.numerics.nonfinite._evaluate import Evaluation, Source
from mpjax.numerics.nonfinite._origins import Origin, Place, count, is_finite
from mpjax.numerics.nonfinite._report import NonfiniteReport
from mpjax.optim import unstored
from mpjax.patterns import path_text
from mpjax.sharding import on_device
from mpjax.step import TrainState, TrainStep, state_of, unrounded, with_policy, with_step_arguments

_MOST_OTHERS = 8
# Stands for the counts of updates that a loss scale inside the user's optimiser has replaced.
_NOT_SHOWN = NonFinite(0, 0, 0, 0)
_STATE = "optimiser state "
_SKIPPED = ""  # in the place of a name


def find_nonfinite(
  fun_or_step: TrainStep | Callable[..., Any],
  *args: PyTree,
  policy: PolicyLike | None = None,
  reference: bool = True,
  **init: Any,
) -> NonfiniteReport:
  """Names the first operation of a training step that computes NaN or infinity, and what to try.

  ```python
  print(mpjax.find_nonfinite(step, state, batch))  # a step of mpjax.make_train_step
  print(mpjax.find_nonfinite(loss_fn, params, batch))  # the loss function of your own loop, and its gradients
  ```

  It computes the loss and the gradients once more, operation by operation in program order, under the step's
  policy and at the state's loss scale. It does not update or donate anything. The report blames an operation
  if its operands do not explain the NaN or infinity in its result, and if an unbroken chain of non-finite
  values leads from it to the loss or a gradient. It does not blame the infinities of a mask, which a softmax
  turns into zeros.

  If the loss and the gradients of a step are finite, the rest of the step is computed in the same way: the
  model's state and the optimiser's updates, without the skip that would hide a NaN.

  Args:
    fun_or_step: the training step, or a loss function as `mpjax.make_train_step` takes it.
    *args: for a step, the state before it, from `step.init` or a checkpoint, and its batch; for a loss
      function, its arguments, the parameters first.
    policy: for a loss function, the policy to run it under, with its initial loss scale; by default the
      function runs as written, with its own casts. For a step, a policy in place of its own.
    reference: whether to run a non-finite step again in float32, without loss scaling.
    **init: for a loss function, the `rng` or `model_state` that it takes.

  Returns:
    A `NonfiniteReport`; print it.

  Raises:
    TypeError: for arguments that do not fit; the message shows the right call.
  """
  given = arguments_of(find_nonfinite, fun_or_step, args, policy, init, listed=False)
  as_it_stands = given.policy is None and not isinstance(given.fun_or_step, TrainStep)
  asked = "fp32" if as_it_stands else given.policy
  with on_axes_of(given.fun_or_step) as placed:
    batch = placed(given.batches)
    step, state, _ = step_of(given.fun_or_step, placed(given.state), asked, None, init)
    of_step = isinstance(given.fun_or_step, TrainStep)
    found = _hunt(step, state, batch, whole=of_step, names=given.names)
    if found.finite or not reference or as_it_stands:
      return found
    wide_step = step.with_policy("fp32")
    if wide_step.policy == step.policy and found.loss_scale == 1:
      return dataclasses.replace(found, in_float32=True)
    wide = wide_step.adopt(state, step, warn=False)
    if found.of_gradients:  # which need no optimiser, with a loss scale of the user's own
      wide = wide.replace(opt_state=())
    same = _hunt(wide_step, wide, batch, whole=of_step and not found.of_gradients, names=given.names)
    return dataclasses.replace(found, in_float32=not same.finite, reference=same)


class _Seen(NamedTuple):
  """The findings in one program.

  Attributes:
    arrays: its results, computed operation by operation.
    results: counts of its non-finite results, by name.
    compiled: the same of the compiled program.
    blamed: the operations and inputs to blame.
    parts: the parts of a step that the results belong to.
  """

  arrays: list[Any]
  results: dict[str, NonFinite]
  compiled: dict[str, NonFinite]
  blamed: list[Source]
  parts: list[str]


def _hunt(
  step: TrainStep, state: TrainState, batch: PyTree, *, whole: bool, names: tuple[str, ...]
) -> NonfiniteReport:
  """Examines a step; without `whole`, only its loss and gradients.

  Args:
    step: the step.
    state: the state before it.
    batch: its batch.
    whole: whether to examine more than the loss and the gradients.
    names: the names of the batch's parts, if they are arguments of a loss function.
  """
  # Over several devices it would be one operation; an overflow only in their sum is found below.
  alone, state = step.without_mesh(), on_device(state)
  of_state = _named("", state)
  parts = zip(names, batch, strict=True) if names else [("batch", batch)]
  inputs = of_state + [leaf for part in parts for leaf in _named(*part, may_mask=True)]
  compiled = step.gradients(state, batch)
  kinds: tuple[str, ...] = ("loss", "gradients")
  found = [_examined(step, kinds, alone.loss_and_gradients, (state, batch), inputs, compiled)]
  if whole and not found[0].results and not found[0].compiled:
    if any(map(is_inexact, jax.tree.leaves((state.model_state, state.fp8_state)))):
      carried = jax.jit(step.carried)(state, batch)
      kinds = ("model state ", "FP8 state ")
      found.append(_examined(step, kinds, alone.carried, (state, batch), inputs, carried))
    run = _after_gradients(step)
    loss, grads = jax.tree.unflatten(jax.tree.structure(compiled), found[0].arrays)
    inputs = [*_named("loss", loss), *_named("gradients", grads), *of_state]
    kinds = ("updates", "parameters after the step ", _STATE, _SKIPPED)
    place = Place(of_optimizer=True)
    after = jax.jit(run)(*compiled, state)
    found.append(_examined(step, kinds, run, (loss, grads, state), inputs, after, place))
  blamed = [source for seen in found for source in seen.blamed]
  of_inputs = [source for source in blamed if source.counts is not None]
  origins = _places([x.origin for x in blamed if x.counts is None and x.origin is not None])
  has_scale = bool(find_loss_scales(state.opt_state))
  return NonfiniteReport(
    origin=origins[0] if origins and not of_inputs else None,
    inputs={source.name: source.counts for source in of_inputs if source.counts is not None},
    others=tuple(origins if of_inputs else origins[1:])[:_MOST_OTHERS],
    results={name: counts for seen in found for name, counts in seen.results.items()},
    compiled={name: counts for seen in found for name, counts in seen.compiled.items()},
    gradients=len(jax.tree.leaves(compiled[1])),
    loss_scale=float(get_loss_scale(state.opt_state).scale) if has_scale else 1.0,
    policy=str(step.policy),
    compute_dtype=step.policy.compute_dtype.name,
    autocast=step.policy.autocast,
    parts=tuple(part for seen in found for part in seen.parts),
    summed=_summed(step),
    readers={source.name: source.origin for source in reversed(of_inputs) if source.origin is not None},
  )


def _examined(
  step: TrainStep,
  kinds: tuple[str, ...],
  run: Callable[..., Any],
  args: tuple[PyTree, ...],
  inputs: list[tuple[str, Array, bool]],
  compiled: PyTree,
  place: Place | None = None,
) -> _Seen:
  """Examines one function of a step.

  Args:
    step: the step.
    kinds: what to call the parts of its result; the loss depends on the first, or on all in an optimiser.
    run: the function.
    args: its arguments.
    inputs: the name and array of each leaf of these, and whether negative infinities in it may be a mask's.
    compiled: its result when it is compiled.
    place: the place of an optimiser.
  """
  with contextlib.nullcontext() if step.layout is None else step.layout.in_mesh():
    closed, shapes = jax.make_jaxpr(run, return_shape=True)(*args)
  names = [
    _name(kind, path)
    for kind, part in zip(kinds, shapes, strict=True)
    for path, _ in jax.tree.leaves_with_path(part)
  ]
  of_loss = [place is not None or name.startswith(kinds[0]) for name in names]
  evaluation = Evaluation(step.options.accumulate)
  values = evaluation.run(closed, inputs, of_loss, place or Place())
  arrays = [value.array for value in values]
  results = _nonfinite(names, arrays)
  blame = sorted({i for value, name in zip(values, names, strict=True) if name for i in value.blame})
  if results and not blame:  # a skip hides the fault, which does not lead to a result
    blame = [i for i, source in enumerate(evaluation.sources) if not source.meant][:1]
  sources = [evaluation.sources[i] for i in blame]
  blamed = [source for source in sources if not source.meant] or sources
  parts = [kind.strip() for kind in kinds if any(kind and name.startswith(kind) for name in names)]
  return _Seen(arrays, results, _nonfinite(names, jax.tree.leaves(compiled)), blamed, parts)


def _after_gradients(step: TrainStep) -> Callable[[Array, PyTree, TrainState], tuple[PyTree, ...]]:
  """Returns a function from (loss, unscaled gradients, state) to what the step computes from them.

  It leaves out the skip that the step puts around its optimiser, which shows zeros in place of a NaN. A skip
  inside the user's optimiser stays.

  It returns the unrounded updates of the master weights that move, these parameters after the step, and the
  optimiser's state before it is stored in few bytes. The last result is bool[]: whether a loss scale inside
  the user's own optimiser has replaced these by zeros and the old state although the gradients are finite.
  """
  policy = step.policy
  skips = policy.loss_scaling is not None or step.options.skip_nonfinite
  given = with_step_arguments(step.inner_tx)
  tx = with_policy(given, dataclasses.replace(policy, loss_scaling=None), guarded=False)

  def run(loss: Array, grads: PyTree, state: TrainState) -> tuple[PyTree, ...]:
    grads, params = step.trained.arguments(state, grads)
    masters, layers = unrounded(params, step.layers(state))
    before = unstored(state_of(layers._replace(scaler=None)))
    scaler = find_scaler(before)
    if scaler is not None:
      times = lambda g: g * scaler.scale.astype(g.dtype) if is_inexact(g) else g
      grads = map_parts(times, lambda g: g, grads)
    updates, after = tx.update(grads, before, masters, value=loss)
    after = keep_dtypes(after, before) if skips else after
    new = cast_like(apply_updates(masters, updates), params)
    skipped = jnp.asarray(False)
    if scaler is not None:
      skipped = get_loss_scale(after).skipped_steps > scaler.skipped_steps
    return step.trained.moving(state, updates), step.trained.moving(state, new), after, skipped

  return run


def _name(kind: str, path: KeyPath) -> str:
  if kind == _STATE:
    return f"{kind}['{path_text(path).removeprefix('inner_state/')}']"
  return kind + keystr(path)


def _nonfinite(names: list[str], arrays: list[Any]) -> dict[str, NonFinite]:
  """Returns the counts of the arrays that are not finite, by name; of updates if a skip has replaced them."""
  named = list(zip(names, arrays, strict=True))
  found = {name: count(array) for name, array in named if name != _SKIPPED and not is_finite(array)}
  hidden = any(name == _SKIPPED and array for name, array in named)
  return {"updates": _NOT_SHOWN} if hidden and not found else found


def _summed(step: TrainStep) -> str:
  layout, dtype = step.layout, step.policy.reduce_dtype
  if layout is None or layout.shards == 1 or dtype is None or dtype.itemsize > 2:
    return ""
  return f"{dtype.name} over {layout.shards} devices"


def _named(what: str, tree: PyTree, may_mask: bool = False) -> list[tuple[str, Array, bool]]:
  """Returns the name and array of each leaf, and whether its negative infinities may be a mask's."""
  return [
    ((what + keystr(path)).lstrip("."), jnp.asarray(leaf), may_mask)
    for path, leaf in jax.tree.leaves_with_path(tree)
  ]


def _places(origins: list[Origin]) -> list[Origin]:
  """Returns the first origin of each module and line: where an operation fails, so may its derivative."""
  found: dict[Any, Origin] = {}
  for origin in origins:
    found.setdefault((origin.module, origin.line or origin.primitive), origin)
  return list(found.values())
