"""Where an equation is in a program, which equations count, and when a value is read for the last time."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

from mpjax import _compat
from mpjax._types import Jaxpr, JaxprEqn
from mpjax.casting._overrides import FULL_PRECISION, OUTPUT, join
from mpjax.numerics.nonfinite._origins import Iteration

_MARKS = frozenset({"rematted_computation", "checkpoint", OUTPUT, FULL_PRECISION})


@dataclasses.dataclass(frozen=True)
class Place:
  """Where in the program an equation is.

  Attributes:
    of_loss: which of its results the loss depends on.
  """

  module: str = ""
  line: str = ""
  transposed: bool = False
  iterations: tuple[Iteration, ...] = ()
  of_loss: tuple[bool, ...] = ()

  def at(self, equation: JaxprEqn, of_loss: Sequence[bool]) -> Place:
    """The place of an equation in a body that is here."""
    module = _module(equation)
    inside = module == self.module or module.startswith(self.module + "/")
    return Place(
      module if inside else join(self.module, module),
      _compat.source_line(equation) or self.line,
      self.transposed or "transpose" in _compat.transforms(equation),
      self.iterations,
      tuple(of_loss),
    )

  def turn(self, index: int, length: int | None, micro_batch: bool = False) -> Place:
    """The same in one turn of the loop that is here."""
    return dataclasses.replace(self, iterations=(*self.iterations, Iteration(index, length, micro_batch)))


class Schedule(NamedTuple):
  """What of a jaxpr is computed.

  Attributes:
    equations: those that a result depends on.
    last: for each, the variables that nothing reads after it.
    read: the variables that anything reads.
    of_loss: the variables that the loss depends on.
  """

  equations: list[Any]
  last: list[list[Any]]
  read: set[Any]
  of_loss: set[Any]


def make_schedule(jaxpr: Jaxpr, of_loss: tuple[bool, ...]) -> Schedule:
  """What to compute of a jaxpr, of whose results the loss depends on some."""
  results = [v for v in jaxpr.outvars if _compat.is_variable(v)]
  read = set(results)
  of_loss_ = {v for v, flag in zip(jaxpr.outvars, of_loss, strict=True) if flag and _compat.is_variable(v)}
  kept = []
  for equation in reversed(jaxpr.eqns):
    operands = {v for v in equation.invars if _compat.is_variable(v)}
    if not read.isdisjoint(equation.outvars):
      kept.append((equation, list(operands - read)))
      read |= operands
    if not of_loss_.isdisjoint(equation.outvars):
      of_loss_ |= operands
  kept.reverse()
  return Schedule([equation for equation, _ in kept], [last for _, last in kept], read, of_loss_)


def of_loss_inside(jaxpr: Jaxpr, of_loss: tuple[bool, ...], consts: int, carry: int) -> tuple[bool, ...]:
  """Which results of a `scan`'s body the loss depends on, through later turns too."""
  flags = of_loss
  while True:
    needed = make_schedule(jaxpr, flags).of_loss
    inputs = [v in needed for v in jaxpr.invars[consts : consts + carry]]
    more = (*(a or b for a, b in zip(flags, inputs, strict=False)), *flags[carry:])
    if more == flags:
      return flags
    flags = more


def _module(equation: JaxprEqn) -> str:
  """The path of an equation's module, once where a transformation has repeated it."""
  path: list[str] = []
  for run in _compat.scopes(equation):
    run = [scope for scope in run if scope not in _MARKS]
    path = run if run[: len(path)] == path else [*path, *run]
  return "/".join(path)
