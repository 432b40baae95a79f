"""`nnx.Module` arguments: their state goes in and out of a trace, and their calls get module paths.

linen and Haiku put the module path into every equation; nnx does not. Inside a trace the modules are
our copies, so each can get a subclass of its class whose calls enter `jax.named_scope`. The caller's
own modules and their classes do not change.
"""

from __future__ import annotations

import contextvars
import functools
import inspect
import types
from collections.abc import Callable
from typing import Any

import jax

from mpjax._lazy import nnx
from mpjax.patterns import path_text


def _is_node(x: object) -> bool:
  return isinstance(x, (nnx.Pytree, nnx.Variable))


_ACTIVE: contextvars.ContextVar[tuple[int, ...]] = contextvars.ContextVar("mpjax_active", default=())


def with_module_argument(
  fun: Callable[..., Any], args: tuple[Any, ...]
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
  """Returns a module that is called, or a method of one, as a function with the module as first argument."""
  if isinstance(fun, nnx.Module):
    return (lambda module, *args, **kwargs: module(*args, **kwargs)), (fun, *args)
  if isinstance(fun, types.MethodType) and isinstance(fun.__self__, nnx.Module):
    return fun.__func__, (fun.__self__, *args)
  if isinstance(fun, functools.partial):
    inner, first = with_module_argument(fun.func, fun.args)
    return functools.partial(inner, **fun.keywords), (*first, *args)
  return fun, args


class Modules:
  """The nnx objects among the leaves of a call's arguments, extracted and put back.

  Attributes:
    leaves: the other leaves, and the arrays of the objects' state.
    names: a path for each, in the arguments or in its object.
    arguments: for each, the number of the argument that it is in; all objects are one.
  """

  def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]):
    paths, self._structure = jax.tree_util.tree_flatten_with_path((args, kwargs), is_leaf=_is_node)
    self._positions = [i for i, (_, leaf) in enumerate(paths) if _is_node(leaf)]
    self._objects = tuple(paths[i][1] for i in self._positions)
    others = [(path, leaf) for path, leaf in paths if not _is_node(leaf)]
    self._graphdef, self._template = nnx.split(self._objects)
    state, self._state_structure = jax.tree_util.tree_flatten_with_path(nnx.to_pure_dict(self._template))
    self._others, self._paths = len(others), [path for path, _ in state]
    self.leaves = [leaf for _, leaf in (*others, *state)]
    self.names = [*(path_text(path[1:]) for path, _ in others), *map(path_text, self._paths)]
    numbers = {key: i for i, key in enumerate(dict.fromkeys(path[:2] for path, _ in paths))}
    self.arguments = [*(numbers[path[:2]] for path, _ in others), *[len(numbers)] * len(state)]

  @property
  def parameters(self) -> list[bool]:
    """Whether each leaf is an argument, or a parameter of an object: not a statistic or a count."""
    of_path = dict(nnx.to_flat_state(self._template))
    variables = [of_path.get(tuple(key.key for key in path)) for path in self._paths]
    return [*[True] * self._others, *(isinstance(variable, nnx.Param) for variable in variables)]

  def call(
    self, fun: Callable[..., Any], leaves: list[Any], scopes: bool = True
  ) -> tuple[Any, dict[Any, Any]]:
    """Calls `fun` on copies of the objects; returns its result, and its changes of their state.

    Args:
      fun: the function.
      leaves: replacement for `self.leaves`.
      scopes: whether the objects get names by their paths; in a trace they do.
    """
    n = self._others
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
    if scopes:
      give_scopes(objects)
    out = fun(*args, **kwargs)
    after = dict(nnx.to_flat_state(nnx.state(objects)))
    changed = {path: v for path, v in after.items() if path not in before or _value(v) is not before[path]}
    return out, changed

  def update(self, changed: dict[Any, Any]) -> None:
    """Puts the state that a call changed into the caller's objects."""
    if changed:
      nnx.update(self._objects, nnx.from_flat_state(changed))


def _value(variable: object) -> Any:
  return variable.get_raw_value() if isinstance(variable, nnx.Variable) else variable


def give_scopes(objects: tuple[Any, ...]) -> None:
  """Names the modules in our copies of the objects, each by its path from the module that holds it."""
  named: set[int] = set()
  for obj in objects:
    owners: list[tuple[Any, ...]] = []
    for path, node in sorted(nnx.iter_graph(obj), key=lambda item: len(item[0])):
      is_called = any("__call__" in vars(base) for base in type(node).__mro__)
      if not isinstance(node, nnx.Module) or not is_called or id(node) in named:
        continue
      above = max((len(p) for p in owners if path[: len(p)] == p), default=None)
      owners.append(path)
      named.add(id(node))
      cls: type = getattr(type(node), "_mpjax_scope_of", type(node))
      name = cls.__name__ if above is None else "/".join(map(str, path[above:]))
      object.__setattr__(node, "__class__", _scoped_class(cls, name))


@functools.cache
def _scoped_class(cls: type, name: str) -> type:
  # The name belongs to the class, not the object: the copies for nnx's transforms keep it.
  methods: dict[str, Any] = {}
  for key, method in inspect.getmembers(cls, inspect.isfunction):
    own = getattr(nnx.Module, key, None) is not method and getattr(object, key, None) is not method
    if own and (key == "__call__" or not key.startswith("_")):
      methods[key] = _in_scope(method, name)
  methods |= {"__module__": cls.__module__, "__doc__": cls.__doc__, "_mpjax_scope_of": cls}
  return type(cls)(cls.__name__, (cls,), methods)


def _in_scope(method: Callable[..., Any], name: str) -> Callable[..., Any]:
  @functools.wraps(method)
  def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
    active = _ACTIVE.get()
    if active and active[-1] == id(self):  # one of its methods calls another
      return method(self, *args, **kwargs)
    token = _ACTIVE.set((*active, id(self)))
    try:
      with jax.named_scope(name):
        return method(self, *args, **kwargs)
    finally:
      _ACTIVE.reset(token)

  return wrapped
