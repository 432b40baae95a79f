"""Keeps steps and compiled programs for the next inspection, as long as their step or loss function lives."""

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

# Entries kept for one step or loss function; the least recently used is dropped first.
_MOST = 16
_PLACE, _ROOT = "_mpjax_inspections", "_mpjax_inspected_from"
_steps: weakref.WeakKeyDictionary[LossFunction, collections.OrderedDict[Hashable, TrainStep]]
_steps = weakref.WeakKeyDictionary()


def kept(step: TrainStep, key: Hashable, make: Callable[[], T]) -> T:
  """Returns the result for a key, which `make` computes the first time.

  The step's own attributes hold the result, so that both die together although the result refers to the step.
  A table of weak references would keep both for ever.

  Args:
    step: the step that the result belongs to.
    key: all that the result depends on, apart from the step.
    make: computes the result.
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
  """Returns the step of a loss function, an optimiser (or `None`) and a policy."""
  optimizer = optax.identity() if tx is None else tx
  key = (tx, policy)
  if not isinstance(loss_fn, (types.FunctionType, functools.partial)) or not is_hashable(key):
    return make_train_step(loss_fn, optimizer, policy)
  there = _steps.setdefault(loss_fn, collections.OrderedDict())
  return _made_once(there, key, lambda: make_train_step(weakly(loss_fn), optimizer, policy))


def weakly(fun: LossFunction) -> LossFunction:
  """Returns a function that calls `fun` without keeping it alive."""
  reference = weakref.ref(fun)

  def call(*args: Any, **kwargs: Any) -> Any:
    return reference()(*args, **kwargs)  # type: ignore[misc]  # its caller has the function

  functools.update_wrapper(call, fun)
  del call.__wrapped__  # type: ignore[attr-defined]
  signature = inspect.signature(fun)
  bound = fun.keywords if isinstance(fun, functools.partial) else {}
  free = [p for name, p in signature.parameters.items() if name not in bound]
  call.__signature__ = signature.replace(parameters=free)  # type: ignore[attr-defined]
  return call


def step_under(step: TrainStep, policy: Policy) -> TrainStep:
  """Returns a step under another policy; the original step keeps all of them."""
  root = vars(step).get(_ROOT, step)

  def make() -> TrainStep:
    changed = root.with_policy(policy)
    vars(changed)[_ROOT] = root
    return changed

  return kept(root, ("under", policy), make)


def shapes_of(tree: PyTree) -> Hashable:
  """Returns what a program depends on: the structure and types of its arguments."""
  leaves, structure = jax.tree.flatten(tree)
  return structure, tuple((np.shape(x), jax.typeof(x)) for x in leaves)


def is_hashable(key: Any) -> bool:
  try:
    hash(key)
  except TypeError:
    return False
  return True
