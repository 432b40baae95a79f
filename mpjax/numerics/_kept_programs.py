"""Steps and compiled programs that an inspection keeps for the next one: as long as what they are made of."""

from __future__ import annotations

import collections
import functools
import types
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import jax
import numpy as np
import optax

from mpjax._types import PyTree
from mpjax.policy import Policy
from mpjax.step import TrainStep, make_train_step

T = TypeVar("T")

# Entries kept with one step or loss function; the one that was longest unused goes first.
_MOST = 16
_PLACE, _ROOT = "_mpjax_inspections", "_mpjax_inspected_from"


def kept(owner: TrainStep | Callable[..., Any], key: Hashable, make: Callable[[], T]) -> T:
  """Returns what was made for a key before, or makes it.

  It lies in the owner's own attributes and goes when the owner goes, although it refers to it: a table of
  weak references would keep both for ever.

  Args:
    owner: a step, a function or a `functools.partial`; of anything else nothing is kept.
    key: what the result depends on besides the owner.
    make: makes it.
  """
  if not isinstance(owner, (TrainStep, types.FunctionType, functools.partial)):
    return make()
  # `functools.wraps` copies attributes to another function.
  whose, there = vars(owner).get(_PLACE, (None, None))
  if whose is not owner or there is None:
    there = collections.OrderedDict()
    vars(owner)[_PLACE] = (owner, there)
  if key not in there:
    there[key] = make()
  there.move_to_end(key)
  while len(there) > _MOST:
    there.popitem(last=False)
  return there[key]


def step_for(
  loss_fn: Callable[..., Any], tx: optax.GradientTransformation | None, policy: Policy
) -> TrainStep:
  """Returns the step of a loss function, an optimiser (or none) and a policy."""
  make = lambda: make_train_step(loss_fn, optax.identity() if tx is None else tx, policy)
  key = ("step", tx, policy)
  return kept(loss_fn, key, make) if _is_hashable(key) else make()


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
