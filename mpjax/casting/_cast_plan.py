"""`CastPlan`: autocast's decisions about a program, frozen, complete before anything is emitted.

`_decide.py` makes one, `_explain.py` prints it, `_emit.py` executes it.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

import numpy as np

from mpjax._types import Array, Jaxpr, JaxprEqn, PyTree, Var
from mpjax.casting._fp8_products import Fp8Product
from mpjax.casting._kinds import Held
from mpjax.casting._reasons import Code
from mpjax.jaxpr import CallKind, backward_depth, in_region
from mpjax.products import has_own_gradients

# Entered if their operands are half precision, even without a product inside.
LOOPS = frozenset((CallKind.SCAN, CallKind.WHILE, CallKind.COND, CallKind.SHARD_MAP))


class Mode(enum.Enum):
  """The ways to execute an equation."""

  HALF = "half"  # in the compute dtype
  FULL = "full"  # in float32
  KEEP = "keep"  # in the dtypes of the user's program
  EACH = "each"  # each operand as it is held
  CAST = "cast"  # the user's own cast
  EDGE = "edge"  # a cast to half precision at the edge of a region, of values that may be outside its range
  ENTER = "enter"  # its bodies are decided, too


@dataclasses.dataclass(frozen=True, eq=False)
class Node:
  """An equation with the decision about it, from its operands, and the way to execute it.

  The way to execute it is known once it is known how all values of its program are held.

  Attributes:
    equation: the equation of the user's program.
    path: its module path.
    listed: the list that decided: allow, deny, infer, opaque or call.
    mode: how to execute it.
    half: the compute dtype of its module; `None` for float32.
    code: the reason.
    outs: how each result is held.
    about: what the reason's sentence tells, such as a size.
    call: for `Mode.ENTER`, its bodies.
    fp8: the quantised product, if it is an FP8 product.
    site: under delayed FP8 scaling, the name of its history, which it also has in half precision.
    reads: the dtype that each operand is read in; `None` for a value that autocast does not cast.
    widened: the operands that are cast to `half` only after their broadcast, so that their gradient is
      summed in float32.
    own_casts: the operands that are cast to `half` only for this use, so that the gradients of several uses
      are added in float32; for a product, those whose gradient it computes in float32 itself.
    result_dtype: the dtype that a product is asked for; `None` for the program's.
    adds_many: whether it is a lookup in half precision, whose gradient is added in float32.
  """

  equation: JaxprEqn
  path: str
  listed: str
  mode: Mode
  half: np.dtype | None
  code: Code
  outs: tuple[Held, ...]
  about: str = ""
  call: Call | None = None
  fp8: Fp8Product | None = None
  site: str | None = None
  reads: tuple[np.dtype | None, ...] = ()
  widened: frozenset[int] = frozenset()
  own_casts: frozenset[int] = frozenset()
  result_dtype: np.dtype | None = None
  adds_many: bool = False

  @property
  def name(self) -> str:
    """The name of its primitive."""
    return self.equation.primitive.name

  @property
  def multiplies(self) -> bool:
    """Whether it is a matrix product, has one in its bodies, or is in a region, which stands for one."""
    return self.listed == "allow" or self.has_product() or in_region(self.path)

  def depths(self) -> list[int]:
    """Returns how deep in backward passes each result was made, also in its bodies."""
    depths = [backward_depth(self.equation)] * len(self.outs)
    for plan in self.call.plans if self.call else ():
      if len(plan.depths) == len(depths):
        depths = list(map(max, depths, plan.depths))
    return depths

  def has_product(self) -> bool:
    """Returns whether a matrix product is in its bodies, at any depth."""
    return self.call is not None and any(plan.has_product for plan in self.call.plans)

  def originals(self) -> dict[int, Var]:
    """Returns the variables whose gradient a product computes in float32 itself, by operand."""
    if self.listed != "allow" or self.fp8 is not None or not has_own_gradients(self.equation):
      return {}
    return {i: cast(Var, self.equation.invars[i]) for i in sorted(self.own_casts)}


class LoopCarry(NamedTuple):
  """How one carry of a loop is held, the same at every step, and the reason."""

  held: Held
  why: str


@dataclasses.dataclass(frozen=True, eq=False)
class Call:
  """A higher-order equation whose bodies are decided.

  Attributes:
    equation: the equation.
    path: its module path.
    half: the compute dtype of its bodies; `None` for float32.
    solver: why that is float32, if it is the body of a solver.
    ins: how its operands are held.
    decide: (number, jaxpr, how its inputs are held) -> the plan of a body. A custom derivative or batching
      rule has the number -1: it does not exist before JAX differentiates or batches. `tangents` and
      `gradients` of a rule: see `Body`.
    plans: the plans of its bodies, in the order of its layout.
    outs: how its results are held.
    carry: the carries of a loop.
  """

  equation: JaxprEqn
  path: str
  half: np.dtype | None
  solver: Code | None
  ins: tuple[Held, ...]
  decide: Callable[..., CastPlan]
  plans: tuple[CastPlan, ...] = ()
  outs: tuple[Held, ...] = ()
  carry: tuple[LoopCarry, ...] = ()


@dataclasses.dataclass(frozen=True, eq=False)
class Island:
  """Float32 equations that are emitted as one checkpoint: the backward pass keeps their inputs.

  Attributes:
    nodes: a convex set of equations, in the order of the program.
    inputs: (variable, dtype) of its inputs.
    outputs: (variable, dtype) of the values that are used outside.
    copies: equations before it that make a value of arguments, such as a transpose; it computes them itself.
    fenced: whether the backward pass reads through an optimisation barrier: then no compiler finds the inside
      equal to the forward pass's, and keeps that in memory.
    saved: the FP8 format in which half-precision inputs are kept for the backward pass; `None`: unchanged.
    loss_of: the product's result that a loss by element is computed from, if the island is one: its gradient
      crosses an optimisation barrier.
    parts: its copies and nodes in an order of execution, if the derivative of some of them, which are an
      island, is computed apart from their results.
  """

  nodes: tuple[Node, ...]
  inputs: tuple[tuple[Var, np.dtype], ...]
  outputs: tuple[tuple[Var, np.dtype], ...]
  copies: tuple[Node, ...] = ()
  fenced: bool = True
  saved: np.dtype | None = None
  loss_of: Var | None = None
  parts: tuple[Node | Island, ...] = ()

  @property
  def units(self) -> tuple[Node | Island, ...]:
    """What it computes, in an order of execution."""
    return self.parts or (*self.copies, *self.nodes)


@dataclasses.dataclass(frozen=True, eq=False)
class CastPlan:
  """A jaxpr with a decision about each of its equations.

  Attributes:
    jaxpr: the open jaxpr.
    inputs: its `constvars` and `invars`.
    nodes: the decisions about the equations whose results are used.
    units: the nodes in the order of their emission, islands as one.
    held: how each variable is held.
    outs: how each output is held.
    depths: how deep in backward passes each output was made.
    has_product: whether it holds a matrix product, at any depth.
  """

  jaxpr: Jaxpr
  inputs: tuple[Var, ...]
  nodes: tuple[Node, ...]
  units: tuple[Node | Island, ...]
  held: Mapping[Var, Held]
  outs: tuple[Held, ...]
  depths: tuple[int, ...]
  has_product: bool

  def all_nodes(self) -> Iterator[Node]:
    """Yields the decisions, including those in bodies."""
    for node in self.nodes:
      yield node
      for plan in node.call.plans if node.call else ():
        yield from plan.all_nodes()

  def fp8_sites(self) -> set[str]:
    """Returns the names of histories of delayed FP8 scaling."""
    return {node.site for node in self.all_nodes() if node.site is not None}


@dataclasses.dataclass(frozen=True)
class Tap:
  """An inspection of some values of a program while it is emitted.

  Attributes:
    numbers: for a decision and the position of one of its results, the number of its probe.
    probes: an array (or a tree of arrays) for each number, with a row for each step of the loops around it.
    look: (value, probe) -> the value with which the program continues. It must keep shape and dtype.
  """

  numbers: Mapping[tuple[Node, int], int]
  probes: Sequence[PyTree]
  look: Callable[[Array, Any], Array]
