"""The trained parameters: a mask by the choice that `wrt` makes, and by what the optimiser does."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.tree_util import DictKey, KeyPath, SequenceKey

from mpjax._lazy import nnx
from mpjax._types import PyTree
from mpjax.dtypes import as_shapes, widen_floating
from mpjax.loss_scale import hide, is_inexact, is_overwritten, show
from mpjax.patterns import component_regex, named_leaves, path_text
from mpjax.step._optimizer_flow import Flow, flow_of
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


def only(mask: PyTree[bool], tree: PyTree) -> PyTree:
  """Returns a tree with `optax.MaskedNode` for each leaf that the mask leaves out."""
  return jax.tree.map(lambda keep, part: part if keep else optax.MaskedNode(), mask, tree)


def merged(tree: PyTree, rest: PyTree) -> PyTree:
  """Returns a tree with each `optax.MaskedNode` replaced from another tree of its structure."""
  return jax.tree.map(lambda x, y: y if is_masked(x) else x, tree, rest, is_leaf=is_masked)


def is_masked(x: object) -> bool:
  """Returns whether `x` stands for a leaf that is left out."""
  return isinstance(x, optax.MaskedNode)


class Trained:
  """The parameters that a step trains: those that `wrt` chooses and the optimiser changes.

  All parameters lie in a state's `arrays`; what trains is a mask of them. A state may be shapes.

  Args:
    wrt: the choice: for a tree of parameters as `chosen_of` takes it, for an `nnx.Module` a filter.
    tx: the optimiser, which is traced once for parameters of one structure.
  """

  def __init__(self, wrt: Any, tx: optax.GradientTransformation):
    self._wrt, self._tx = wrt, tx
    self._known: dict[Hashable, Flow] = {}

  def require_some(self, state: TrainState) -> None:
    """Raises `ValueError` for a choice that is empty, or has a pattern that matches no parameter."""
    wrt, names = self._wrt, [name for name, _ in named_leaves(state.arrays)]
    if wrt is None or not names:
      return
    found = any(jax.tree.leaves(self._chosen(state)))
    if state.graphdef is not None:
      if found:
        return
      raise ValueError(
        f"wrt={wrt!r} selects no variable of the module: expected a filter such as nnx.Param, "
        "nnx.LoRAParam or nnx.PathContains('lora'); a regular expression is for a tree of parameters"
      )
    shown = ", ".join(names[:12]) + (", ..." if len(names) > 12 else "")
    for pattern in [wrt] if isinstance(wrt, str) else wrt if isinstance(wrt, (list, tuple)) else ():
      if isinstance(pattern, str) and not any(component_regex(pattern).search(name) for name in names):
        raise ValueError(f"wrt pattern {pattern!r} matches no parameter; parameters: {shown}")
    if not found:
      raise ValueError(f"wrt={wrt!r} leaves nothing to train of {shown}")

  def parameters(self, state: TrainState) -> PyTree:
    """Returns the parameters that the optimiser sees, as it sees them."""
    return self.seen(state, state.arrays)

  def seen(self, state: TrainState, tree: PyTree) -> PyTree:
    """Returns what the optimiser sees of a tree like the parameters.

    The others are an `optax.MaskedNode` in a tree of parameters; the state of a module is without them, as
    `nnx.Optimizer(model, tx, wrt=...)` has it.
    """
    part = only(self._chosen(state), tree)
    if state.graphdef is None:
      return part
    flat = nnx.traversals.flatten_mapping(part)
    return _nested({path: x for path, x in flat.items() if not is_masked(x)}, tree)

  def whole(self, state: TrainState, part: PyTree, rest: PyTree) -> PyTree:
    """Inverts `seen`: returns a tree like the parameters, with `rest` where the optimiser sees nothing."""
    if state.graphdef is None:
      return merged(part, rest)
    flatten = nnx.traversals.flatten_mapping
    return _nested({**flatten(rest), **flatten(part)}, rest)

  def arguments(self, state: TrainState, grads: PyTree) -> tuple[PyTree, PyTree]:
    """Returns gradients and parameters for the optimiser, with zeros for gradients that are left out."""
    filled = lambda g, p: jnp.zeros_like(p) if is_masked(g) else g
    grads = jax.tree.map(filled, grads, state.arrays, is_leaf=is_masked)
    return self.seen(state, grads), self.parameters(state)

  def moved(self, state: TrainState, part: PyTree) -> PyTree:
    """Returns the parameters after a step: `part` as the optimiser sees them, the others as they were."""
    new = self.whole(state, part, state.arrays)
    return merged(only(self.masks(state).moving, new), state.arrays)

  def moving(self, state: TrainState, part: PyTree) -> PyTree:
    """Returns what may change of a tree that the optimiser sees, with `optax.MaskedNode`s for the others."""
    return only(self.seen(state, self.masks(state).moving), part)

  def _chosen(self, state: TrainState) -> PyTree[bool]:
    if state.graphdef is None:
      return chosen_of(self._wrt, state.arrays)
    if self._wrt is None:
      return jax.tree.map(lambda _: True, state.arrays)
    chosen = {path for path, _ in nnx.to_flat_state(nnx.state(state.model, self._wrt))}
    flat = nnx.traversals.flatten_mapping(state.arrays)
    return _nested({path: path in chosen for path in flat}, state.arrays)

  def masks(self, state: TrainState) -> Flow:
    """Returns which gradients the optimiser reads, and which parameters may move."""
    leaves, structure = jax.tree.flatten(state.arrays)
    key = (structure, state.graphdef, *((x.shape, x.dtype) for x in leaves))
    if key not in self._known:
      self._known[key] = self._new_masks(state)
    return self._known[key]

  def _new_masks(self, state: TrainState) -> Flow:
    chosen, params = self._chosen(state), self.parameters(state)
    shapes = as_shapes(widen_floating(hide(params)))
    flow = flow_of(self._tx, shapes, value=jnp.zeros([]))
    if flow is None:
      return Flow(chosen, chosen)
    nothing, everything = (jax.tree.map(lambda _, on=on: on, state.arrays) for on in (False, True))

    # The optimiser neither reads nor changes a leaf that is overwritten; the step does both.
    of_all = lambda mask: self.whole(state, show(params, mask, self.seen(state, everything)), nothing)
    return Flow(*map(of_all, flow))


def _nested(flat: dict[Any, Any], like: PyTree) -> PyTree:
  """Returns a module's state, a dict or an `nnx.State` as another one is, from its leaves by path."""
  nested = dict(nnx.traversals.unflatten_mapping(flat))
  return nnx.State(nested) if isinstance(like, nnx.State) else nested
