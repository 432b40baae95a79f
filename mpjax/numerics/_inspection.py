"""`inspect_numerics`: runs real batches through a training step, under its policy and in float32."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
import optax

from mpjax._types import PolicyLike, PyTree
from mpjax.loss_scale import find_loss_scales, find_scaler, hide
from mpjax.numerics._advice import with_conclusions
from mpjax.numerics._arguments import arguments_of, on_axes_of, step_of
from mpjax.numerics._batches import listed, micro_batches, rows
from mpjax.numerics._pass import Pass, float_leaves, passes, reference_state, reference_step
from mpjax.numerics._points import Point
from mpjax.numerics._report import NumericsReport
from mpjax.numerics._seen import Seen, is_half, see
from mpjax.numerics._tensors import KINDS, Tensor
from mpjax.numerics._updates import held_as, lost
from mpjax.step import TrainState, TrainStep


def inspect_numerics(
  fun_or_step: TrainStep | Callable[..., Any],
  *args: PyTree,
  policy: PolicyLike | None = None,
  tx: optax.GradientTransformation | None = None,
  reference: bool | TrainStep = True,
  keep: float = 0.999,
  advise: bool = True,
  title: str = "",
  progress: Callable[[str], None] | None = None,
  **init: Any,
) -> NumericsReport:
  """Reports what a policy does to the numbers of a training step, by module and tensor, and what to change.

  Runs the loss and its gradients on each batch, under the policy and in float32, on as many of its rows as
  fit in memory. It does not train. Only a histogram of magnitudes and a sketch of every tensor leave the
  device.

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
  given = arguments_of(inspect_numerics, fun_or_step, args, policy, init, scaled=tx is None)
  say = progress or (lambda line: None)
  with on_axes_of(given.fun_or_step) as placed:
    step, state, updates = step_of(given.fun_or_step, placed(given.state), given.policy, tx, init)
    if reference is True:
      reference = reference_step(given.fun_or_step if isinstance(given.fun_or_step, TrainStep) else step)
    inspection = _Inspection(step, state, reference or None, updates)
  for batch in listed(given.batches):  # an iterator makes them on the mesh that its user has set
    with on_axes_of(given.fun_or_step) as placed:
      for part in micro_batches(placed(batch), step.options.accumulate):
        if not inspection.count:
          say("compiling the step under the policy, and in float32")
        inspection.add(part)
        say(f"batch {inspection.count}")
  if not inspection.count:
    raise ValueError("no batch: expected a batch, or a list of at least one")
  with on_axes_of(given.fun_or_step):
    return with_conclusions(inspection.report(title, keep), advise)


@dataclasses.dataclass
class _Sums:
  """What was seen of one tensor, over all batches.

  Attributes:
    magnitudes: in float32; without a float32 run, in the policy's run.
    own: in the policy's run, if there is a float32 run.
    squares: from their sketches, the sums of squares of the difference and of the float32 values.
    moved: counts of updates, as `UpdateSums` has them.
  """

  magnitudes: Seen
  own: Seen | None = None
  squares: np.ndarray | None = None
  moved: np.ndarray | None = None

  def __add__(self, other: _Sums) -> _Sums:
    both = lambda a, b: a if b is None else b if a is None else a + b
    return _Sums(*(both(*pair) for pair in zip(vars(self).values(), vars(other).values(), strict=True)))


class _Inspection:
  """Inspects a step, batch by batch."""

  def __init__(self, step: TrainStep, state: TrainState, reference: TrainStep | None, updates: bool):
    self._sides = [(step, state)]
    if reference is not None:
      self._sides.append((reference, reference_state(state)))
    self._updates = updates
    self._passes: list[Pass] = []
    self._points: dict[tuple[str, str], Point] = {}
    self._losses: list[list[float]] = []
    self._rows: list[tuple[int, int]] = []
    self._sums: dict[tuple[Any, ...], _Sums] = {}

  @property
  def count(self) -> int:
    """Number of batches so far."""
    return len(self._losses)

  def add(self, batch: PyTree) -> None:
    """Inspects a batch."""
    self._passes = passes(self._sides, batch, updates=self._updates)
    self._points |= {(point.module, point.name): point for point in self._passes[0].points}
    pairs = zip(self._passes, self._sides, strict=True)
    looked = [jax.device_get(run(state, batch)) for run, (_, state) in pairs]
    self._losses.append([float(one.loss) for one in looked])
    self._rows.append((self._passes[0].rows, rows(batch)))
    own, *wide = (dict(one.seen()) for one in looked)
    if wide:
      found = {key: _compared(own.get(key), seen) for key, seen in wide[0].items()}
    else:
      found = {key: _Sums(seen) for key, seen in own.items()}
    for path, sums in looked[0].updates.items():
      found["update", path] = _Sums(sums.ratio, moved=sums.counts.astype(np.int64))
    for key, sums in found.items():
      self._sums[key] = self._sums[key] + sums if key in self._sums else sums

  def report(self, title: str, keep: float) -> NumericsReport:
    """Returns the report on all batches so far."""
    (step, state), losses = self._sides[0], np.mean(self._losses, axis=0).tolist()
    scaler = find_scaler(state.opt_state)
    tensors = [*self._of_points(), *self._of_parameters()]
    seen, given = (sum(numbers) for numbers in zip(*self._rows, strict=True))
    return NumericsReport(
      title=title,
      policy=step.policy,
      loss_scale=1.0 if scaler is None else float(scaler.scale),
      step=int(state.step),
      batches=self.count,
      rows=seen,
      rows_left_out=given - seen,
      loss=losses[0],
      reference_loss=losses[1] if losses[1:] else None,
      tensors=tuple(sorted(tensors, key=lambda t: (KINDS.index(t.kind), t.order))),
      keep=keep,
      narrow_reference=_narrow(self._passes[1].points) if losses[1:] else (),
      own_scale=bool(find_loss_scales(jax.eval_shape(step.inner_tx.init, state.arrays))),
    )

  def _of_points(self) -> Iterator[Tensor]:
    order = {name: i for i, name in enumerate(self._points)}
    for (kind, name, *index), sums in self._sums.items():
      if name in self._points:
        point = self._points[name]
        yield Tensor(
          kind=kind,
          module=point.module + "".join(f"[{i}]" for i in index[0]),
          name=point.name,
          line=point.line,
          dtype=point.gradient_dtype if kind == "activation gradient" else point.dtype,
          shape=point.shape,
          order=order[name],
          index=index[0],
          held=point.dtype,
          fragile=point.fragile,
          **_figures(sums),
        )

  def _of_parameters(self) -> Iterator[Tensor]:
    step, state = self._sides[0]
    modules = [point.module for point in self._points.values()]
    held = held_as(step, state)
    for order, (path, leaf) in enumerate(float_leaves(hide(state.arrays)), len(self._points)):
      seen = jax.device_get(see(leaf))
      found = {"parameter": _compared(seen, seen)}  # both runs read the same
      found |= {
        kind: self._sums[kind, path] for kind in ("weight gradient", "update") if (kind, path) in self._sums
      }
      parent, _, name = path.rpartition("/")
      for kind, sums in found.items():
        moved = {}
        if sums.moved is not None:
          moved = {"lost": lost(sums.moved), "moved": float(sums.moved[0])}
        yield Tensor(
          kind=kind,
          module=module_of(parent, modules),
          name=name,
          line="",
          dtype=leaf.dtype.name,
          shape=tuple(leaf.shape),
          order=order,
          held=held.get(path, leaf.dtype.name),
          path=path,
          **_figures(sums) | moved,
        )


def _compared(own: Seen | None, wide: Seen) -> _Sums:
  if own is None:
    return _Sums(wide)
  a, b = np.asarray(own.sketch, np.float64), np.asarray(wide.sketch, np.float64)
  return _Sums(wide, own, np.array([np.sum((a - b) ** 2), np.sum(b * b)]))


def _figures(sums: _Sums) -> dict[str, Any]:
  """Returns magnitudes, and errors if float32 has finite values to compare with."""
  wide, own = sums.magnitudes, sums.own
  found: dict[str, Any] = {"magnitudes": wide}
  if own is not None:
    found["policy"] = (float(own.nan), own.inf, own.zero)
  if sums.squares is not None:
    off, norm = (math.sqrt(x) for x in sums.squares)
    found["norm"] = norm
    if wide.broken != wide.count:
      found["error"] = off / norm if norm else math.inf if off else 0.0
  return found


def _narrow(points: Sequence[Point]) -> tuple[str, ...]:
  """Returns the modules in which the model's own casts put the float32 run in half precision."""
  first = {p.module: p for p in reversed(points) if is_half(p.dtype)}
  return tuple(f"{p.module or 'the function'} ({p.line}) in {p.dtype}" for p in reversed(first.values()))


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
