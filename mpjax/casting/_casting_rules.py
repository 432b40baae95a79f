"""The rules that autocast decides by: lists of primitives, and settings by module path."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Hashable, Iterable, Mapping
from typing import Any, TypeVar

import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive

from mpjax._gone import instead
from mpjax._types import DTypeLike, Jaxpr, JaxprEqn, PolicyLike
from mpjax.dtypes import one_of
from mpjax.fp8 import Recipe, on_device
from mpjax.jaxpr import (
  FULL_PRECISION,
  Forward,
  bodies_of,
  call_kind,
  equations_in,
  facts,
  open_jaxpr,
  rows,
  without_marks,
)
from mpjax.patterns import component_regex
from mpjax.policy import Override, Policy, brief, parse_overrides

F = TypeVar("F")
RECOMPUTE = ("islands", "nothing")


@dataclasses.dataclass(frozen=True)
class OpLists:
  """The lists that autocast decides by: sets of primitive names, as `jax.make_jaxpr` prints them.

  ```python
  ops = mpjax.OpLists.default()
  ops = ops.replace(deny=ops.deny | {"tanh"})
  loss = mpjax.autocast(loss_fn, "bf16", ops=ops)
  ```

  Attributes:
    allow: run in the policy's compute dtype (matrix products, convolutions).
    deny: run in float32.
    deny_float16: run in float32 if the compute dtype is float16, and follow their inputs in bfloat16,
      which has float32's range.
    infer: follow their inputs.
    opaque: left in the dtypes of the user's program, like a primitive on no list.
    call: higher-order primitives, whose bodies are entered.
  """

  allow: frozenset[str]
  deny: frozenset[str]
  deny_float16: frozenset[str]
  infer: frozenset[str]
  opaque: frozenset[str]
  call: frozenset[str]

  def __post_init__(self) -> None:
    for field in _FIELDS:
      names = getattr(self, field)
      if isinstance(names, str) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"{field}={names!r}: expected names of primitives, such as {{'dot_general'}}")
      object.__setattr__(self, field, frozenset(names))
    for one, other in itertools.combinations(_FIELDS, 2):
      for name in getattr(self, one) & getattr(self, other):
        raise ValueError(f"primitive {name!r} is on two lists, {one} and {other}")

  @classmethod
  def default(cls) -> OpLists:
    """Returns the lists of `mpjax/jaxpr/_primitive_table.py`, which gives the reason for each."""
    lists: dict[str, set[str]] = {field: set() for field in _FIELDS}
    for name, row in rows():
      lists["deny_float16" if row.float16 == "deny" else row.list].add(name)
    return cls(**{field: frozenset(names) for field, names in lists.items()})

  def replace(self, **lists: Iterable[str]) -> OpLists:
    """Returns a copy with some lists replaced; a name moves from its old list to the new one.

    `ops.replace(deny=ops.deny | {"tanh"})` adds to a list. A name that is removed from its list goes to
    `infer`.

    Raises:
      ValueError: for an unknown list or name, or a name on two lists.
    """
    for field, names in lists.items():
      if field not in _FIELDS:
        raise ValueError(f"unknown list {field!r}: {one_of(field, _FIELDS)}")
      if isinstance(names, str):
        raise ValueError(f"{field}={names!r}: expected a set of names of primitives, such as {{{names!r}}}")
    new = {field: frozenset(names) for field, names in lists.items()}
    given: frozenset[str] = frozenset().union(*new.values())
    result = {field: new.get(field, getattr(self, field) - given) for field in _FIELDS}
    result["infer"] |= self._by_name.keys() - frozenset().union(*result.values())
    return OpLists(**result)

  @functools.cached_property
  def _by_name(self) -> dict[str, str]:
    """The list of each name."""
    return {name: field for field in _FIELDS for name in getattr(self, field)}

  def of(self, primitive: str, dtype: DTypeLike) -> str:
    """Returns the list that a primitive is on: allow, deny, infer, opaque or call.

    Args:
      primitive: its name.
      dtype: the compute dtype.
    """
    field = self._by_name.get(primitive, "opaque")
    if field == "deny_float16":
      return "deny" if np.dtype(dtype) == np.float16 else "infer"
    return field

  @functools.cached_property
  def changed(self) -> set[str]:
    """The names of primitives that are on another list than by default."""
    return {name for name, _ in self._by_name.items() ^ OpLists.default()._by_name.items()}


_FIELDS = tuple(field.name for field in dataclasses.fields(OpLists))


class Overrides:
  """The settings of each module: the policy's, changed by the first override that matches.

  A regex must match whole components of the path, anywhere in it: `head` matches `GPT/head` and the paths
  below it, not `GPT/header`.

  Args:
    policy: its settings apply if no override matches, and its own overrides come last.
    overrides: more overrides, tried first; what `mpjax.policy.parse_overrides` takes, or `None`.

  Attributes:
    halves: the half dtypes in use, each once, in the order of the settings; `None` for float32.
    any_half: a half dtype that is in use, bfloat16 if none is.
    nothing_to_do: whether everything computes in float32, whatever the paths.
  """

  def __init__(self, policy: Policy, overrides: Mapping[str, Any] | None):
    dtype = policy.compute_dtype if policy.compute_dtype.itemsize <= 4 else np.dtype("float32")
    self._default = Override(dtype, policy.fp8 is not None and dtype.itemsize == 2)
    self._asked = policy.fp8
    self._rules = []
    for pattern, override in [*parse_overrides(overrides or ()), *policy.overrides]:
      given = {key: value for key, value in vars(override).items() if value is not None}
      self._rules.append((pattern, component_regex(pattern), dataclasses.replace(self._default, **given)))
    self._settings = [self._default, *(settings for _, _, settings in self._rules)]
    self.halves = list(dict.fromkeys(map(_half, self._settings)))
    self.any_half = next(filter(None, self.halves), np.dtype(jnp.bfloat16))
    self.nothing_to_do = self.halves[0] is None and not self._rules
    self._resolved: dict[str, Override] = {}
    self._matched: set[str] = set()

  @functools.cached_property
  def _recipe(self) -> Recipe:
    """The policy's recipe; `auto` is what it is on this device."""
    return on_device(self._asked or Recipe())

  @property
  def key(self) -> Hashable:
    """A key that is equal for overrides of one policy with the same choices."""
    return tuple((pattern, settings) for pattern, _, settings in self._rules)

  @property
  def recipes(self) -> set[Recipe]:
    """The FP8 recipes in use: none, or the policy's."""
    return {self._recipe} if any(settings.fp8 for settings in self._settings) else set()

  def half_at(self, path: str) -> np.dtype | None:
    """Returns the half dtype that a module computes in; `None` for float32."""
    return _half(self.at(path))

  def is_set(self, path: str) -> bool:
    """Returns whether an override matches a module."""
    return self.at(path) is not self._default

  def recipe_at(self, path: str) -> Recipe | None:
    """Returns the FP8 recipe of a module's matrix products; `None` for none."""
    return self._recipe if self.at(path).fp8 else None

  def check_all_matched(self) -> None:
    """Raises `ValueError` for a regex that matched no path, and lists the paths."""
    for pattern, *_ in self._rules:
      if pattern not in self._matched:
        paths = sorted({without_marks(path) for path in self._resolved} - {""})
        shown = ", ".join(paths[:40]) + (f", and {len(paths) - 40} more" if len(paths) > 40 else "")
        raise ValueError(
          f"policy override {pattern!r} matches no module path; paths: "
          + (shown or "none: name regions with jax.named_scope, or pass an nnx.Module as an argument")
        )

  def at(self, path: str) -> Override:
    """Returns the settings of a module."""
    if path not in self._resolved:
      found = [rule for rule in self._rules if rule[1].search(without_marks(path))]
      self._matched |= {pattern for pattern, *_ in found}
      settings = found[0][2] if found else self._default
      self._resolved[path] = _IN_FULL_PRECISION if FULL_PRECISION in path.split("/") else settings
    return self._resolved[path]


_IN_FULL_PRECISION = Override(np.dtype("float32"))


def _half(settings: Override) -> np.dtype | None:
  dtype = settings.compute_dtype
  return None if dtype is None or dtype.itemsize >= 4 else dtype


@dataclasses.dataclass(frozen=True, eq=False)
class CastingRules:
  """The rules that autocast decides by, and facts about jaxprs that they have found.

  Attributes:
    ops: the user's lists; `None` for the default ones.
    overrides: the policies by module.
    accum_dtype: dtype that matrix products accumulate in and return, or `None`.
    wide_gradients: whether gradients of float32 values are float32 from their product on.
    recompute: what the backward pass recomputes, one of `RECOMPUTE`.
  """

  ops: OpLists | None
  overrides: Overrides
  accum_dtype: np.dtype | None
  wide_gradients: bool = True
  recompute: str = "islands"
  _contents: dict[Jaxpr, frozenset[Primitive]] = dataclasses.field(default_factory=dict)
  found_in_loops: dict[JaxprEqn, Any] = dataclasses.field(default_factory=dict)

  def list_of(self, primitive: Primitive, half: np.dtype | None = None) -> str:
    """Returns the list that a primitive is on if `half` is the compute dtype.

    The user's changes apply by name. Otherwise the primitive itself counts: another library's primitive of
    the same name is unknown.
    """
    half = half or self.overrides.any_half
    if self.ops is not None and primitive.name in self.ops.changed:
      return self.ops.of(primitive.name, half)
    return facts(primitive).list_in(half)

  def computes_again(self, path: str) -> bool:
    """Returns whether the backward pass recomputes float32 islands of a module."""
    return (self.overrides.at(path).recompute or self.recompute) != "nothing"

  def inside(self, equation: JaxprEqn) -> set[Primitive]:
    """Returns the primitives in an equation's bodies, at any depth, without those inside opaque ones."""
    found: set[Primitive] = set()
    for body in map(open_jaxpr, bodies_of(equation)):
      if body not in self._contents:
        is_call = lambda equation: self.list_of(equation.primitive) == "call"
        self._contents[body] = frozenset(e.primitive for e in equations_in(body, is_call))
      found |= self._contents[body]
    return found

  def primitives(self, equations: Iterable[JaxprEqn]) -> set[Primitive]:
    """Returns the primitives of equations, including their bodies."""
    return set().union(*({equation.primitive} | self.inside(equation) for equation in equations))

  def may_recompute(self, equation: JaxprEqn) -> bool:
    """Returns whether the backward pass may recompute an equation instead of saving its result."""
    inside = {equation.primitive}
    if self.list_of(equation.primitive) == "call":
      kind = call_kind(equation)
      if kind is None or not kind.runs_once:
        return False
      inside = {p for p in self.inside(equation) if self.list_of(p) != "call"}
    return all(facts(p).recompute for p in inside) and not equation.effects


class ByRules(Forward[F]):
  """A forward analysis that enters the calls that autocast enters, for every policy."""

  def __init__(self, rules: CastingRules):
    self._rules = rules

  def enters(self, equation: JaxprEqn) -> bool:
    return self._rules.list_of(equation.primitive) == "call"


def require_recompute(recompute: str) -> str:
  """Returns `recompute`; raises `ValueError` if `autocast` does not take it."""
  if recompute not in RECOMPUTE:
    raise ValueError(
      f"recompute={recompute!r}: expected {' or '.join(RECOMPUTE)}{instead(recompute, 'recompute')}"
    )
  return recompute


def make_rules(
  policy: Policy,
  ops: OpLists | None = None,
  overrides: Mapping[str, PolicyLike] | None = None,
  recompute: str = "islands",
) -> CastingRules:
  """Returns the rules for autocast's arguments.

  Raises:
    ValueError: for an invalid argument, for FP8 products that would not run in half precision, and for a
      `grad_dtype` that products cannot return.
  """
  if policy.fp8 and policy.compute_dtype.itemsize != 2:
    raise ValueError(
      f"fp8={brief(policy.fp8)!r} with compute_dtype={policy.compute_dtype.name!r}: FP8 products replace "
      "half-precision products, and return half precision; use compute_dtype bfloat16, as base: fp8 does"
    )
  wide_gradients = policy.grad_dtype is None or policy.grad_dtype.itemsize == 4
  if policy.grad_dtype is not None and not wide_gradients and policy.grad_dtype != policy.compute_dtype:
    raise ValueError(
      f"grad_dtype={policy.grad_dtype.name!r} with compute_dtype={policy.compute_dtype.name!r}: gradients of "
      f"parameters come from matrix products in float32 or in {policy.compute_dtype.name}; choose one"
    )
  by_module = Overrides(policy, overrides)
  if not wide_gradients and by_module.recipes:
    raise ValueError(
      f"grad_dtype={policy.compute_dtype.name!r} with FP8: an FP8 product gives the gradient of a float32 "
      "parameter in float32; leave grad_dtype out"
    )
  return CastingRules(
    ops=ops,
    overrides=by_module,
    accum_dtype=policy.accum_dtype,
    wide_gradients=wide_gradients,
    recompute=require_recompute(recompute),
  )
