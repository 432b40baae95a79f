"""`explain`: what would run where under autocast, and why, as data."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from mpjax._calls import require_call
from mpjax._own_autocast import own_autocast
from mpjax._render.html_sections import Shown
from mpjax._render.text_sections import TextSection
from mpjax._types import JaxprEqn, PolicyLike, Var
from mpjax.casting._autocast import AUTO
from mpjax.casting._cast_plan import Call, CastPlan, Island, Mode, Node
from mpjax.casting._casting_rules import make_rules
from mpjax.casting._explain_answer import answer_of
from mpjax.casting._explain_groups import named
from mpjax.casting._explain_text import sections_of
from mpjax.casting._explained import (
  ExplainedCarry,
  ExplainedFragility,
  ExplainedIsland,
  ExplainedOperation,
  ExplainedProgram,
)
from mpjax.casting._fragile import REASONS, Fragile, fragile_nodes
from mpjax.casting._half_precision import explaining
from mpjax.casting._higher_order import LOOPS
from mpjax.casting._islands import statistics_bytes
from mpjax.casting._kernels import IN_FLOAT32, runs_in_float32, way_out
from mpjax.casting._kinds import Kind, castable, is_float
from mpjax.casting._op_lists import OpLists
from mpjax.casting._trace import Traced
from mpjax.fp8._hardware import in_force
from mpjax.jaxpr import (
  UNKNOWN,
  Trait,
  autocast_label,
  bodies_of,
  call_kind,
  call_layout,
  dtype_of,
  facts,
  flops,
  has,
  in_region,
  inside,
  is_variable,
  marked_path,
  open_jaxpr,
  shape_of,
  source_line,
  times_run,
  variables_of,
  without_marks,
)
from mpjax.policy import Policy, get_policy
from mpjax.products import is_fp8


@dataclasses.dataclass(frozen=True, repr=False)
class Explanation(Shown, ExplainedProgram):
  """The decisions of autocast for a program: `str()` is the answer, `table(NAME)` a part, `rows` the data.

  Attributes:
    policy: the policy.
    rows: one for each operation, in the order of the program.
    islands: one for each float32 island, in the order of the program.
    carries: one for each float32 carry of each loop, in the order of the program.
    unknown: names of the primitives that mpjax does not know and therefore leaves as they are: put them on
      a list with `OpLists.default().replace(infer=...)`.
    gathers: one for each parameter that a step on a mesh gathers; only `TrainStep.explain` fills it.
    fp8: the recipe and the formats in force on this machine, or why there are none; empty without a recipe.
    note: a sentence about autocasts that the function has itself; empty if it has none.
    fragile: one for each operation whose result half precision may destroy: a difference of products, an
      angle made by one, an order among noisy values, the end of a loop. `mpjax.inspect_numerics` measures
      them.
  """

  def _answer(self) -> list[str]:
    return answer_of([self])

  def _sections(self) -> Iterator[TextSection]:
    return sections_of([self])


def explain(
  fun: Callable[..., Any],
  /,
  *args: Any,
  policy: PolicyLike = AUTO,
  ops: OpLists | None = None,
  overrides: Mapping[str, PolicyLike] | None = None,
  **kwargs: Any,
) -> Explanation:
  """Says what would run where, if `fun` ran under `mpjax.autocast` with these arguments; computes nothing.

  ```python
  print(mpjax.explain(loss_fn, params, batch, policy="bf16"))
  print(mpjax.explain(step, state, batch))  # a step of mpjax.make_train_step, under its policy
  ```

  Args:
    fun: any function that `mpjax.autocast` takes, or a `TrainStep`.
    *args: its arguments, as arrays or `jax.ShapeDtypeStruct`.
    policy: whatever `mpjax.get_policy` takes; the policy of a `TrainStep` where none is given.
    ops: the lists, if not the default ones.
    overrides: policies by regex on the module path.
    **kwargs: keyword arguments of `fun`.

  Returns:
    An `Explanation`. `str()` of it is an answer of at most twelve lines: how much is half precision, what is
    float32 and why, what is fragile, and how to change it. `.table(NAME)` is one of `.tables` as text,
    `.table("all")` all of them; `.rows` is the data. If `fun` has an autocast of its own, that one is
    explained.

  Raises:
    TypeError: for arguments that `fun` does not take; shows the call that is right.
    ValueError: for an override that matches no module path.
  """
  of_itself: Callable[..., Explanation] | None = getattr(fun, "_explain_", None)
  if of_itself is not None:
    if ops is not None or overrides is not None or kwargs:
      raise TypeError("mpjax.explain of a TrainStep: call mpjax.explain(step, state, batch, policy=...)")
    return of_itself(*args, policy=None if policy is AUTO else policy)
  require_call("explain", fun, args, kwargs)
  own = own_autocast(fun)
  if own is not None:
    while (inner := own_autocast(own.fun)) is not None:
      own = inner
    found = explain_as_run(own.fun, args, kwargs, own.policy, own.ops, own.overrides, own.recompute)
    return dataclasses.replace(found, note=found.note or _of_own_autocast(found.policy, policy))
  return explain_as_run(fun, args, kwargs, policy, ops, overrides)


def explain_as_run(
  fun: Callable[..., Any],
  args: tuple[Any, ...],
  kwargs: dict[str, Any],
  policy: PolicyLike,
  ops: OpLists | None = None,
  overrides: Mapping[str, PolicyLike] | None = None,
  recompute: str = "islands",
) -> Explanation:
  """Returns the explanation of a function under `mpjax.autocast(fun, policy, ...)`."""
  resolved = get_policy(policy)
  rules = make_rules(resolved, ops, overrides, recompute)
  with explaining(True):
    plan = Traced(fun, args, kwargs, rules.overrides).plan(rules, resolved, enter_all=True)
  rules.overrides.check_all_matched()
  explained = _Explained()
  _walk(plan, 1, explained)
  unknown = {n.name for n in plan.all_nodes() if n.listed == "opaque" and facts(n.equation) is UNKNOWN}
  return Explanation(
    resolved,
    rows=tuple(explained.rows),
    islands=tuple(explained.islands),
    carries=tuple(explained.carries),
    unknown=tuple(sorted(unknown)),
    fragile=tuple(map(_fragility, fragile_nodes(plan, rules))),
    fp8=", ".join(map(in_force, rules.overrides.recipes)),
    note=_of_autocasts_inside(plan, resolved, ops is not None or bool(overrides)),
  )


def _of_own_autocast(own: Policy, asked: PolicyLike) -> str:
  """Returns the sentence about a function that `autocast` returned."""
  said = f"The function has an autocast of its own, policy {named(own)}: that is explained here"
  if asked is AUTO or get_policy(asked) == own:
    return f"{said}."
  return f"{said}; policy {named(get_policy(asked))} changes nothing in it."


def _of_autocasts_inside(plan: CastPlan, policy: Policy, overridden: bool) -> str:
  """Returns the sentence about a program of which an autocast inside has decided some."""
  labels = sorted({label for node in plan.all_nodes() if (label := autocast_label(node.path))})
  if not labels:
    return ""
  inner = f"an autocast inside, policy {labels[0]}: it"
  inner = inner if len(labels) == 1 else f"autocasts inside, policies {', '.join(labels)}: each"
  rest = f"policy {named(policy)} decides the rest"
  rest += "; the overrides of this call do not reach inside" if overridden else ""
  return f"The function has {inner} decides there, and {rest}."


@dataclasses.dataclass
class _Explained:
  """An explanation that is being put together."""

  rows: list[ExplainedOperation] = dataclasses.field(default_factory=list)
  islands: list[ExplainedIsland] = dataclasses.field(default_factory=list)
  carries: list[ExplainedCarry] = dataclasses.field(default_factory=list)


def _walk(plan: CastPlan, times: int, explanation: _Explained) -> None:
  """Adds what is decided in a program, and in its bodies, to an explanation."""
  island_of: dict[Node, int] = {}
  for unit in plan.units:
    if isinstance(unit, Island) and any(node.mode is not Mode.HALF for node in unit.nodes):
      number = len(explanation.islands) + 1
      explanation.islands.append(_island(unit, plan, number, times))
      island_of |= dict.fromkeys(unit.nodes, number)
  made: set[tuple[Var, np.dtype]] = set()
  for node in plan.nodes:
    if node.call is not None:
      explanation.carries += _carries(node, node.call)
      length = times_run(node.equation)
      for inner in node.call.plans:
        _walk(inner, times * length, explanation)
    elif label := autocast_label(node.path):
      explanation.rows += _decided_inside(node.equation, node.path, times, label)
    else:
      within = list(_inside(node, node.equation, node.path, times))
      if node.kernel is None and not has(node.equation, Trait.KERNEL):
        explanation.rows.append(_row(node, plan, times, island_of.get(node), made))
      explanation.rows += within


def _row(
  node: Node, plan: CastPlan, times: int, island: int | None, made: set[tuple[Var, np.dtype]]
) -> ExplainedOperation:
  casts = list(_casts(plan, node, made)) if island is None else []
  results = [
    (v, held) for v, held in zip(node.equation.outvars, node.outs, strict=True) if hasattr(v.aval, "shape")
  ]
  return ExplainedOperation(
    path=without_marks(node.path),
    primitive=_name(node.equation),
    list=node.listed,
    before=str(dtype_of(results[0][0])) if results else "",
    after=_runs_in(node),
    flops=flops(node.equation) * times,
    bytes=times * sum(_bytes(v, held.dtype) for v, held in results),
    casts=len(casts),
    cast_bytes=times * sum(_bytes(variable, dtype) for variable, dtype in casts),
    island=island,
    why=node.why,
    rule=node.rule,
    times=times,
  )


def _inside(node: Node, equation: JaxprEqn, path: str, times: int) -> Iterator[ExplainedOperation]:
  """Yields a row for each kernel of an equation that is carried out as one, and each product in it."""
  kernel = node.kernel is not None or has(equation, Trait.KERNEL)
  for body in () if kernel else bodies_of(equation):  # a kernel's is of one block
    for each in open_jaxpr(body).eqns:
      yield from _inside(node, each, inside(path, marked_path(each)), times * times_run(equation))
  if not kernel and (equation is node.equation or not has(equation, Trait.PRODUCT)):
    return
  floats = [v for v in (*equation.invars, *equation.outvars) if is_float(v.aval)]
  dtypes = zip(equation.invars, node.reads if node.kernel else map(dtype_of, equation.invars), strict=True)
  operands = tuple(dict.fromkeys(str(dtype or dtype_of(a)) for a, dtype in dtypes if is_float(a.aval)))
  if is_fp8(equation):
    operands = (str(equation.params["spec"].lhs_dtype),)
  narrow = [dtype for dtype in operands if np.dtype(dtype).itemsize < 4]
  why = "a kernel: it stays in the dtypes of the program" if kernel and node.kernel is None else node.why
  if in_region(path):
    why = f"a {'kernel' if kernel else 'product'} in a half-precision region"
  elif node.kernel is None and node.half is not None and runs_in_float32(equation, path):
    why = f"{IN_FLOAT32}{way_out(equation)}"
  yield ExplainedOperation(
    path=without_marks(path),
    primitive=_name(equation),
    list="opaque",
    before=str(dtype_of(floats[0])) if floats else "",
    after=(narrow or operands or ("",))[0],
    flops=flops(equation) * times,
    bytes=times * sum(_bytes(v, dtype_of(v)) for v in equation.outvars),
    casts=0,
    cast_bytes=0,
    island=None,
    why=why,
    rule=node.rule,
    times=times,
    operands=operands if kernel else (),
  )


def _decided_inside(equation: JaxprEqn, path: str, times: int, label: str) -> Iterator[ExplainedOperation]:
  """Yields a row for each operation that an autocast inside has decided, in the dtypes that it runs in."""
  bodies = () if has(equation, Trait.KERNEL) else bodies_of(equation)
  for body in bodies:
    for each in open_jaxpr(body).eqns:
      yield from _decided_inside(each, inside(path, marked_path(each)), times * times_run(equation), label)
  if bodies or not equation.outvars:
    return
  row = facts(equation)
  result = dtype_of(equation.outvars[0])
  floats = [dtype_of(atom) for atom in equation.invars if is_float(atom.aval)]
  runs_in = (
    min(floats, key=lambda dtype: dtype.itemsize) if has(equation, Trait.PRODUCT) and floats else result
  )
  denied = row.list == "deny" and result == np.float32
  yield ExplainedOperation(
    path=without_marks(path),
    primitive=_name(equation),
    list=row.list,
    before="float32" if is_float(equation.outvars[0].aval) else str(result),
    after=str(runs_in),
    flops=flops(equation) * times,
    bytes=times * sum(_bytes(v, dtype_of(v)) for v in equation.outvars),
    casts=0,
    cast_bytes=0,
    island=None,
    why=row.reason if denied else f"the autocast inside decides (policy {label})",
    rule="autocast inside",
    times=times,
  )


def _casts(plan: CastPlan, node: Node, made: set[tuple[Var, np.dtype]]) -> Iterator[tuple[Var, np.dtype]]:
  """Yields (variable, dtype) of the casts that an equation is the first to need."""
  for atom, dtype in zip(node.equation.invars, node.reads, strict=True):
    if dtype is None or not is_variable(atom):
      continue
    if dtype != plan.held[atom].dtype and (atom, dtype) not in made:
      made.add((atom, dtype))
      yield atom, dtype


def _island(island: Island, plan: CastPlan, number: int, times: int) -> ExplainedIsland:
  """Returns what an island costs: what it keeps for the backward pass, and what that computes again."""
  again = [node for node in island.nodes if node.listed != "allow"]
  # The other operands of the products at its end are kept with or without the island.
  read = {v for node in again for v in variables_of(node.equation.invars)}
  read |= {v for node in island.copies for v in variables_of(node.equation.invars)}
  kept = 0
  for variable, dtype in island.inputs:
    narrow = island.saved is not None and plan.held[variable].kind is Kind.HALF
    size = _bytes(variable, island.saved if narrow else dtype) if variable in read else 0
    kept += size
  fenced = kept if island.fenced and island.saved is None else 0
  kept += sum(statistics_bytes(node.equation) for node in again) if island.saved is None else 0
  inside = sum(_bytes(v, dtype_of(v)) for node in again for v in node.equation.outvars)
  return ExplainedIsland(
    number=number,
    path=island.nodes[0].path,
    operations=tuple(_name(node.equation) for node in again),
    copied=tuple(_name(node.equation) for node in island.copies),
    kept_bytes=times * kept,
    recomputed_bytes=times * inside,
    fenced_bytes=times * fenced,
    kept_in="float8" if island.saved is not None else "",
    times=times,
  )


def _fragility(found: Fragile) -> ExplainedFragility:
  equation = found.node.equation
  path = without_marks(found.node.path)
  return ExplainedFragility(
    path, equation.primitive.name, found.kind, source_line(equation), REASONS[found.kind]
  )


def _carries(node: Node, call: Call) -> Iterator[ExplainedCarry]:
  for i, (k, carry) in enumerate(zip(call_layout(node.equation).carry, call.carry, strict=False)):
    atom = node.equation.invars[k]
    if castable(atom.aval):
      dtype = carry.held.dtype.name
      yield ExplainedCarry(
        inside(without_marks(node.path), f"carry_{i}"), node.name, shape_of(atom), dtype, carry.why
      )


def _runs_in(node: Node) -> str:
  if node.fp8 is not None:
    return node.fp8.recipe.forward_dtype
  if node.mode is Mode.HALF:
    return np.dtype(node.half).name
  if node.mode is Mode.EACH and node.outs:
    return str(node.outs[0].dtype)
  return next((str(dtype_of(v)) for v in node.equation.outvars if hasattr(v.aval, "dtype")), "")


def _name(equation: JaxprEqn) -> str:
  name = equation.primitive.name
  inner = None if call_kind(equation) in LOOPS else equation.params.get("name")
  return f"{name}:{inner}" if isinstance(inner, str) else name


def _bytes(variable: Var, dtype: np.dtype | None) -> int:
  return math.prod(shape_of(variable)) * (np.dtype(dtype).itemsize if isinstance(dtype, np.dtype) else 4)
