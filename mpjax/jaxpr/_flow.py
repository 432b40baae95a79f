"""The only solver of facts about a program's values: forward or backward, into bodies and around loops.

An analysis defines how an equation transforms facts. The solver knows which equations are live and which
operand each input of a body comes from, and repeats loops until nothing changes.
"""

from __future__ import annotations

import abc
import functools
import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import Generic, NamedTuple, TypeAlias, TypeVar, cast

from mpjax._types import AnyJaxpr, Atom, Jaxpr, JaxprEqn, Var
from mpjax.jaxpr._bodies import (
  CallLayout,
  call_layout,
  constants_of,
  is_variable,
  once_for_each,
  open_jaxpr,
  variables_of,
)
from mpjax.jaxpr._primitives import call_kind

F = TypeVar("F")
# The calls around a body, outermost first, each with the number of its body.
Calls: TypeAlias = tuple[tuple[JaxprEqn, int], ...]


class Live(NamedTuple):
  """The part of a jaxpr that matters.

  Attributes:
    equations: in the order of the program.
    variables: the variables that the outputs or these equations read.
  """

  equations: list[JaxprEqn]
  variables: set[Var]


def live(jaxpr: Jaxpr, outputs: Sequence[bool] | None = None, *, effects: bool = True) -> Live:
  """Returns the part of a jaxpr that its outputs need.

  Args:
    jaxpr: an open jaxpr.
    outputs: which of its outputs; all by default.
    effects: also keep equations with an effect, and what they need.
  """
  chosen = outputs if outputs is not None else [True] * len(jaxpr.outvars)
  read = set(variables_of(v for v, flag in zip(jaxpr.outvars, chosen, strict=True) if flag))
  kept = []
  for equation in reversed(jaxpr.eqns):
    if (effects and equation.effects) or not read.isdisjoint(equation.outvars):
      kept.append(equation)
      read.update(variables_of(equation.invars))
  return Live(kept[::-1], read)


@once_for_each
def live_equations(jaxpr: Jaxpr) -> list[JaxprEqn]:
  """Returns the equations of an open jaxpr that its outputs or effects need."""
  return live(jaxpr).equations


class Facts(Generic[F]):
  """The facts about the values of one body of a program, and about the bodies of its calls.

  Attributes:
    jaxpr: the body.
    calls: the calls around it.
    equations: the live equations.
  """

  def __init__(self, jaxpr: Jaxpr, calls: Calls, analysis: _Analysis[F]):
    self.jaxpr = jaxpr
    self.calls = calls
    self.equations = live_equations(jaxpr)
    self._analysis = analysis
    self._of: dict[Var, F] = {}
    self._inner: dict[tuple[JaxprEqn, int], Facts[F]] = {}

  def __getitem__(self, atom: Atom) -> F:
    """Returns the fact about a variable or literal of the body."""
    return self._of[atom] if is_variable(atom) and atom in self._of else self._analysis.start(atom)

  def inside(self, equation: JaxprEqn, i: int = 0) -> Facts[F] | None:
    """Returns the facts about the i-th body of a call; `None` if it is not entered."""
    return self._inner.get((equation, i))

  def everywhere(self) -> Iterator[Facts[F]]:
    """Yields these facts, and the facts about bodies at any depth."""
    yield self
    for inner in self._inner.values():
      yield from inner.everywhere()

  @property
  def inputs(self) -> list[F]:
    """Facts about the inputs."""
    return [self[v] for v in self.jaxpr.invars]

  @property
  def outputs(self) -> list[F]:
    """Facts about the outputs."""
    return [self[atom] for atom in self.jaxpr.outvars]

  def _join(self, atoms: Iterable[Atom], facts: Iterable[F]) -> None:
    for atom, fact in zip(atoms, facts, strict=True):
      if is_variable(atom):
        self._of[atom] = self._analysis.join(self._of[atom], fact) if atom in self._of else fact


class _Analysis(abc.ABC, Generic[F]):
  """What facts are, for both directions.

  Attributes:
    nothing: the fact about a value that nothing flows into.
    backward: whether facts flow from results to operands.
  """

  nothing: F
  backward = False

  @abc.abstractmethod
  def transfer(self, equation: JaxprEqn, known: list[F], calls: Calls) -> Sequence[F]:
    """Returns the facts about an equation's results, from those about its operands.

    Backward: what it adds to the facts about its operands, from those about its results.
    """

  @abc.abstractmethod
  def enter(
    self, equation: JaxprEqn, layout: CallLayout, known: Sequence[F], calls: Calls = ()
  ) -> tuple[list[Facts[F]], Sequence[F]]:
    """Returns the facts about the bodies of a call, and what `transfer` does."""

  def start(self, atom: Atom) -> F:
    """Returns the fact about an atom before anything flows into it."""
    return self.nothing

  def constant(self, variable: Var, value: object) -> F:
    """Returns the fact about a constant that a body is closed over, from its value."""
    return self.start(variable)

  def join(self, a: F, b: F) -> F:
    """Returns the fact about a value with both facts: their union, if they are Booleans, flags or sets."""
    return cast(F, operator.or_(a, b))

  def enters(self, equation: JaxprEqn) -> bool:
    """Returns whether facts flow through an equation's bodies; if not, it is treated as any other."""
    return call_kind(equation) is not None

  def solve(self, jaxpr: AnyJaxpr, given: Sequence[F], calls: Calls = ()) -> Facts[F]:
    """Returns the facts about a program.

    Args:
      jaxpr: the program.
      given: facts about its inputs; backward, what to add to the facts about its outputs.
      calls: the calls around it.
    """
    body = open_jaxpr(jaxpr)
    facts = Facts(body, calls, self)
    facts._join(body.outvars if self.backward else body.invars, given)
    if not self.backward:
      constants = zip(body.constvars, constants_of(jaxpr), strict=False)
      facts._of.update((v, self.constant(v, value)) for v, value in constants)
    for equation in reversed(facts.equations) if self.backward else facts.equations:
      atoms: Sequence[Sequence[Atom]] = (equation.invars, equation.outvars)
      read, made = atoms[::-1] if self.backward else atoms
      known = [facts[atom] for atom in read]
      layout = call_layout(equation) if self.enters(equation) else None
      if layout is None or not layout.bodies:
        found = self.transfer(equation, known, calls)
      else:
        bodies, found = self.enter(equation, layout, known, calls)
        facts._inner.update(((equation, i), inner) for i, inner in enumerate(bodies))
      facts._join(made, found)
    return facts


class Forward(_Analysis[F]):
  """Facts about a value that follow from its inputs. `start` is for literals and constants of a jaxpr."""

  def row(self, fact: F) -> F:
    """Returns the fact about the row that one step of a `scan` reads, from the fact about the array."""
    return fact

  def stacked(self, fact: F) -> F:
    """Returns the fact about the array that a `scan` stacks, from the fact about one step's result."""
    return fact

  def after_loop(self, result: Var, fact: F, calls: Calls) -> F:
    """Returns the fact about the final carry of a loop, from the fact about it at any step."""
    return fact

  def chosen(self, result: F, choice: F) -> F:
    """Returns the fact about a result that depends on a choice: a `cond`'s index, a `while`'s condition."""
    return result

  def enter(
    self, equation: JaxprEqn, layout: CallLayout, operands: Sequence[F], calls: Calls = ()
  ) -> tuple[list[Facts[F]], Sequence[F]]:
    entering = list(operands)
    for k in layout.rows or ():
      entering[k] = self.row(entering[k])
    while True:
      bodies = [
        self.solve(body.jaxpr, [entering[k] for k in body.operands], (*calls, (equation, i)))
        for i, body in enumerate(layout.bodies)
      ]
      outs = [inner.outputs for inner, body in zip(bodies, layout.bodies, strict=True) if not body.decides]
      left = functools.reduce(lambda a, b: list(map(self.join, a, b)), outs)
      around = [self.join(entering[k], left[i]) for i, k in enumerate(layout.carry)]
      if around == entering[layout.carry.start : layout.carry.stop]:
        break
      entering[layout.carry.start : layout.carry.stop] = around
    n = len(layout.carry)
    carry = [self.after_loop(*pair, calls) for pair in zip(equation.outvars[:n], around, strict=True)]
    results = [*carry, *(left[n:] if layout.rows is None else map(self.stacked, left[n:]))]
    choices = [inner.outputs[0] for inner, body in zip(bodies, layout.bodies, strict=True) if body.decides]
    choices += [operands[layout.choice]] if layout.choice is not None else []
    for choice in choices:
      results = [self.chosen(fact, choice) for fact in results]
    return bodies, results


class Backward(_Analysis[F]):
  """Facts about a value that follow from its uses. `start` is for a value that nothing reads."""

  backward = True

  def choice(self, equation: JaxprEqn, results: list[F], calls: Calls) -> F:
    """Returns what a call's results add to the fact about the operand that decides them (see `chosen`)."""
    return self.nothing

  def enter(
    self, equation: JaxprEqn, layout: CallLayout, results: Sequence[F], calls: Calls = ()
  ) -> tuple[list[Facts[F]], list[F]]:
    leaving = list(results)
    while True:
      choice = self.choice(equation, leaving, calls)
      bodies = [
        self.solve(body.jaxpr, [choice] if body.decides else leaving, (*calls, (equation, i)))
        for i, body in enumerate(layout.bodies)
      ]
      found = [self.nothing] * len(equation.invars)
      for inner, body in zip(bodies, layout.bodies, strict=True):
        for k, fact in zip(body.operands, inner.inputs, strict=True):
          found[k] = self.join(found[k], fact)
      around = [self.join(leaving[i], found[k]) for i, k in enumerate(layout.carry)]
      if around == leaving[: len(around)]:
        break
      leaving[: len(around)] = around
    found[layout.carry.start : layout.carry.stop] = around  # a loop may run zero times
    if layout.choice is not None:
      found[layout.choice] = choice
    return bodies, found


class _Needed(Backward[bool]):
  """Whether an output depends on a value."""

  nothing = False

  def transfer(self, equation: JaxprEqn, results: list[bool], calls: Calls) -> list[bool]:
    return [any(results)] * len(equation.invars)

  def choice(self, equation: JaxprEqn, results: list[bool], calls: Calls) -> bool:
    return any(results)


class _Computed(Forward[bool]):
  """Whether a value depends on an input."""

  nothing = False

  def transfer(self, equation: JaxprEqn, operands: list[bool], calls: Calls) -> list[bool]:
    return [any(operands)] * len(equation.outvars)

  def chosen(self, result: bool, choice: bool) -> bool:
    return result or choice


def needed(jaxpr: AnyJaxpr, outputs: Sequence[bool]) -> Facts[bool]:
  """Returns which values of a jaxpr, and of its bodies, some of its outputs depend on."""
  return _Needed().solve(jaxpr, outputs)


def outputs_of(jaxpr: AnyJaxpr, inputs: Sequence[bool]) -> list[bool]:
  """Returns which outputs of a jaxpr depend on some of its inputs."""
  return _Computed().solve(jaxpr, inputs).outputs
