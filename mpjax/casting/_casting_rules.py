"""What autocast decides by, with what it has found out about jaxprs so far."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from jax.extend.core import Primitive

from mpjax import _compat
from mpjax.casting import _higher_order
from mpjax.casting._kinds import castable
from mpjax.casting._op_lists import OpLists
from mpjax.casting._overrides import Overrides
from mpjax.fp8._recipe import Recipe
from mpjax.jaxpr import Trait, call_kind, facts, has
from mpjax.patterns import component_regex


class Sites:
  """Names for the histories of delayed scaling: the module path, and a number where it has several weights.

  Attributes:
    recipes: the recipe of each, by name.
  """

  def __init__(self) -> None:
    self.recipes: dict[str, Recipe] = {}
    self._names: dict[tuple[str, Any], str] = {}
    self._weights: dict[str, int] = {}

  def name(self, path: str, weight: Any, recipe: Recipe) -> str:
    """The name for a product with a weight (what identifies it), in a module."""
    if (path, weight) not in self._names:
      i = self._weights.get(path, 0)
      self._weights[path] = i + 1
      self._names[path, weight] = f"{path}:{i}" if i else path or ":0"
    name = self._names[path, weight]
    self.recipes[name] = recipe
    return name


@dataclasses.dataclass
class Rules:
  """What decides.

  Attributes:
    ops: the lists.
    overrides: the policies by module.
    accum_dtype: dtype that matrix products accumulate in and return, or `None`.
    islands: whether islands are computed again in the backward pass.
    enter_all: plan the bodies of calls that run whole in float32, too, for `explain`.
    products: module paths of the products that an FP8 recipe decided on.
    sites: what the FP8 products under delayed scaling keep their histories under.
  """

  ops: OpLists
  overrides: Overrides
  accum_dtype: Any = None
  islands: bool = True
  enter_all: bool = False
  products: set[str] = dataclasses.field(default_factory=set)
  sites: Sites = dataclasses.field(default_factory=lambda: Sites())
  _contents: dict[int, Any] = dataclasses.field(default_factory=dict)
  _feeding: dict[int, Any] = dataclasses.field(default_factory=dict)

  def list_of(self, name: str, half: Any) -> str:
    """The list that a primitive is on where `half` is the compute dtype."""
    return self.ops.of(name, half or self.overrides.any_half)

  def check_all_matched(self) -> None:
    """Raises `ValueError` for a pattern of an override or a recipe that matched nothing."""
    self.overrides.check_all_matched()
    for recipe in self.overrides.recipes:
      for key in ("include", "exclude"):
        for pattern in getattr(recipe, key):
          if self.products and not any(map(component_regex(pattern).search, self.products)):
            paths = ", ".join(sorted(filter(None, self.products))) or "none"
            raise ValueError(
              f"fp8.{key}: {pattern!r} matches no module with a matrix product; their paths are {paths}"
            )

  def contents(self, jaxpr: Any) -> frozenset[Primitive]:
    """The primitives in a jaxpr, at any depth; not those inside opaque ones."""
    body = _compat.open_jaxpr(jaxpr)
    if id(body) not in self._contents:
      found: set[Primitive] = set()
      for equation in body.eqns:
        found.add(equation.primitive)
        if self.list_of(equation.primitive.name, None) == "call":
          found.update(*(self.contents(inner) for inner in _compat.bodies(equation)))
      self._contents[id(body)] = (body, frozenset(found))
    return self._contents[id(body)][1]

  def primitives(self, equations: Iterable[Any]) -> set[Primitive]:
    """The primitives of equations, those in their bodies too."""
    found = set()
    for equation in equations:
      found.add(equation.primitive)
      found.update(*(self.contents(body) for body in _compat.bodies(equation)))
    return found

  def inside(self, equation: Any, half: Any) -> set[str]:
    """The lists of what is in an equation's bodies."""
    return {self.list_of(p.name, half) for body in _compat.bodies(equation) for p in self.contents(body)}

  def cheap(self, equation: Any) -> bool:
    """Whether an equation may be computed again in the backward pass rather than saved."""
    inside = {equation.primitive}
    if self.list_of(equation.primitive.name, None) == "call":
      kind = call_kind(equation)
      if kind is None or not kind.runs_once:
        return False
      inside = set().union(*(self.contents(body) for body in _compat.bodies(equation)))
    plain = (p for p in inside if self.list_of(p.name, None) != "call")
    return all(facts(p).recompute for p in plain) and not equation.effects

  def feeding(self, jaxpr: Any) -> set[Any]:
    """The variables of a jaxpr that a matrix product reads, directly or by views."""
    body = _compat.open_jaxpr(jaxpr)
    if id(body) not in self._feeding:
      found: set[Any] = set()
      for equation in reversed(body.eqns):
        kind = self.list_of(equation.primitive.name, None)
        passes_on = has(equation, Trait.PASSES_ON)
        if kind == "allow" or (passes_on and any(v in found for v in equation.outvars)):
          found.update(v for v in equation.invars if _compat.is_variable(v) and castable(v.aval))
        elif kind == "call":
          for inner, indices in _higher_order.alignment(equation):
            within = self.feeding(inner)
            pairs = zip(_compat.open_jaxpr(inner).invars, indices, strict=True)
            operands = (equation.invars[i] for v, i in pairs if v in within)
            found.update(v for v in operands if _compat.is_variable(v) and castable(v.aval))
      self._feeding[id(body)] = (body, found)
    return self._feeding[id(body)][1]


def live(jaxpr: Any) -> list[Any]:
  """The equations whose results or effects matter."""
  needed = {v for v in jaxpr.outvars if _compat.is_variable(v)}
  live = []
  for equation in reversed(jaxpr.eqns):
    if equation.effects or any(v in needed for v in equation.outvars):
      live.append(equation)
      needed.update(a for a in equation.invars if _compat.is_variable(a))
  return live[::-1]
