"""`nnx.Module` arguments: their state goes in and out of a trace, and their calls get module paths.

linen and Haiku put the module path into every equation, nnx puts nothing. Inside a trace the modules are
copies of ours, so each can be given a subclass of its class whose calls enter `jax.named_scope`; the caller's
own modules and their classes are left alone.
"""

from __future__ import annotations

import contextvars
import functools
import inspect
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
from flax import nnx

_Node = (nnx.Pytree, nnx.Variable)
_SCOPES: contextvars.ContextVar[dict[int, str]] = contextvars.ContextVar("mpjax_scopes")
_ACTIVE: contextvars.ContextVar[tuple[int, ...]] = contextvars.ContextVar("mpjax_active", default=())
_SCOPED: dict[type, type] = {}


def with_module_argument(
  fun: Callable[..., Any], args: tuple[Any, ...]
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
  """A module that is called, or a method bound to one, as a function with the module as first argument."""
  if isinstance(fun, nnx.Module):
    return (lambda module, *args, **kwargs: module(*args, **kwargs)), (fun, *args)
  if isinstance(fun, types.MethodType) and isinstance(fun.__self__, nnx.Module):
    return fun.__func__, (fun.__self__, *args)
  if isinstance(fun, functools.partial):
    inner, first = with_module_argument(fun.func, fun.args)
    return functools.partial(inner, **fun.keywords), (*first, *args)
  return fun, args


class Modules:
  """The nnx objects among the leaves of a call's arguments, taken out and put back.

  Attributes:
    leaves: the other leaves, and the arrays of the objects' state.
  """

  def __init__(self, tree: Any):
    everything, self._structure = jax.tree.flatten(tree, is_leaf=lambda x: isinstance(x, _Node))
    self._positions = [i for i, leaf in enumerate(everything) if isinstance(leaf, _Node)]
    self._objects = tuple(everything[i] for i in self._positions)
    self._others = [leaf for leaf in everything if not isinstance(leaf, _Node)]
    self._graphdef, state = nnx.split(self._objects)
    self._state, self._state_structure = jax.tree.flatten(nnx.to_pure_dict(state))
    self._template = state
    self.leaves = [*self._others, *self._state]

  def call(self, fun: Callable[..., Any], leaves: list[Any]) -> tuple[Any, dict[Any, Any]]:
    """`fun` on copies of the objects with these leaves; its result, and what it changed of their state."""
    n = len(self._others)
    if not self._objects:
      args, kwargs = jax.tree.unflatten(self._structure, leaves)
      return fun(*args, **kwargs), {}
    state = jax.tree.map(lambda x: x, self._template)
    nnx.replace_by_pure_dict(state, jax.tree.unflatten(self._state_structure, leaves[n:]))
    objects = nnx.merge(self._graphdef, state)
    before = {path: _value(v) for path, v in nnx.to_flat_state(nnx.state(objects))}
    everything: list[Any] = list(leaves[:n])
    for position, obj in zip(self._positions, objects, strict=True):
      everything.insert(position, obj)
    args, kwargs = jax.tree.unflatten(self._structure, everything)
    with _scoped(objects):
      out = fun(*args, **kwargs)
    after = dict(nnx.to_flat_state(nnx.state(objects)))
    changed = {path: v for path, v in after.items() if path not in before or _value(v) is not before[path]}
    return out, changed

  def update(self, changed: dict[Any, Any]) -> None:
    """Gives the caller's objects the state that a call changed."""
    if changed:
      nnx.update(self._objects, nnx.from_flat_state(changed))


def _value(variable: Any) -> Any:
  return variable.get_raw_value() if isinstance(variable, nnx.Variable) else variable


@contextmanager
def _scoped(objects: tuple[Any, ...]) -> Iterator[None]:
  names = {}
  for obj in objects:
    owners: dict[tuple[Any, ...], None] = {}
    for path, node in sorted(nnx.iter_graph(obj), key=lambda item: len(item[0])):
      if not isinstance(node, nnx.Module) or not _is_called(type(node)) or id(node) in names:
        continue
      above = max((len(p) for p in owners if path[: len(p)] == p), default=None)
      owners[path] = None
      names[id(node)] = type(node).__name__ if above is None else "/".join(map(str, path[above:]))
      object.__setattr__(node, "__class__", _scoped_class(type(node)))
  token = _SCOPES.set({**_SCOPES.get({}), **names})
  try:
    yield
  finally:
    _SCOPES.reset(token)


def _is_called(cls: type) -> bool:
  return any("__call__" in vars(base) for base in cls.__mro__)


def _scoped_class(cls: type) -> type:
  if "_mpjax_scoped" in vars(cls):
    return cls
  if cls not in _SCOPED:
    methods: dict[str, Any] = {}
    for name, method in inspect.getmembers(cls, inspect.isfunction):
      own = getattr(nnx.Module, name, None) is not method and getattr(object, name, None) is not method
      if own and (name == "__call__" or not name.startswith("_")):
        methods[name] = _in_scope(method)
    methods |= {"__module__": cls.__module__, "__doc__": cls.__doc__, "_mpjax_scoped": True}
    _SCOPED.setdefault(cls, type(cls)(cls.__name__, (cls,), methods))
  return _SCOPED[cls]


def _in_scope(method: Callable[..., Any]) -> Callable[..., Any]:
  @functools.wraps(method)
  def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
    name = _SCOPES.get({}).get(id(self))
    active = _ACTIVE.get()
    if name is None or (active and active[-1] == id(self)):
      return method(self, *args, **kwargs)
    token = _ACTIVE.set((*active, id(self)))
    try:
      with jax.named_scope(name):
        return method(self, *args, **kwargs)
    finally:
      _ACTIVE.reset(token)

  return wrapped
