"""The rules that autocast decides by, and a memory of what it has found out about jaxprs."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Hashable, Iterable, Mapping

import numpy as np
from jax.extend.core import Primitive

from mpjax._policy_text import brief
from mpjax._types import AnyJaxpr, Jaxpr, JaxprEqn, PolicyLike, Var
from mpjax.casting._kinds import castable
from mpjax.casting._op_lists import OpLists
from mpjax.casting._overrides import Overrides
from mpjax.fp8._recipe import Recipe
from mpjax.jaxpr import Trait, alignment, bodies_of, call_kind, facts, has, is_variable, open_jaxpr
from mpjax.patterns import component_regex
from mpjax.policy import Policy

RECOMPUTE = ("islands", "dots", "nothing")


class Sites:
  """Names for the histories of delayed scaling: the module path, and a number where it has several weights.

  Attributes:
    recipes: the recipe of each, by name.
  """

  def __init__(self) -> None:
    self.recipes: dict[str, Recipe] = {}
    self._numbers = itertools.count()
    self._names: dict[tuple[str, Hashable], str] = {}
    self._weights: dict[str, int] = {}

  def name(self, path: str, weight: Hashable, recipe: Recipe) -> str:
    """Returns the name for a product with a weight (what identifies it), in a module."""
    if (path, weight) not in self._names:
      i = self._weights.get(path, 0)
      self._weights[path] = i + 1
      self._names[path, weight] = f"{path}:{i}" if i else path or ":0"
    name = self._names[path, weight]
    self.recipes[name] = recipe
    return name

  def next_number(self) -> int:
    """Returns a number for a product, in the order in which they are decided about."""
    return next(self._numbers)


@dataclasses.dataclass
class CastingRules:
  """The rules that autocast decides by.

  Attributes:
    ops: the lists.
    overrides: the policies by module.
    accum_dtype: dtype that matrix products accumulate in and return, or `None`.
    recompute: what the backward pass computes again, of `RECOMPUTE`.
    islands: whether there are islands: not inside a checkpoint of the user's.
    enter_all: whether the bodies of calls that run whole in float32 are decided about, too, for `explain`.
    products: module paths of the products that an FP8 recipe decided on.
    sites: what the FP8 products under delayed scaling keep their histories under.
  """

  ops: OpLists
  overrides: Overrides
  accum_dtype: np.dtype | None
  recompute: str = "islands"
  islands: bool = True
  enter_all: bool = False
  products: set[str] = dataclasses.field(default_factory=set)
  sites: Sites = dataclasses.field(default_factory=Sites)
  _contents: dict[int, tuple[Jaxpr, frozenset[Primitive]]] = dataclasses.field(default_factory=dict)
  _feeding: dict[int, tuple[Jaxpr, set[Var]]] = dataclasses.field(default_factory=dict)

  def list_of(self, name: str, half: np.dtype | None) -> str:
    """Returns the list that a primitive is on where `half` is the compute dtype."""
    return self.ops.of(name, half or self.overrides.any_half)

  def computes_again(self, path: str) -> bool:
    """Returns whether float32 islands of a module are computed again in the backward pass."""
    return self.islands and (self.overrides.recompute_at(path) or self.recompute) != "nothing"

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

  def contents(self, jaxpr: AnyJaxpr) -> frozenset[Primitive]:
    """Returns the primitives in a jaxpr, at any depth; not those inside opaque ones."""
    body = open_jaxpr(jaxpr)
    if id(body) not in self._contents:
      found: set[Primitive] = set()
      for equation in body.eqns:
        found.add(equation.primitive)
        if self.list_of(equation.primitive.name, None) == "call":
          found.update(*(self.contents(inner) for inner in bodies_of(equation)))
      self._contents[id(body)] = (body, frozenset(found))
    return self._contents[id(body)][1]

  def primitives(self, equations: Iterable[JaxprEqn]) -> set[Primitive]:
    """Returns the primitives of equations, those in their bodies too."""
    found = set()
    for equation in equations:
      found.add(equation.primitive)
      found.update(*(self.contents(body) for body in bodies_of(equation)))
    return found

  def inside(self, equation: JaxprEqn, half: np.dtype | None) -> set[str]:
    """Returns the lists of what is in an equation's bodies."""
    return {self.list_of(p.name, half) for body in bodies_of(equation) for p in self.contents(body)}

  def cheap(self, equation: JaxprEqn) -> bool:
    """Returns whether an equation may be computed again in the backward pass rather than saved."""
    inside = {equation.primitive}
    if self.list_of(equation.primitive.name, None) == "call":
      kind = call_kind(equation)
      if kind is None or not kind.runs_once:
        return False
      inside = set().union(*(self.contents(body) for body in bodies_of(equation)))
    plain = (p for p in inside if self.list_of(p.name, None) != "call")
    return all(facts(p).recompute for p in plain) and not equation.effects

  def feeding(self, jaxpr: AnyJaxpr) -> set[Var]:
    """Returns the variables of a jaxpr that a matrix product reads, directly or by views."""
    body = open_jaxpr(jaxpr)
    if id(body) not in self._feeding:
      found: set[Var] = set()
      for equation in reversed(body.eqns):
        kind = self.list_of(equation.primitive.name, None)
        passes_on = has(equation, Trait.PASSES_ON)
        if kind == "allow" or (passes_on and any(v in found for v in equation.outvars)):
          found.update(v for v in equation.invars if is_variable(v) and castable(v.aval))
        elif kind == "call":
          for inner, indices in alignment(equation):
            within = self.feeding(inner)
            pairs = zip(open_jaxpr(inner).invars, indices, strict=True)
            operands = (equation.invars[i] for v, i in pairs if v in within)
            found.update(v for v in operands if is_variable(v) and castable(v.aval))
      self._feeding[id(body)] = (body, found)
    return self._feeding[id(body)][1]


def require_recompute(recompute: str) -> str:
  """Returns `recompute`.

  Raises:
    ValueError: unless it is one that `autocast` takes.
  """
  if recompute not in RECOMPUTE:
    raise ValueError(f"recompute={recompute!r}: expected one of {', '.join(RECOMPUTE)}")
  return recompute


def make_rules(
  policy: Policy,
  ops: OpLists | None,
  overrides: Mapping[str, PolicyLike] | None,
  recompute: str = "islands",
) -> CastingRules:
  """Returns what decides, from autocast's arguments.

  Raises:
    ValueError: for what is not understood, and for FP8 products that would not run in half precision.
  """
  if policy.fp8 and policy.compute_dtype.itemsize != 2:
    raise ValueError(
      f"fp8={brief(policy.fp8)!r} with compute_dtype={policy.compute_dtype.name!r}: FP8 products are those "
      "that would run in half precision, and give that; use compute_dtype bfloat16, as base: fp8 does"
    )
  resolved = Overrides(policy, overrides)
  return CastingRules(ops or OpLists.default(), resolved, policy.accum_dtype, require_recompute(recompute))
