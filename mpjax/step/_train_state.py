"""`TrainState`: everything that a training step reads and writes, as one pytree."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from typing import Any, Never, NoReturn

import jax
import numpy as np

from mpjax._lazy import nnx
from mpjax._render.plain_text import bytes_text
from mpjax._types import Array, PyTree


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
      changes["arrays"] = arrays_of(params) if _has_static(self.arrays) else params
    return dataclasses.replace(self, **changes)

  def __repr__(self) -> str:
    trees = {name: getattr(self, field) for name, field in _PARTS.items() if name not in ("step", "rng")}
    parts = [f"{name}: {_in_words(tree)}" for name, tree in trees.items() if jax.tree.leaves(tree)]
    return f"TrainState({'; '.join([f'step={_number_text(self.step)}', *parts])})"


# The parts of a state by their names in key paths, and so in files.
_PARTS = {name: name for name in ("step", "params", "model_state", "opt_state", "rng", "fp8_state")}
_PARTS["params"] = "arrays"


def _flatten(state: TrainState) -> tuple[list[tuple[Any, PyTree]], Any]:
  parts = [(jax.tree_util.GetAttrKey(name), getattr(state, field)) for name, field in _PARTS.items()]
  return parts, state.graphdef


def _unflatten(graphdef: Any, parts: Iterable[PyTree]) -> TrainState:
  return TrainState(**dict(zip(_PARTS.values(), parts, strict=True)), graphdef=graphdef)


jax.tree_util.register_pytree_with_keys(TrainState, _flatten, _unflatten)


def _number_text(x: object) -> str:
  """Returns a number that can be read as text; of anything else the type."""
  if isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer):
    x = np.asarray(x) if x.is_fully_addressable and not x.is_deleted() else x
  return str(x) if isinstance(x, (np.ndarray, np.generic)) else type(x).__name__


def _in_words(tree: PyTree) -> str:
  """Returns the number of leaves, their bytes and dtypes: `12 arrays, 1.20 MB, float32`."""
  leaves = jax.tree.leaves(tree)
  size = sum(math.prod(x.shape) * x.dtype.itemsize for x in leaves if hasattr(x, "dtype"))
  dtypes = sorted({str(getattr(x, "dtype", type(x).__name__)) for x in leaves})
  return ", ".join([f"{len(leaves)} array{'s' if len(leaves) > 1 else ''}", bytes_text(size), *dtypes])


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, eq=False)
class _Static:
  """A leaf that is not an array, such as an Equinox module's function: a part of the state's structure.

  So `jit`, optimisers, meshes and checkpoints see only arrays. Two are equal if their values are equal and
  have one type, so that a step is compiled once for both.
  """

  value: Any

  def __hash__(self) -> int:
    return hash(type(self.value))  # the value may have none

  def __eq__(self, other: object) -> bool:
    if not isinstance(other, _Static) or type(self.value) is not type(other.value):
      return False
    try:
      return self.value is other.value or bool(self.value == other.value)
    except Exception:  # from an object that does not compare
      return False


def arrays_of(tree: PyTree) -> PyTree:
  """Returns a tree with a `_Static` for each leaf that is not an array."""
  return jax.tree.map(lambda x: x if _is_array(x) or _is_static(x) else _Static(x), tree, is_leaf=_is_static)


def whole_of(tree: PyTree) -> PyTree:
  """Returns the original tree from the tree of `arrays_of`, with its present arrays."""
  if not _has_static(tree):
    return tree
  return jax.tree.map(lambda x: x.value if _is_static(x) else x, tree, is_leaf=_is_static)


def _has_static(tree: PyTree) -> bool:
  return any(map(_is_static, jax.tree.leaves(tree, is_leaf=_is_static)))


def _is_static(x: object) -> bool:
  return isinstance(x, _Static)


def _is_array(x: object) -> bool:
  if not isinstance(x, (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct)):
    return False
  return getattr(x.dtype, "kind", "V") not in "OSU"  # NumPy's arrays of objects and text are not JAX's
