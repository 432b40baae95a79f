"""`find_nonfinite`: runs a training step operation by operation to find the first NaN or infinity."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.tree_util import KeyPath

from mpjax._types import ClosedJaxpr, PolicyLike, PyTree
from mpjax.dtypes import cast_floating
from mpjax.loss_scale import NonFinite, find_loss_scales, get_loss_scale, is_inexact, map_parts
from mpjax.numerics._arguments import arguments_of, on_axes_of, step_of
from mpjax.numerics.nonfinite._after_gradients import after_gradients
from mpjax.numerics.nonfinite._evaluate import Evaluation
from mpjax.numerics.nonfinite._origins import Origin, count, is_finite
from mpjax.numerics.nonfinite._places import Place
from mpjax.numerics.nonfinite._report import NonfiniteReport
from mpjax.patterns import path_text
from mpjax.sharding import on_device
from mpjax.step import TrainState, TrainStep

_MOST_OTHERS = 8
# Stands for the counts of updates that a loss scale inside the user's optimiser has replaced.
_NOT_SHOWN = NonFinite(0, 0, 0, 0)


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
    under = step.policy
    narrow = under.compute_dtype.itemsize < 4 or under.param_dtype.itemsize < 4
    if not narrow and not under.fp8 and not under.overrides and found.loss_scale == 1:
      return dataclasses.replace(found, in_float32=True)
    wide_step = step.with_policy("fp32")
    if found.of_gradients:
      wide = state.replace(
        arrays=map_parts(lambda p: cast_floating(p, jnp.float32), lambda p: p, state.arrays),
        opt_state=(),
        fp8_state={},
      )
    else:
      wide = wide_step.adopt(state, step, warn=False)
    same = _hunt(wide_step, wide, batch, whole=of_step and not found.of_gradients, names=given.names)
    return dataclasses.replace(found, in_float32=not same.finite, reference=same)


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
  with contextlib.nullcontext() if step.layout is None else step.layout.in_mesh():
    closed, shapes = jax.make_jaxpr(alone.loss_and_gradients, return_shape=True)(state, batch)
  results = ["loss" if len(p) == 1 else "gradients" + _text(p[1:]) for p, _ in _leaves(shapes)]
  of_loss = tuple(name == "loss" for name in results)
  seen = _evaluated(closed, _inputs(state, batch, names), results, Place(of_loss=of_loss), step.accumulate)
  loss, grads = step.gradients(state, batch)
  compiled = _nonfinite(results, jax.tree.leaves((loss, grads)))
  parts, found = ["loss", "gradients"], [seen]
  if whole and not seen.results and not compiled:
    found = [_carried(step, alone, state, batch), _after(step, state, (loss, grads), seen)]
    parts += [part for one in found for part in one.parts]
    compiled = {name: counts for one in found for name, counts in one.compiled.items()}
  origins = _places([origin for one in found for origin in one.origins])
  inputs = {name: counts for one in found for name, counts in one.inputs.items()}
  others = origins if inputs else origins[1:]
  has_scale = bool(find_loss_scales(state.opt_state))
  return NonfiniteReport(
    origin=origins[0] if origins and not inputs else None,
    inputs=inputs,
    others=tuple(others[:_MOST_OTHERS]),
    results={name: counts for one in found for name, counts in one.results.items()},
    compiled=compiled,
    gradients=len(results) - 1,
    loss_scale=float(get_loss_scale(state.opt_state).scale) if has_scale else 1.0,
    policy=str(step.policy),
    compute_dtype=step.policy.compute_dtype.name,
    autocast=step.policy.autocast,
    parts=tuple(parts),
    summed=_summed(step),
  )


@dataclasses.dataclass(frozen=True)
class _Seen:
  """The findings in one program.

  Attributes:
    arrays: its results.
    results: counts of its non-finite results, by name.
    origins: the operations to blame.
    inputs: the inputs to blame, by name.
    parts: the parts of a step that the results belong to.
    compiled: counts of the non-finite results of the compiled program.
  """

  arrays: list[Any]
  results: dict[str, NonFinite]
  origins: list[Origin]
  inputs: dict[str, NonFinite]
  parts: tuple[str, ...] = ()
  compiled: dict[str, NonFinite] = dataclasses.field(default_factory=dict)


def _evaluated(
  closed: ClosedJaxpr, inputs: list[tuple[str, Any, bool]], names: list[str], place: Place, accumulate: int
) -> _Seen:
  """Evaluates a program; ignores results without a name."""
  evaluation = Evaluation(accumulate)
  values = evaluation.run(closed, inputs, place)
  judged = [value for value, name in zip(values, names, strict=True) if name]
  sources = [evaluation.sources[i] for i in sorted({i for value in judged for i in value.blame})]
  to_blame = [source for source in sources if not source.meant] or sources
  arrays = [value.array for value in values]
  results = _nonfinite(names, arrays)
  if not results and any(not name and array for name, array in zip(names, arrays, strict=True)):
    # A skip hides the fault: the first faulty operation does not lead to a result.
    to_blame = [source for source in evaluation.sources if not source.meant][:1]
    results = {"updates": _NOT_SHOWN}
  return _Seen(
    arrays,
    results,
    [source.origin for source in to_blame if source.origin is not None],
    {source.name: source.counts for source in to_blame if source.counts is not None},
  )


def _carried(step: TrainStep, alone: TrainStep, state: TrainState, batch: PyTree) -> _Seen:
  """Examines the model's state and the histories of FP8 products after a step."""
  if not any(map(is_inexact, jax.tree.leaves((state.model_state, state.fp8_state)))):
    return _Seen([], {}, [], {})
  with contextlib.nullcontext() if step.layout is None else step.layout.in_mesh():
    closed, shapes = jax.make_jaxpr(alone.carried, return_shape=True)(state, batch)
  kinds = ("model state ", "FP8 state ")
  names = [kinds[path[0].idx] + _text(path[1:]) for path, _ in _leaves(shapes)]
  of_loss = tuple(name.startswith(kinds[0]) for name in names)
  seen = _evaluated(closed, _inputs(state, batch), names, Place(of_loss=of_loss), step.accumulate)
  compiled = jax.tree.leaves(jax.jit(step.carried)(state, batch))
  parts = tuple(kind.strip() for kind in kinds if any(name.startswith(kind) for name in names))
  return dataclasses.replace(seen, parts=parts, compiled=_nonfinite(names, compiled))


def _after(step: TrainStep, state: TrainState, compiled: tuple[Any, PyTree], seen: _Seen) -> _Seen:
  """Examines what a step computes from its gradients.

  Args:
    step: the step.
    state: the state before it.
    compiled: loss and gradients of the compiled step.
    seen: the findings on loss and gradients, operation by operation.
  """
  run = after_gradients(step)
  loss, grads = jax.tree.unflatten(jax.tree.structure(compiled), seen.arrays)
  closed, shapes = jax.make_jaxpr(run, return_shape=True)(loss, grads, state)
  names = [*map(_name_after, (path for path, _ in _leaves(shapes)))]
  inputs = [(name, jnp.asarray(leaf), False) for name, leaf in _named("gradients", grads)]
  inputs = [("loss", jnp.asarray(loss), False), *inputs, *_inputs(state, {})]
  place = Place(of_loss=(True,) * len(names), of_optimizer=True)
  after = _evaluated(closed, inputs, names, place, 1)
  made = jax.jit(run)(*compiled, state)
  found = _nonfinite(names, jax.tree.leaves(made))
  if made.skipped:
    found = {"updates": _NOT_SHOWN}
  parts = ("updates", "parameters after the step", "optimiser state")
  return dataclasses.replace(after, parts=parts, compiled=found)


def _name_after(path: KeyPath) -> str:
  """Returns the name of a result of `after_gradients`; empty for `skipped`."""
  field, rest = path[0].name, path[1:]
  if field == "opt_state":
    return f"optimiser state ['{path_text(rest).removeprefix('inner_state/')}']"
  return {"updates": f"updates{_text(rest)}", "params": f"parameters after the step {_text(rest)}"}.get(
    field, ""
  )


def _summed(step: TrainStep) -> str:
  layout, dtype = step.layout, step.policy.reduce_dtype
  if layout is None or layout.shards == 1 or dtype is None or dtype.itemsize > 2:
    return ""
  return f"{dtype.name} over {layout.shards} devices"


def _inputs(state: TrainState, batch: PyTree, names: tuple[str, ...] = ()) -> list[tuple[str, Any, bool]]:
  """Returns the name and array of each leaf, and whether its negative infinities may be a mask's."""
  named = [(_text(path).lstrip("."), leaf, False) for path, leaf in _leaves(state)]
  parts = zip(names, batch, strict=True) if names else [("batch", batch)]
  named += [(name, leaf, True) for part, tree in parts for name, leaf in _named(part, tree)]
  return [(name, jnp.asarray(leaf), mask) for name, leaf, mask in named]


def _named(what: str, tree: PyTree) -> list[tuple[str, Any]]:
  return [(what + _text(path), leaf) for path, leaf in _leaves(tree)]


def _leaves(tree: PyTree) -> list[tuple[Any, Any]]:
  return jax.tree_util.tree_flatten_with_path(tree)[0]


def _text(path: KeyPath) -> str:
  return jax.tree_util.keystr(path)


def _nonfinite(names: list[str], arrays: list[Any]) -> dict[str, NonFinite]:
  """Returns the counts of the arrays that are not finite."""
  named = zip(names, arrays, strict=True)
  return {name: count(array) for name, array in named if name and not is_finite(array)}


def _places(origins: list[Origin]) -> list[Origin]:
  """Returns the first origin of each module and line: where an operation fails, so may its derivative."""
  found: dict[Any, Origin] = {}
  for origin in origins:
    found.setdefault((origin.module, origin.line or origin.primitive), origin)
  return list(found.values())
