"""`inspect_numerics`: runs real batches through a training step, under its policy and in float32."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
import optax

from mpjax._types import PolicyLike, PyTree
from mpjax.loss_scale import find_loss_scales, find_scaler
from mpjax.numerics._arguments import arguments_of, on_axes_of, step_of
from mpjax.numerics._batches import listed, micro_batches, rows
from mpjax.numerics._instrumented_step import Seen, reference_state, reference_step
from mpjax.numerics._kept_programs import shapes_of
from mpjax.numerics._probes import Point
from mpjax.numerics._programs import Programs, programs_for
from mpjax.numerics._report import NumericsReport
from mpjax.numerics._summary import Summary
from mpjax.numerics._tensors import Distance, Magnitudes, Tensor, full_summary, is_half
from mpjax.numerics._update_sums import as_numbers, descent, held_as, lost
from mpjax.numerics.advice import with_conclusions
from mpjax.patterns import named_leaves
from mpjax.step import TrainState, TrainStep


def inspect_numerics(
  fun_or_step: TrainStep | Callable[..., Any],
  *args: PyTree,
  policy: PolicyLike | None = None,
  tx: optax.GradientTransformation | None = None,
  reference: bool | TrainStep = True,
  keep: float = 0.999,
  advise: bool = True,
  pieces: int | None = None,
  title: str = "",
  progress: Callable[[str], None] | None = None,
  **init: Any,
) -> NumericsReport:
  """Reports what a policy does to the numbers of a training step, by module and tensor, and what to change.

  Runs the loss and its gradients on each batch, under the policy and in float32. It does not train. Only a
  histogram of magnitudes and a sketch of every tensor leave the device.

  ```python
  report = mpjax.inspect_numerics(loss_fn, params, batch, policy="fp16", tx=optax.adamw(1e-3))
  report = mpjax.inspect_numerics(step, state, [batch])  # a step of mpjax.make_train_step
  print(report)  # the findings, and a policy to use instead
  report.save_html("numerics.html")
  ```

  The report covers parameters, their gradients and updates. It covers activations and their gradients where
  they leave a module and where a matrix product reads or computes them, if the loss depends on them. It does
  not cover values inside a custom derivative rule, a `while_loop` or a `shard_map`. The steps of a `scan`
  over up to 128 layers, each with its own weights, have separate rows; steps of a longer scan, or of time, do
  not.

  Args:
    fun_or_step: a `TrainStep`, or a loss function as `mpjax.make_train_step` takes it.
    *args: for a step, its `TrainState` and the batches; for a loss function, its parameters (a tree or a
      module) and the batches. Batches are one batch (a tree of arrays), or a list or any iterable of batches.
      Put a batch that is itself a list into a list. A loss function of more arguments,
      `loss_fn(params, x, y)`, takes one batch, `x, y`. With `accumulate` in the step, each micro-batch runs
      separately.
    policy: for a loss function, whatever `mpjax.get_policy` takes (by default `"auto"`); for a step, a policy
      in place of its own. Delayed FP8 scaling would begin without a history: tensors are scaled by their own
      amax instead.
    tx: optimiser of a loss function; without it the report does not cover updates.
    reference: whether to run float32, too. Without it the report does not have errors, and magnitudes are
      those of the policy's run. If the loss function differs in float32, pass a step of that function.
    keep: share of nonzero gradients that a loss scale should keep in range.
    advise: whether the report suggests a policy.
    pieces: number of parts in which the rows of a batch run, one after the other, to bound the memory. By
      default up to 4 if activations are large (256 MiB in float32), the model does not have state
      (BatchNorm), the policy does not use FP8, and the float32 loss is the mean of the pieces' losses;
      else 1.
    title: title of the report.
    progress: called with a line of text before each long part.
    init: for a loss function, the other arguments of `TrainStep.init` (`rng`, `model_state`).

  Returns:
    A `NumericsReport`: `str()` gives the answer, `save_html` a page, `to_dict()` the data.

  Raises:
    TypeError: for another number or kind of arguments; the message shows the right call.
    ValueError: without a batch, or for options that do not go together.
  """
  if isinstance(keep, bool) or not isinstance(keep, (int, float)) or not 0 < keep < 1:
    raise ValueError(f"keep={keep!r}: expected a share between 0 and 1, such as 0.999")
  if not isinstance(reference, (bool, TrainStep)):
    raise ValueError(f"reference={reference!r}: expected True, False or a TrainStep")
  if pieces is not None and (isinstance(pieces, bool) or not isinstance(pieces, int) or pieces < 1):
    raise ValueError(f"pieces={pieces!r}: expected a positive whole number, or None")
  given = arguments_of(inspect_numerics, fun_or_step, args, policy, init, scaled=tx is None)
  say = progress or (lambda line: None)
  with on_axes_of(given.fun_or_step) as placed:
    step, state, updates = step_of(given.fun_or_step, placed(given.state), given.policy, tx, init)
    parts = micro_batches(placed(iter(listed(given.batches))), step.accumulate)
    inspection = Inspection(step, state, reference, updates, pieces)
    for i, batch in enumerate(parts):
      if i == 0:
        say("compiling")
      inspection.add(batch)
      say(f"batch {i + 1}")
    if not inspection.count:
      raise ValueError("no batch: expected a batch, or a list of at least one")
    return with_conclusions(inspection.report(title, keep), advise)


class Inspection:
  """Inspects one policy, batch by batch.

  Attributes:
    count: number of batches so far.
    pieces: number of parts in which each batch runs; known after the first.
  """

  def __init__(
    self,
    step: TrainStep,
    state: TrainState,
    reference: bool | TrainStep,
    updates: bool,
    pieces: int | None = None,
  ):
    self.count = 0
    self.pieces = self._asked = pieces
    self._step, self._state, self._updates = step, state, updates
    scaler = find_scaler(state.opt_state)
    self._scale = 1.0 if scaler is None else float(scaler.scale)
    self._full = full_summary(self._scale)
    # If float32 gives the magnitudes, the policy's own run gives only NaN, infinities and zeros.
    self._narrow = self._full if reference is False else Summary.of([], sketch=True)
    self._reference = None if reference is False else reference_step(step) if reference is True else reference
    self._wide_state = None if self._reference is None else reference_state(state)
    self._programs: dict[Any, Programs] = {}
    self._rows = 0
    self._losses: list[tuple[float, float | None]] = []
    self._magnitudes: dict[Any, Magnitudes] = {}
    self._theirs: dict[Any, Magnitudes] = {}
    self._distances: dict[Any, Distance] = {}
    self._counts: dict[str, Any] = {}

  def add(self, batch: PyTree) -> None:
    """Inspects a batch."""
    shape = shapes_of(batch)
    if shape not in self._programs:
      self._programs[shape] = self._programs_for(batch)
    programs = self._programs[shape]
    wide = None
    seen: Seen = jax.device_get(programs.mine(self._state, batch))
    if programs.theirs is not None and self._wide_state is not None:
      wide = jax.device_get(programs.theirs(self._wide_state, batch))
    self._losses.append((float(seen.loss), None if wide is None else float(wide.loss)))
    self._rows += rows(batch)
    self.count += 1
    own = dict(_arrays(seen, programs.points, self._narrow))
    full = own if wide is None else dict(_arrays(wide, programs.wide_points, self._full))
    for key, (magnitudes, sketch) in full.items():
      self._magnitudes[key] = _sum(self._magnitudes.get(key), magnitudes)
      if wide is not None and key in own:
        self._theirs[key] = _sum(self._theirs.get(key), own[key][0])
        self._distances.setdefault(key, Distance()).add(own[key][1], sketch)
    for path, sums in seen.updates.items():
      magnitudes = Magnitudes.of(self._full, sums.ratio)
      self._magnitudes["update", path] = _sum(self._magnitudes.get(("update", path)), magnitudes)
      self._counts[path] = self._counts.get(path, 0.0) + as_numbers(sums)

  def _programs_for(self, batch: PyTree) -> Programs:
    """Returns the passes for a batch, and fixes the number of pieces for all batches."""
    programs = programs_for(
      (self._step, self._state, self._narrow),
      None
      if self._reference is None or self._wide_state is None
      else (self._reference, self._wide_state, self._full),
      batch,
      scale=self._scale,
      updates=self._full if self._updates else None,
      pieces=self._asked,
    )
    self.pieces = programs.pieces
    return programs

  def report(self, title: str, keep: float) -> NumericsReport:
    """Returns the report on all batches so far."""
    losses = np.asarray([mine for mine, _ in self._losses])
    wide = [theirs for _, theirs in self._losses if theirs is not None]
    tensors = tuple(self._tensors())
    return NumericsReport(
      title=title,
      policy=self._step.policy,
      loss_scale=self._scale,
      step=int(self._state.step),
      batches=self.count,
      rows=self._rows,
      loss=float(losses.mean()),
      reference_loss=float(np.mean(wide)) if wide else None,
      tensors=tensors,
      keep=keep,
      narrow_reference=self._narrow_reference(),
      own_scale=_has_own_scale(self._step, self._state),
    )

  def _narrow_reference(self) -> tuple[str, ...]:
    """Returns the modules in which the model's own casts put the float32 run in half precision."""
    wide = [p for one in self._programs.values() for p in one.wide_points.values()]
    found = {
      p.module: f"{p.module or 'the function'} ({p.line}) in {p.dtype}"
      for p in reversed(wide)
      if is_half(p.dtype)
    }
    return tuple(reversed(found.values()))

  def _tensors(self) -> Iterator[Tensor]:
    parameters = dict(named_leaves(self._state.arrays))
    points = {name: point for one in self._programs.values() for name, point in one.points.items()}
    modules = [point.module for point in points.values()]
    held = held_as(self._step, self._state)
    order = {key: i for i, key in enumerate([*points, *parameters])}
    for key, magnitudes in self._magnitudes.items():
      kind, name = key[0], key[1]
      theirs, distance = self._theirs.get(key), self._distances.get(key)
      norm, shares = None if distance is None else math.sqrt(distance.of_second), None
      if kind == "update":
        norm, shares = descent(self._counts[name])
      tensor = functools.partial(
        Tensor,
        kind=kind,
        order=order.get(name, 0),
        magnitudes=magnitudes,
        policy=None if theirs is None else (theirs.nan, theirs.inf, theirs.zero),
        norm=norm,
        **_figures(distance, magnitudes, theirs),
      )
      if name in parameters:
        leaf = parameters[name]
        parent, _, last = name.rpartition("/")
        yield tensor(
          module=module_of(parent, modules),
          name=last,
          line="",
          dtype=leaf.dtype.name,
          shape=tuple(leaf.shape),
          lost=lost(self._counts[name]) if kind == "update" else None,
          descent=shares,
          moved=float(self._counts[name][0]) if kind == "update" else 0.0,
          held=held.get(name, leaf.dtype.name),
          path=name,
        )
      elif name in points:
        point = points[name]
        yield tensor(
          module=point.module + "".join(f"[{i}]" for i in key[2]),
          index=key[2],
          name=point.name,
          line=point.line,
          dtype=point.gradient_dtype if key[0] == "activation gradient" else point.dtype,
          held=point.dtype,
          fragile=point.fragile,
          shape=point.shape,
        )


def module_of(parent: str, modules: Sequence[str]) -> str:
  """Returns the module path of a parameter from the path of its parent in the tree."""
  parts = [part for part in parent.removeprefix("params/").split("/") if part not in ("", "~")]
  own = "/".join(parts if parent != "params" else ())
  roots = {module.partition("/")[0] for module in modules if module}
  root = next(iter(roots)) if len(roots) == 1 else ""
  for candidate in (own, f"{root}/{own}".strip("/")):
    if any(m == candidate or m.startswith(f"{candidate}/") for m in modules if candidate):
      return candidate
  ends = {module for module in modules if own and module.endswith(f"/{own}")}
  return next(iter(ends)) if len(ends) == 1 else own or root


def _arrays(
  seen: Seen, points: dict[tuple[str, str], Point], summary: Summary
) -> Iterator[tuple[Any, tuple[Magnitudes, Any]]]:
  """Yields the magnitudes and the sketch of everything that a pass kept, by key."""
  n = len(summary.edges) + 1
  for (name, point), kept in zip(points.items(), seen.watched, strict=True):
    for index in np.ndindex(*point.steps):
      for row, kind in enumerate(("activation", "activation gradient")):
        values = kept[(slice(None), *index, row)]
        counts = values[:, :n].astype(np.float64).sum(0)
        if counts[-1]:  # otherwise the loss does not depend on it
          yield (kind, name, index), (Magnitudes.of(summary, counts), values[:, n:])
  for kind, part in (("parameter", seen.parameters), ("weight gradient", seen.gradients)):
    for path, values in part.items():
      yield (kind, path), (Magnitudes.of(summary, values), values[n:])


def _figures(distance: Distance | None, wide: Magnitudes, own: Magnitudes | None) -> dict[str, Any]:
  """Returns errors, if float32 has finite values to compare with."""
  broken = wide.nan + wide.inf
  if distance is None or broken == wide.count:
    return {}
  return distance.figures(wide.count, not broken and own is not None and not own.nan + own.inf)


def _sum(before: Magnitudes | None, more: Magnitudes) -> Magnitudes:
  return more if before is None else before + more


def _has_own_scale(step: TrainStep, state: TrainState) -> bool:
  """Returns whether the optimiser given to the step scales the loss itself."""
  return bool(find_loss_scales(jax.eval_shape(step.inner_tx.init, state.arrays)))
