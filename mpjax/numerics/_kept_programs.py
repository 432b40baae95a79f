"""Steps and compiled programs that an inspection keeps for the next one: as long as what they are made of."""

from __future__ import annotations

import collections
import functools
import inspect
import types
import weakref
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import jax
import numpy as np
import optax

from mpjax._types import LossFunction, PyTree
from mpjax.policy import Policy
from mpjax.step import TrainStep, make_train_step

T = TypeVar("T")

# Entries kept with one step or loss function; the one that was longest unused goes first.
_MOST = 16
_PLACE, _ROOT = "_mpjax_inspections", "_mpjax_inspected_from"
_steps: weakref.WeakKeyDictionary[LossFunction, collections.OrderedDict[Hashable, TrainStep]]
_steps = weakref.WeakKeyDictionary()


def kept(step: TrainStep, key: Hashable, make: Callable[[], T]) -> T:
  """Returns what was made for a key before, or makes it.

  It lies in the step's own attributes and goes when the step goes, although it refers to it: a table of
  weak references would keep both for ever.

  Args:
    step: whose it is.
    key: what the result depends on besides the step.
    make: makes it.
  """
  return _made_once(vars(step).setdefault(_PLACE, collections.OrderedDict()), key, make)


def _made_once(there: collections.OrderedDict[Hashable, T], key: Hashable, make: Callable[[], T]) -> T:
  if key not in there:
    there[key] = make()
  there.move_to_end(key)
  while len(there) > _MOST:
    there.popitem(last=False)
  return there[key]


def step_for(loss_fn: LossFunction, tx: optax.GradientTransformation | None, policy: Policy) -> TrainStep:
  """Returns the step of a loss function, an optimiser (or none) and a policy."""
  optimizer = optax.identity() if tx is None else tx
  key = (tx, policy)
  if not isinstance(loss_fn, (types.FunctionType, functools.partial)) or not _is_hashable(key):
    return make_train_step(loss_fn, optimizer, policy)
  there = _steps.setdefault(loss_fn, collections.OrderedDict())
  return _made_once(there, key, lambda: make_train_step(_weakly(loss_fn), optimizer, policy))


def _weakly(fun: LossFunction) -> LossFunction:
  """Returns a function that calls another, and does not keep it alive."""
  reference = weakref.ref(fun)

  def call(*args: Any, **kwargs: Any) -> Any:
    return reference()(*args, **kwargs)  # type: ignore[misc]  # its caller has the function

  functools.update_wrapper(call, fun)
  del call.__wrapped__  # type: ignore[attr-defined]
  call.__signature__ = inspect.signature(fun)  # type: ignore[attr-defined]
  return call


def step_under(step: TrainStep, policy: Policy) -> TrainStep:
  """Returns a step under another policy; all those of one step lie with that one, float32's among them."""
  root = vars(step).get(_ROOT, step)

  def make() -> TrainStep:
    changed = root.with_policy(policy)
    vars(changed)[_ROOT] = root
    return changed

  return kept(root, ("under", policy), make)


def shapes_of(tree: PyTree) -> Hashable:
  """Returns what a program depends on of its arguments: their structure and types."""
  leaves, structure = jax.tree.flatten(tree)
  return structure, tuple((np.shape(x), jax.typeof(x)) for x in leaves)


def _is_hashable(key: Any) -> bool:
  try:
    hash(key)
  except TypeError:
    return False
  return True
