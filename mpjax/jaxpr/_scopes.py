"""Places of equations in the user's program: module path, phase of the derivative, source line."""

from __future__ import annotations

import contextlib
import functools
import pathlib
import re
from collections.abc import Container, Iterator
from typing import Any, NamedTuple

from jax.extend import source_info_util

from mpjax import _compat
from mpjax._types import Jaxpr, JaxprEqn
from mpjax.jaxpr._bodies import bodies_of, once_for_each

FORWARD, BACKWARD, OTHER = "forward", "backward", ""

# Scopes with which mpjax marks a program, for an outer autocast. No module's name has an @.
FULL_PRECISION = "@full_precision"
OUTPUT = "@autocast_output"
AUTOCAST = "@autocast_inside"  # with the policy's label; there for `explain` alone
HALF_PRECISION, REGION_EDGE = "@half_precision", "@half_precision_edge"
_OWN_MARKS = frozenset({FULL_PRECISION, OUTPUT, AUTOCAST, HALF_PRECISION, REGION_EDGE})
# Scopes that are not modules, in a jaxpr and in a compiled program.
_REMATTED = frozenset({"rematted_computation"})
_MARKS = _OWN_MARKS | _REMATTED
MARKS = _MARKS | {"checkpoint"}

_TRANSFORMED = re.compile(r"^(transpose|jvp|vmap|pmap|checkpoint|remat|custom_jvp|custom_vjp|p?jit)\((.*)\)$")
_CALLS = ("jit", "pjit")
# The `update` of an optax transform is a function inside the one that makes the transform.
_UPDATE = re.compile(r"(\w+)\.<locals>\.update")
_AROUND_UPDATES = ("chain", "with_extra_args_support")

# Library code that a user's model calls, which does not contain the user's line.
_LIBRARIES = ("jax", "jaxlib", "flax", "optax", "haiku", "equinox", "jmp", "einops")
_OWN = pathlib.Path(__file__).parents[1]


_TRANSFORM = type(source_info_util.new_name_stack().transform("jvp").stack[0])


class Scopes(NamedTuple):
  """A name stack of JAX, split into parts.

  Attributes:
    transforms: the transformations, outermost first: `transpose`, `jvp`.
    runs: the scopes; each transformation begins a new run.
  """

  transforms: tuple[str, ...]
  runs: tuple[tuple[str, ...], ...]

  def path(self, leave_out: Container[str] = MARKS) -> str:
    """Returns the scopes as one path, `GPT/h0/attn`, once if a transformation repeated them."""
    flat: list[str] = []
    starts = []
    for run in self.runs:
      starts.append(len(flat))
      flat += [s for s in run if _unnumbered(s) not in leave_out and "->" not in s]
    first = 0
    for i in range(1, len(flat)):
      n = i - first
      transformed = any(i <= start < i + n for start in starts)  # otherwise a module in its namesake
      if transformed and flat[i : i + n] == flat[first:i]:
        first = i
    return "/".join(flat[first:])

  @property
  def phase(self) -> str:
    """FORWARD or BACKWARD pass of a derivative, or OTHER."""
    if "transpose" in self.transforms:
      return BACKWARD
    return FORWARD if "jvp" in self.transforms else OTHER


@functools.lru_cache(maxsize=1 << 16)
def parse_scopes(text: str) -> Scopes:
  """Splits a name stack, `transpose(jvp(GPT))/h0`, as JAX prints it and compiled programs contain it."""
  transforms: list[str] = []
  runs: list[list[str]] = [[]]
  for part in split_scopes(text):
    found = _TRANSFORMED.match(part)
    if found is None:
      runs[-1] += [part] if part else []
      continue
    runs.append([])
    while found is not None:
      kind, part = found.groups()
      if kind in _CALLS:
        part = ""
      else:
        transforms.append(kind)
      found = _TRANSFORMED.match(part)
    runs[-1] += part.split("/") if part else []
  return Scopes(tuple(transforms), tuple(map(tuple, runs)))


def split_scopes(text: str) -> list[str]:
  """Returns the parts of a name stack, which may have slashes inside parentheses."""
  parts, depth, current = [], 0, ""
  for letter in text:
    depth += (letter == "(") - (letter == ")")
    if letter == "/" and depth == 0:
      parts.append(current)
      current = ""
    else:
      current += letter
  return [*parts, current]


def _scopes(equation: JaxprEqn) -> Scopes:
  return _parse_stack(equation.source_info.name_stack)


@functools.lru_cache(maxsize=1 << 16)
def _parse_stack(stack: source_info_util.NameStack) -> Scopes:
  return parse_scopes(str(stack))


@functools.lru_cache(maxsize=1 << 16)
def _path(stack: source_info_util.NameStack, leave_out: frozenset[str]) -> str:
  return _parse_stack(stack).path(leave_out)


def module_path(equation: JaxprEqn) -> str:
  """Returns the modules that an equation was traced in: `GPT/h0/attn`."""
  return _path(equation.source_info.name_stack, _MARKS)


def marked_path(equation: JaxprEqn) -> str:
  """Returns `module_path` with mpjax's marks among the modules."""
  return _path(equation.source_info.name_stack, _REMATTED)


def without_marks(path: str) -> str:
  """Returns a marked path as a module path."""
  return "/".join(part for part in path.split("/") if _unnumbered(part) not in _MARKS)


def region_mark(path: str) -> str:
  """Returns the mark of the outermost region that a marked path is in; empty without one."""
  parts = (part.partition("#") for part in path.split("/"))
  return next((mark for name, _, mark in parts if name == HALF_PRECISION), "")


def autocast_scope(label: str) -> str:
  """The scope of what an autocast with a policy of this label has decided."""
  return f"{AUTOCAST}#{re.sub(r'[^A-Za-z0-9_.,=+ ()-]', '_', label)}"


def autocast_label(path: str) -> str:
  """The label of the policy of the autocast that decided about a marked path, the innermost; or empty."""
  parts = (part.partition("#") for part in reversed(path.split("/")))
  return next((label for name, _, label in parts if name == AUTOCAST), "")


@functools.lru_cache(maxsize=1 << 16)
def in_region(path: str) -> bool:
  """Returns whether a marked path is in a region of `half_precision`."""
  return any(_unnumbered(part) == HALF_PRECISION for part in path.split("/"))


@once_for_each
def has_region(jaxpr: Jaxpr) -> bool:
  """Returns whether an equation of a jaxpr, at any depth, is in a region of `half_precision`."""
  return any(in_region(marked_path(e)) or any(map(has_region, bodies_of(e))) for e in jaxpr.eqns)


def at_region_edge(path: str) -> bool:
  """Returns whether a marked path belongs to the casts where a region begins or ends, or to their sums."""
  return REGION_EDGE in path.split("/")


def _unnumbered(scope: str) -> str:
  return scope.partition("#")[0]


def inside(outer: str, path: str) -> str:
  """Returns the path of an equation in a body, from the call's path."""
  return "/".join(filter(None, (outer, path)))


def backward_depth(equation: JaxprEqn) -> int:
  """Returns the number of backward passes around an equation."""
  return _scopes(equation).transforms.count("transpose")


def phase_of(equation: JaxprEqn) -> str:
  """Returns FORWARD or BACKWARD pass of a derivative, or OTHER, as far as the equation itself shows."""
  return _scopes(equation).phase


def is_recomputation(equation: JaxprEqn) -> bool:
  """Returns whether a backward pass runs an equation to recompute what the forward pass did not save."""
  return any("rematted_computation" in run for run in _scopes(equation).runs)


def operation_name(equation: JaxprEqn) -> str:
  """Returns the name of the function that a call runs, `softmax`; otherwise the primitive's name."""
  name = equation.params.get("name")
  if not name and "call_jaxpr" in equation.params:
    name = _compat.function_name(equation.params["call_jaxpr"])
  return str(name) if name and str(name).isidentifier() else equation.primitive.name


@contextlib.contextmanager
def as_traced(equation: JaxprEqn, leave_out: int = 0) -> Iterator[None]:
  """Gives new equations an equation's source line, scope and context.

  `leave_out` is the number of scopes, from the outermost on, that the caller has entered already.
  """
  info = equation.source_info
  stack = source_info_util.current_name_stack() + scopes_inside(equation, leave_out)
  with source_info_util.user_context(info.traceback, name_stack=stack), _compat.context_of(equation):
    yield


def scopes_inside(equation: JaxprEqn, depth: int) -> source_info_util.NameStack:
  """Returns an equation's scopes without the first `depth` ones.

  Their information about derivatives stays: it is read from the equation itself.
  """
  return _scopes_inside(equation.source_info.name_stack, depth)


@functools.lru_cache(maxsize=1 << 12)
def _scopes_inside(stack: source_info_util.NameStack, depth: int) -> source_info_util.NameStack:
  left = [s.name for s in stack.stack[:depth] if isinstance(s, _TRANSFORM)]
  inner = source_info_util.new_name_stack()
  for name in (*("transpose",) * left.count("transpose"), *("jvp",) * ("jvp" in left)):
    inner = inner.transform(name)
  return inner + stack[depth:]


def scopes_of(equation: JaxprEqn, depth: int) -> contextlib.AbstractContextManager[None]:
  """Enters the first `depth` scopes of an equation."""
  stack = source_info_util.current_name_stack() + equation.source_info.name_stack[:depth]
  return source_info_util.set_name_stack(stack)


@functools.cache
def is_library(file: str) -> bool:
  """Returns whether a file belongs to JAX, a library on top of it or this package, not to the user."""
  path = pathlib.Path(file)
  if path.is_relative_to(_OWN):
    return not path.is_relative_to(_OWN / "zoo")
  parts = path.parts
  return "site-packages" in parts and parts[parts.index("site-packages") + 1] in _LIBRARIES


def source_line(equation: JaxprEqn) -> str:
  """Returns file and line of the user's program where an equation was traced, `model.py:31`; may be empty."""
  return _line_of(equation.source_info.traceback)


@functools.lru_cache(maxsize=1 << 12)
def _line_of(traceback: Any) -> str:
  for file, line, _ in _compat.user_frames(traceback):
    if not is_library(file):
      return f"{pathlib.Path(file).name}:{line}"
  return ""


def transform_place(equation: JaxprEqn) -> tuple[str, str]:
  """Returns the optax transform that an equation belongs to, `scale_by_adam`, and its line in a user's file.

  A transform has the name of the function that makes its `update`. Both are empty outside a transform, and
  inside this package, which calls the optimiser: the caller of this package is another function of the
  user's.
  """
  name = where = ""
  for file, line, function in _compat.user_frames(equation.source_info.traceback):
    if pathlib.Path(file).is_relative_to(_OWN):
      break
    found = _UPDATE.search(function)
    if found and found[1] not in _AROUND_UPDATES:
      name = name or found[1]
    where = where or ("" if is_library(file) else f"{pathlib.Path(file).name}:{line}")
  return name, where
