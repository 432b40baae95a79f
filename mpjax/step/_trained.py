"""The trained parameters: a mask by the choice that `wrt` makes, and by what the optimiser does."""

from __future__ import annotations

import contextlib
import enum
import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.tree_util import DictKey, KeyPath, SequenceKey

from mpjax._lazy import nnx
from mpjax._types import Atom, JaxprEqn, PyTree
from mpjax.dtypes import as_shapes, widen_floating
from mpjax.jaxpr import Calls, Forward, dtype_of, is_variable, needed
from mpjax.loss_scale import StructureError, hide, is_inexact, is_overwritten, keep_dtypes, show
from mpjax.patterns import component_regex, named_leaves, path_text
from mpjax.step._train_state import TrainState

# `wrt` for a tree of parameters; an nnx.Module takes an nnx Filter.
Chosen: TypeAlias = str | Sequence[str] | Callable[[str, Any], bool] | PyTree[bool]
_EXPECTED = (
  "expected a regular expression on the paths of parameters or a list of them, a tree of booleans like the "
  "parameters, or a function of path and leaf"
)
# The result is zero if all operands are, or if one is zero and the other a number.
_KEEPS_ZEROS = {
  jax.lax.broadcast_in_dim_p,
  jax.lax.convert_element_type_p,
  jax.lax.reshape_p,
  jax.lax.neg_p,
  jax.lax.mul_p,
}


def chosen_of(wrt: Chosen | None, params: PyTree) -> PyTree[bool]:
  """Returns, for each leaf of a tree of parameters, whether it is trained.

  Attributes of an object that are not floating arrays (counts, keys) never are. Raises `ValueError` for
  a tree of booleans without a leaf for a parameter, `TypeError` for an invalid choice.
  """
  flags, patterns = dict(named_leaves(wrt)), [component_regex(x) for x in _patterns(wrt)]
  is_chosen: Callable[[str, Any], bool]
  if wrt is None:
    is_chosen = lambda path, leaf: True
  elif patterns:
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


def _patterns(wrt: object) -> Sequence[str]:
  wrt = [wrt] if isinstance(wrt, str) else wrt
  return wrt if isinstance(wrt, Sequence) and all(isinstance(x, str) for x in wrt) else ()


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


class Flow(NamedTuple):
  """Which gradients and updates of an optimiser matter.

  Attributes:
    read: for each parameter, whether an update of this step or a later one depends on its gradient.
    moving: for each parameter, whether its update can be non-zero; it cannot for a frozen one.
  """

  read: PyTree[bool]
  moving: PyTree[bool]


class Trained:
  """The parameters that a step trains, a mask of a state's `arrays`: what `wrt` chooses and `tx` changes.

  A state may be shapes. Parameters of one structure have the optimiser traced once.
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
    if state.graphdef is not None and not found:
      raise ValueError(
        f"wrt={wrt!r} selects no variable of the module: expected a filter such as nnx.Param, "
        "nnx.LoRAParam or nnx.PathContains('lora'); a regular expression is for a tree of parameters"
      )
    shown = ", ".join(names[:12]) + (", ..." if len(names) > 12 else "")
    for pattern in _patterns(wrt) if state.graphdef is None else ():
      if not any(component_regex(pattern).search(name) for name in names):
        raise ValueError(f"wrt pattern {pattern!r} matches no parameter; parameters: {shown}")
    if not found:
      raise ValueError(f"wrt={wrt!r} leaves nothing to train of {shown}")

  def parameters(self, state: TrainState) -> PyTree:
    """Returns the parameters that the optimiser sees, as it sees them."""
    return self.seen(state, state.arrays)

  def seen(self, state: TrainState, tree: PyTree) -> PyTree:
    """Returns what the optimiser sees of a tree like the parameters; the others are an `optax.MaskedNode`."""
    return only(self._chosen(state), tree)

  def arguments(self, state: TrainState, grads: PyTree) -> tuple[PyTree, PyTree]:
    """Returns gradients and parameters for the optimiser, with zeros for gradients that are left out."""
    filled = lambda g, p: jnp.zeros_like(p) if is_masked(g) else g
    grads = jax.tree.map(filled, grads, state.arrays, is_leaf=is_masked)
    return self.seen(state, grads), self.parameters(state)

  def moved(self, state: TrainState, part: PyTree) -> PyTree:
    """Returns the parameters after a step: `part` as the optimiser sees them, the others as they were."""
    return merged(self.moving(state, part), state.arrays)

  def moving(self, state: TrainState, part: PyTree) -> PyTree:
    """Returns what may change of a tree that the optimiser sees, with `optax.MaskedNode`s for the others."""
    return only(self.seen(state, self.masks(state).moving), part)

  def _chosen(self, state: TrainState) -> PyTree[bool]:
    if state.graphdef is None:
      return chosen_of(self._wrt, state.arrays)
    if self._wrt is None:
      return jax.tree.map(lambda _: True, state.arrays)
    chosen = {path for path, _ in nnx.to_flat_state(nnx.state(state.model, self._wrt))}
    keys = lambda path: tuple(getattr(key, "key", key) for key in path)
    return jax.tree_util.tree_map_with_path(lambda path, _: keys(path) in chosen, state.arrays)

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
    flow = _flow_of(self._tx, shapes, value=jnp.zeros([]))
    if flow is None:
      return Flow(chosen, chosen)
    nothing, everything = (jax.tree.map(lambda _, on=on: on, state.arrays) for on in (False, True))
    # The optimiser neither reads nor changes a leaf that is overwritten; the step does both.
    of_all = lambda mask: merged(show(params, mask, self.seen(state, everything)), nothing)
    return Flow(*map(of_all, flow))


def _flow_of(tx: optax.GradientTransformationExtraArgs, params: PyTree, **extra: object) -> Flow | None:
  """Returns an optimiser's `Flow` over many steps, by shapes of parameters; `None` if it cannot be traced."""

  def steps(grads: PyTree, state: PyTree, params: PyTree) -> PyTree:
    def step(state: PyTree, _: None) -> tuple[PyTree, PyTree]:
      updates, new_state = tx.update(grads, state, params, **extra)
      return keep_dtypes(new_state, state), updates

    return jax.lax.scan(step, state, length=2)[1]

  # A mapped axis is missing; or the first update changes the form of the state, as in optax.monitor; or the
  # update asks for a value, as `bool` of an array does.
  untraceable = (NameError, TypeError, StructureError, jax.errors.JAXTypeError, jax.errors.JAXIndexError)
  with contextlib.suppress(*untraceable):
    jaxpr = jax.make_jaxpr(steps)(params, jax.eval_shape(tx.init, params), params).jaxpr
    read = needed(jaxpr, [True] * len(jaxpr.outvars)).inputs
    made = _Contents().solve(jaxpr, [_Content.ANYTHING] * len(jaxpr.invars)).outputs
    of_leaves = functools.partial(jax.tree.unflatten, jax.tree.structure(params))
    return Flow(of_leaves(read[: len(made)]), of_leaves([x is not _Content.ZEROS for x in made]))
  return None


class _Content(enum.IntEnum):
  """What a value is for all inputs. If it may be one of two, the later holds."""

  ZEROS = 0
  FINITE = 1  # a literal, or converted from an integer
  ANYTHING = 2


class _Contents(Forward[_Content]):
  def start(self, atom: Atom) -> _Content:
    if is_variable(atom) or not np.isfinite(atom.val).all():
      return _Content.ANYTHING
    return _Content.FINITE if np.any(atom.val) or not np.size(atom.val) else _Content.ZEROS

  def join(self, a: _Content, b: _Content) -> _Content:
    return max(a, b)

  def transfer(self, equation: JaxprEqn, operands: list[_Content], calls: Calls) -> list[_Content]:
    made = _Content.ANYTHING
    if equation.primitive in _KEEPS_ZEROS and _Content.ZEROS in operands:
      made = _Content.ZEROS if max(operands) < _Content.ANYTHING else made
    elif equation.primitive is jax.lax.convert_element_type_p:
      is_whole = not jnp.issubdtype(dtype_of(equation.invars[0]), jnp.inexact)
      made = _Content.FINITE if is_whole else made
    return [made] * len(equation.outvars)
