"""The trained parameters: the choice that `wrt` makes, and trees without the other parameters."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.tree_util import DictKey, KeyPath, SequenceKey

from mpjax._lazy import nnx
from mpjax._types import PyTree
from mpjax.dtypes import as_shapes, widen_floating
from mpjax.loss_scale._finite import is_inexact
from mpjax.loss_scale._overwritten import hide, is_overwritten, show
from mpjax.loss_scale._skip import flow_of
from mpjax.patterns import component_regex, named_leaves, path_text
from mpjax.step._train_state import TrainState

# `wrt` for a tree of parameters; an nnx.Module takes an nnx Filter.
Chosen: TypeAlias = str | Sequence[str] | Callable[[str, Any], bool] | PyTree[bool]
_EXPECTED = (
  "expected a regular expression on the paths of parameters or a list of them, a tree of booleans like the "
  "parameters, or a function of path and leaf"
)


def chosen_of(wrt: Chosen | None, params: PyTree) -> PyTree[bool]:
  """Returns, for each leaf of a tree of parameters, whether it is trained.

  An object's attributes that are not floating arrays (counts, keys) are never trained.

  Args:
    wrt: the choice; `None` for all.
    params: the parameters, or some of them; arrays or shapes.

  Raises:
    ValueError: for a tree of booleans without a leaf for a parameter.
    TypeError: for an invalid choice.
  """
  flags = dict(named_leaves(wrt)) if wrt is not None else {}
  is_chosen: Callable[[str, Any], bool]
  if isinstance(wrt, str):
    wrt = [wrt]
  if wrt is None:
    is_chosen = lambda path, leaf: True
  elif isinstance(wrt, Sequence) and wrt and all(isinstance(x, str) for x in wrt):
    patterns = [component_regex(x) for x in wrt]
    is_chosen = lambda path, _: any(p.search(path) for p in patterns)
  elif flags and all(isinstance(flag, (bool, np.bool_)) for flag in flags.values()):

    def is_chosen(path: str, _: Any) -> bool:
      if path not in flags:
        raise ValueError(f"wrt has no boolean for the parameter {path!r}: {_EXPECTED}")
      return bool(flags[path])

  elif callable(wrt) and not isinstance(wrt, type):
    is_chosen = lambda path, leaf: bool(wrt(path, leaf))
  else:
    raise TypeError(f"wrt={wrt!r} for a tree of parameters: {_EXPECTED}")

  def is_trained(path: KeyPath, leaf: Any) -> bool:
    # A leaf that is overwritten is not a parameter: each step gives it its next value.
    if is_overwritten(path):
      return True
    return (is_inexact(leaf) or in_containers(path)) and is_chosen(path_text(path), leaf)

  return jax.tree_util.tree_map_with_path(is_trained, params)


def in_containers(path: KeyPath) -> bool:
  """Returns whether a leaf is only inside dicts and lists, where every leaf is meant as a parameter."""
  return all(isinstance(key, (DictKey, SequenceKey)) for key in path)


def require_chosen(wrt: Chosen | None, params: PyTree) -> None:
  """Raises `ValueError` for a choice with a pattern that matches no parameter, or an empty choice."""
  names = [name for name, _ in named_leaves(params)]
  shown = ", ".join(names[:12]) + (", ..." if len(names) > 12 else "")
  for pattern in [wrt] if isinstance(wrt, str) else wrt if isinstance(wrt, (list, tuple)) else ():
    if isinstance(pattern, str) and not any(component_regex(pattern).search(name) for name in names):
      raise ValueError(f"wrt pattern {pattern!r} matches no parameter; parameters: {shown}")
  if wrt is not None and names and not any(jax.tree.leaves(chosen_of(wrt, params))):
    raise ValueError(f"wrt={wrt!r} leaves nothing to train of {shown}")


def only(chosen: PyTree[bool] | None, tree: PyTree) -> PyTree:
  """Returns a tree with `optax.MaskedNode` for each leaf that is not chosen; `None` chooses all."""
  if chosen is None:
    return tree
  return jax.tree.map(lambda keep, part: part if keep else optax.MaskedNode(), chosen, tree)


def without(chosen: PyTree[bool], tree: PyTree) -> PyTree:
  """Returns a tree with `optax.MaskedNode` for each leaf that is chosen."""
  return only(jax.tree.map(lambda keep: not keep, chosen), tree)


def merged(tree: PyTree, rest: PyTree) -> PyTree:
  """Returns a tree with each `optax.MaskedNode` replaced from another tree of its structure."""
  is_masked = lambda x: isinstance(x, optax.MaskedNode)
  return jax.tree.map(lambda x, y: y if is_masked(x) else x, tree, rest, is_leaf=is_masked)


class _Flow(NamedTuple):
  """How the optimiser uses each parameter; `None` if all are used alike.

  Attributes:
    chosen: whether the optimiser sees it.
    read: whether its gradient is read.
    moving: whether its update can be non-zero.
  """

  chosen: PyTree[bool] | None
  read: PyTree[bool] | None
  moving: PyTree[bool] | None


class Trained:
  """The parameters that a step trains: those that `wrt` chooses and the optimiser changes.

  Trees that it returns have an `optax.MaskedNode` for each other parameter. The state may be shapes.

  Args:
    wrt: the choice, as `chosen_of` takes it; for an `nnx.Module` all parameters of a state are trained.
    tx: the optimiser, which is traced once for parameters of one structure.
  """

  def __init__(self, wrt: Any, tx: optax.GradientTransformation):
    self._wrt, self._tx = wrt, tx
    self._flows: dict[Hashable, _Flow] = {}

  def parameters(self, state: TrainState) -> PyTree:
    """Returns the parameters that the optimiser sees."""
    return only(self._chosen(state), state.arrays)

  def read(self, state: TrainState) -> PyTree[bool] | None:
    """Returns, for each parameter, whether its gradient is read; `None` if all are."""
    return self._flow(state).read

  def arguments(self, state: TrainState, grads: PyTree) -> tuple[PyTree, PyTree]:
    """Returns gradients and parameters for the optimiser, with zeros for gradients that it does not read.

    Args:
      state: a state.
      grads: gradients, scaled or not, of the parameters whose gradients are read, or of all parameters.
    """
    flow = self._flow(state)
    if flow.read is not None:
      grads = only(flow.chosen, merged(grads, jax.tree.map(jnp.zeros_like, state.arrays)))
    return grads, self.parameters(state)

  def moving(self, state: TrainState, tree: PyTree) -> PyTree:
    """Returns the leaves of a tree like the parameters that a step changes."""
    return only(self._flow(state).moving, tree)

  def with_frozen(self, state: TrainState) -> tuple[TrainState, PyTree[bool] | None]:
    """Returns the state with all weights among its parameters, and `read` for them."""
    weights, read = with_frozen(state), self.read(state)
    if weights is state:
      return state, read
    every = jax.tree.map(lambda _: True, state.arrays) if read is None else read
    frozen = jax.tree.map(lambda _: False, state.model_state)
    return weights, with_frozen(state.replace(arrays=every, model_state=frozen)).arrays

  def _chosen(self, state: TrainState) -> PyTree[bool] | None:
    if state.graphdef is not None:
      return None
    chosen = chosen_of(self._wrt, state.arrays)
    return None if self._wrt is None and all(jax.tree.leaves(chosen)) else chosen

  def _flow(self, state: TrainState) -> _Flow:
    leaves, structure = jax.tree.flatten(state.arrays)
    key = (structure, state.graphdef is None, *((x.shape, x.dtype) for x in leaves))
    if key not in self._flows:
      self._flows[key] = self._new_flow(state)
    return self._flows[key]

  def _new_flow(self, state: TrainState) -> _Flow:
    chosen = self._chosen(state)
    params = as_shapes(widen_floating(hide(only(chosen, state.arrays))))
    flow = flow_of(self._tx, params, value=jnp.zeros([]))
    everything = jax.tree.map(lambda _: True, state.arrays)

    def of_params(flags: list[bool]) -> PyTree[bool] | None:
      flagged = jax.tree.unflatten(jax.tree.structure(params), flags)
      # The optimiser neither reads nor changes a leaf that is overwritten; the step does both.
      whole = only(chosen, show(state.arrays, flagged, everything))
      whole = merged(whole, jax.tree.map(lambda _: False, everything))
      return None if all(jax.tree.leaves(whole)) else whole

    if flow is None:
      return _Flow(chosen, chosen, chosen)
    return _Flow(chosen, of_params(flow.read), of_params(flow.moving))


def with_frozen(state: TrainState) -> TrainState:
  """Returns the state of an `nnx.Module` with the `nnx.Param`s that are not trained among its parameters.

  There they are divided and gathered as parameters are; otherwise they are in the model's state. The state
  of a tree of parameters is returned unchanged.

  Args:
    state: a state, of arrays or of other leaves in their place.
  """
  frozen = _frozen(state)
  if not frozen:
    return state
  params, model_state = _flat(state.arrays), _flat(state.model_state)
  return state.replace(
    arrays=_nested({**params, **{path: model_state[path] for path in frozen}}, state.arrays),
    model_state=_nested(
      {path: x for path, x in model_state.items() if path not in frozen}, state.model_state
    ),
  )


def without_frozen(state: TrainState, like: TrainState) -> TrainState:
  """Inverts `with_frozen`.

  Args:
    state: a state from `with_frozen`.
    like: a state as steps have it, for the structure.
  """
  frozen = _frozen(like)
  if not frozen:
    return state
  params, model_state = _flat(state.arrays), _flat(state.model_state)
  return state.replace(
    arrays=_nested({path: x for path, x in params.items() if path not in frozen}, like.arrays),
    model_state=_nested({**model_state, **{path: params[path] for path in frozen}}, like.model_state),
  )


def _frozen(state: TrainState) -> set[tuple[Any, ...]]:
  """Returns the paths of the `nnx.Param`s in a model's state."""
  if state.graphdef is None:
    return set()
  variables = nnx.state(nnx.merge(state.graphdef, state.arrays, state.model_state), nnx.Param)
  return {path for path, _ in nnx.to_flat_state(variables)} & _flat(state.model_state).keys()


def _flat(tree: Mapping[Any, Any]) -> dict[tuple[Any, ...], Any]:
  return dict(nnx.traversals.flatten_mapping(tree)) if tree else {}


def _nested(flat: dict[tuple[Any, ...], Any], like: PyTree) -> PyTree:
  nested = dict(nnx.traversals.unflatten_mapping(flat))
  return nnx.State(nested) if isinstance(like, nnx.State) else nested
