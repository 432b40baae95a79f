"""Places of equations in a program, the equations to compute, and the last read of each value."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

from mpjax._types import Jaxpr, JaxprEqn, Var
from mpjax.jaxpr import (
  BACKWARD,
  inside,
  last_reads,
  live,
  module_path,
  phase_of,
  source_line,
  transform_place,
)
from mpjax.numerics.nonfinite._origins import Iteration


@dataclasses.dataclass(frozen=True)
class Place:
  """The place of an equation in the program.

  Attributes:
    of_loss: for each of its results, whether the loss depends on it.
    of_optimizer: whether the program is an optimiser, whose modules are its transforms.
  """

  module: str = ""
  line: str = ""
  transposed: bool = False
  iterations: tuple[Iteration, ...] = ()
  of_loss: tuple[bool, ...] = ()
  of_optimizer: bool = False

  def at(self, equation: JaxprEqn, of_loss: Sequence[bool]) -> Place:
    """Returns the place of an equation in the body at this place."""
    if self.of_optimizer:
      module, line = transform_place(equation)
      module = module or self.module
    else:
      module, line = inside(self.module, module_path(equation)), source_line(equation)
    return Place(
      module,
      line or self.line,
      self.transposed or phase_of(equation) == BACKWARD,
      self.iterations,
      tuple(of_loss),
      self.of_optimizer,
    )

  def in_iteration(self, index: int, length: int | None, micro_batch: bool = False) -> Place:
    """Returns this place in one iteration of the loop."""
    return dataclasses.replace(self, iterations=(*self.iterations, Iteration(index, length, micro_batch)))


class EvaluationOrder(NamedTuple):
  """The equations of a jaxpr to compute, in order.

  Attributes:
    equations: the equations that a result depends on.
    last: for each equation, the variables that nothing reads after it.
    read: the variables that an equation or a result reads.
    of_loss: the variables that the loss depends on.
  """

  equations: list[JaxprEqn]
  last: list[list[Var]]
  read: set[Var]
  of_loss: set[Var]


def evaluation_order(jaxpr: Jaxpr, of_loss: tuple[bool, ...]) -> EvaluationOrder:
  """Returns the equations of a jaxpr to compute; `of_loss` flags the results that the loss depends on."""
  equations, read = live(jaxpr, effects=False)
  last = last_reads([equation.invars for equation in equations], jaxpr.outvars)
  return EvaluationOrder(equations, last, read, live(jaxpr, of_loss, effects=False).variables)
