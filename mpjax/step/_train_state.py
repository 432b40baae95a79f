"""`TrainState`: everything that a training step reads and writes, as one pytree."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from typing import Any, Never, NoReturn

import jax
import numpy as np

from mpjax._lazy import nnx
from mpjax._render.html_sections import sections_html
from mpjax._render.plain_text import bytes_text
from mpjax._render.text_sections import of_rows
from mpjax._types import Array, PyTree
from mpjax.loss_scale._state_access import find_loss_scales
from mpjax.step._static_leaves import arrays_of, has_static, whole_of


@dataclasses.dataclass(frozen=True, repr=False)
class TrainState:
  """Everything a step reads and writes, as one pytree; `TrainStep.init` makes it.

  ```python
  state = step.init(params)
  state, metrics = step(state, batch)
  print(state.step, state.params["head"]["kernel"].dtype)  # master weights
  ```

  Attributes:
    step: i32[]; steps taken, including skipped ones.
    arrays: `params` without the leaves that are not arrays.
    model_state: the model's state other than parameters (BatchNorm statistics, counters), in its own
      dtypes; `{}` for none.
    opt_state: state of `TrainStep.tx`.
    rng: key from which each step's key is folded, or `None`.
    graphdef: structure of an `nnx.Module`, or `None`; static.
    fp8_state: amax histories of FP8 products under delayed scaling (`mpjax.init_fp8_state`); `{}` for none.
  """

  step: Array
  arrays: PyTree
  model_state: PyTree
  opt_state: PyTree
  rng: Array | None
  graphdef: nnx.GraphDef[nnx.Module] | None = None
  fp8_state: PyTree = dataclasses.field(default_factory=dict)

  @classmethod
  def create(cls, **unknown: Never) -> NoReturn:
    """Refuses the call that makes a `flax.training` state; `TrainStep.init` makes this one."""
    raise TypeError(
      "mpjax.TrainState has no create: step = mpjax.make_train_step(loss_fn, tx, policy), then "
      "state = step.init(params)"
    )

  @property
  def params(self) -> PyTree:
    """The master weights in the policy's `param_dtype`, as the tree given to `init`.

    Leaves that are not arrays, such as functions of an Equinox module, are unchanged.
    """
    return whole_of(self.arrays)

  @property
  def model(self) -> nnx.Module:
    """The `nnx.Module` with the current master weights.

    Raises:
      ValueError: for a state of a parameter tree.
    """
    if self.graphdef is None:
      raise ValueError("this TrainState does not come from an nnx.Module: use .params and .model_state")
    return nnx.merge(self.graphdef, self.arrays, self.model_state)

  @property
  def step_key(self) -> Array | None:
    """The key of the next step; `None` without `rng`."""
    return None if self.rng is None else jax.random.fold_in(self.rng, self.step)

  def replace(self, **changes: Any) -> TrainState:
    """Returns a copy with some fields replaced, or `params`."""
    if "params" in changes:
      params = changes.pop("params")
      changes["arrays"] = arrays_of(params) if has_static(self.arrays) else params
    return dataclasses.replace(self, **changes)

  def __repr__(self) -> str:
    shown = [f"step={_number_text(self.step)}"]
    shown += [f"{name}: {', '.join(filter(None, facts))}" for name, facts in self._facts().items()]
    shown += [] if self.rng is None else ["rng"]
    shown += [] if self.graphdef is None else ["an nnx.Module"]
    return f"TrainState({'; '.join(shown)})"

  def _repr_html_(self) -> str:
    rows = [["part", "holds", "bytes", "dtypes"], *([name, *of] for name, of in self._facts().items())]
    lines = [] if self.graphdef is None else ["from an nnx.Module"]
    for path, scale in find_loss_scales(self.opt_state).items():
      figures = [f"{name} {_number_text(getattr(scale, name))}" for name in ("scale", "skipped_steps")]
      lines.append(f"loss scale at opt_state{path}: {', '.join(figures)}")
    title = f"TrainState, step {_number_text(self.step)}"
    return sections_html([of_rows(title, rows, left=(0, 3), lines=lines)])

  def _facts(self) -> dict[str, list[str]]:
    """Returns number of arrays, bytes and dtypes of the trees that have any."""
    names = ("params", "model_state", "opt_state", "fp8_state")
    trees = (self.arrays, self.model_state, self.opt_state, self.fp8_state)
    return {name: _tree_facts(tree) for name, tree in zip(names, trees, strict=True) if jax.tree.leaves(tree)}


_FIELDS = ("step", "arrays", "model_state", "opt_state", "rng", "fp8_state")
_NAMES = ("step", "params", *_FIELDS[2:])  # in key paths, and so in files


def _flatten(state: TrainState) -> tuple[list[PyTree], Any]:
  return [getattr(state, name) for name in _FIELDS], state.graphdef


def _flatten_with_keys(state: TrainState) -> tuple[list[tuple[Any, PyTree]], Any]:
  parts, graphdef = _flatten(state)
  return [(jax.tree_util.GetAttrKey(name), part) for name, part in zip(_NAMES, parts, strict=True)], graphdef


def _unflatten(graphdef: Any, parts: Iterable[PyTree]) -> TrainState:
  return TrainState(**dict(zip(_FIELDS, parts, strict=True)), graphdef=graphdef)


jax.tree_util.register_pytree_with_keys(TrainState, _flatten_with_keys, _unflatten, _flatten)


def _number_text(x: object) -> str:
  """Returns a number on the host or a device as text; for other objects their type."""
  if not isinstance(x, (jax.Array, np.ndarray)) or isinstance(x, jax.core.Tracer):
    return type(x).__name__
  if isinstance(x, jax.Array) and (x.is_deleted() or not x.is_fully_addressable):
    return "deleted" if x.is_deleted() else "on other processes"
  return str(x) if x.ndim == 0 else f"{x.dtype}{list(x.shape)}"


def _tree_facts(tree: PyTree) -> list[str]:
  """Returns the number of arrays, their bytes and dtypes: `12 arrays`, `1.20 MB`, `float32`."""
  leaves = jax.tree.leaves(tree)
  arrays = [x for x in leaves if hasattr(x, "shape") and hasattr(x, "dtype")]
  if len(arrays) < len(leaves):  # such as shardings
    return [f"{len(leaves)} of {', '.join(sorted({type(x).__name__ for x in leaves}))}", "", ""]
  size = sum(math.prod(x.shape) * x.dtype.itemsize for x in arrays)
  dtypes = ", ".join(sorted({str(x.dtype) for x in arrays}))
  return [f"{len(arrays)} array{'s' if len(arrays) > 1 else ''}", bytes_text(size), dtypes]
