"""`explain`: what would run where under autocast, and why, as data and as tables."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, TypeVar

import jax.numpy as jnp
import numpy as np

from mpjax import _compat
from mpjax._calls import require_call
from mpjax._own_autocast import AUTO, own_autocast
from mpjax._render.plain_text import bytes_text, percent, with_prefix
from mpjax._render.tables import Renamed, Shown, Table, answer_lines
from mpjax._types import JaxprEqn, PolicyLike, Var
from mpjax.casting._cast_plan import LOOPS, CastPlan, Island, Mode, Node
from mpjax.casting._casting_rules import OpLists
from mpjax.casting._half_precision import explaining
from mpjax.casting._islands import statistics_bytes
from mpjax.casting._kinds import FLOAT32, Kind, castable, is_float
from mpjax.casting._reasons import NOT_FP8, Code
from mpjax.casting._trace import plan_of
from mpjax.fp8 import in_force, slowness
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
  layer_pattern,
  marked_path,
  merged_path,
  open_jaxpr,
  shape_of,
  times_run,
  variables_of,
  without_marks,
)
from mpjax.policy import Policy, get_policy
from mpjax.products import is_fp8

T = TypeVar("T")
_MOST_NAMES = 4  # modules or primitives in a sentence


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExplainedOperation(Renamed):
  """One operation of a program.

  Attributes:
    path: module path, such as `GPT/h0/attn`.
    primitive: name of the JAX primitive.
    list: allow, deny, infer or opaque.
    before: dtype of its result in the user's program.
    after: dtype that it runs in under autocast.
    code: the reason for the dtype; `why` has it in words.
    about: what the words tell, such as a size.
    flops: FLOPs of a matrix product or convolution, or those a kernel states, all repetitions; else 0.
    bytes: bytes of its results under autocast, all repetitions.
    times: how often it runs (the length of the scans around it; a while loop counts once).
    casts: casts that autocast inserts before it.
    cast_bytes: bytes that those casts write.
    island: number of the float32 island that it is part of, or `None`.
    operands: the floating dtypes of a kernel's operands; empty for others.
  """

  path: str
  primitive: str
  list: str
  before: str
  after: str
  code: Code
  about: str
  flops: int
  bytes: int
  times: int
  casts: int = 0
  cast_bytes: int = 0
  island: int | None = None
  operands: tuple[str, ...] = ()

  @property
  def why(self) -> str:
    """The reason for the dtype, in words."""
    return self.code.sentence(self.about)


@dataclasses.dataclass(frozen=True)
class ExplainedIsland(Renamed):
  """A float32 island: computed again in the backward pass, from what is kept of it.

  Attributes:
    number: as `island` of its operations has it.
    path: module path.
    operations: names of the JAX primitives that are computed again.
    kept_bytes: bytes kept for the backward pass: inputs in half precision, and statistics of rows in
      float32; all repetitions.
    recomputed_bytes: bytes of the float32 results inside, which the backward pass computes again; all
      repetitions.
    fenced_bytes: bytes that the backward pass reads through an optimisation barrier, so that a compiler does
      compute again; all repetitions. 0 where the backward pass follows at once, as in a loss.
    times: how often it runs.
  """

  number: int
  path: str
  operations: tuple[str, ...]
  kept_bytes: int
  recomputed_bytes: int
  fenced_bytes: int
  times: int


@dataclasses.dataclass(frozen=True)
class ExplainedCarry:
  """A carry of a loop that is float32 in the user's program, and the dtype it is held in.

  Attributes:
    path: the loop's module path and `carry_0`, `carry_1`, ...: what an override has to match.
    primitive: `scan` or `while`.
    shape: the carry's shape.
    dtype: the dtype it is held in.
    why: the reason for the dtype.
  """

  path: str
  primitive: str
  shape: tuple[int, ...]
  dtype: str
  why: str


@dataclasses.dataclass(frozen=True, repr=False)
class Explanation(Shown):
  """The decisions of autocast for a program: `str()` is the answer, `table(NAME)` a part, `rows` the data.

  Attributes:
    policy: the policy.
    recompute: what the backward pass computes again, where no override says otherwise.
    rows: one for each operation, in the order of the program.
    islands: one for each float32 island, in the order of the program.
    carries: one for each float32 carry of each loop, in the order of the program.
    unknown: names of the primitives that mpjax does not know and therefore leaves as they are: put them on
      a list with `OpLists.default().replace(infer=...)`.
    gathers: path, shape, `kept` and gathered `dtype` of each parameter that a step on a mesh divides over
      `fsdp`; only `TrainStep.explain` fills it.
    fp8: the recipe and the formats in force on this machine, or why there are none; empty without a recipe.
    note: a sentence about autocasts that the function has itself; empty if it has none.
  """

  policy: Policy
  recompute: str
  rows: tuple[ExplainedOperation, ...]
  islands: tuple[ExplainedIsland, ...] = ()
  carries: tuple[ExplainedCarry, ...] = ()
  unknown: tuple[str, ...] = ()
  gathers: tuple[Any, ...] = ()
  fp8: str = ""
  note: str = ""

  def matrix_flops(self) -> dict[str, int]:
    """Floating-point operations of matrix products, convolutions and kernels, by dtype."""
    products = _grouped((row for row in self.rows if row.flops), lambda row: row.after)
    return {dtype: _flops(rows) for dtype, rows in products.items()}

  def _answer(self) -> list[str]:
    of_dtype = self.matrix_flops()
    total = sum(of_dtype.values())
    products = f"{with_prefix(total, 'FLOP')} of matrix products" if total else "no matrix products"
    for dtype in sorted(of_dtype, key=lambda dtype: -of_dtype[dtype]):
      products += f", {percent(of_dtype[dtype] / total)} in {dtype}"
    precision = f" ({self.policy.matmul_precision})" if self.policy.matmul_precision else ""
    full, casts = sum(map(_is_full, self.rows)), sum(row.casts for row in self.rows)
    written, kept = sum(row.cast_bytes for row in self.rows), sum(one.kept_bytes for one in self.islands)
    costs = f"casts: {casts}, {bytes_text(written)}" if casts else "nothing is cast"
    costs += f"; recompute: {self.recompute}"
    if self.islands:
      costs += f" (float32 islands: {len(self.islands)}, kept for the backward pass: {bytes_text(kept)})"
    said = {"fp8: ": self.fp8, "": self.note, "primitives that mpjax does not know: ": _few(self.unknown)}
    first = [
      f"policy {self.policy.label}: {products}{precision}; {full} of {len(self.rows)} operations in float32",
      *(f"{lead}{text}" for lead, text in said.items() if text),
      costs,
    ]
    reasons = _reasons(self)
    return answer_lines([*first, *reasons[:1]], reasons[1:], [_change(self)], rest="  {} more")

  def _sections(self) -> Iterator[Table]:
    if reasons := _reasons(self):
      yield Table("reasons", reasons[0], lines=reasons[1:])
    if self.rows:
      heads = ("path", "number", "operations", "in float32", "flops", "products")
      yield Table("modules", "Modules", [heads, *_modules(self)], left=(0, len(heads) - 1))


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
    float32 and why, and how to change it. `.table(NAME)` is one of `.tables` as text, `.table("all")` all of
    them; `.rows` is the data. If `fun` has an autocast of its own, that one is explained.

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
  if own is None:
    return explain_as_run(fun, args, kwargs, policy, ops, overrides)
  while (inner := own_autocast(own.fun)) is not None:
    own = inner
  found = explain_as_run(own.fun, args, kwargs, own.policy, own.ops, own.overrides, own.recompute)
  note = f"The function has an autocast of its own, policy {found.policy.label}: that is explained here"
  if policy is not AUTO and (asked := get_policy(policy)) != found.policy:
    note += f"; policy {asked.label} changes nothing in it"
  return dataclasses.replace(found, note=found.note or f"{note}.")


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
  with explaining(True):
    call = plan_of(fun, args, kwargs, resolved, ops=ops, overrides=overrides, recompute=recompute)
    rules, plan = call.rules, call.plan
  rules.overrides.check_all_matched()
  found = [*_explained(plan, 1, itertools.count(1))]
  of_kind = lambda kind: tuple(one for one in found if isinstance(one, kind))
  nodes = [*plan.all_nodes()]
  unknown = {n.name for n in nodes if n.listed == "opaque" and facts(n.equation) is UNKNOWN}
  notes = [f"FP8 {slow}." for slow in map(slowness, rules.overrides.recipes) if slow]
  if labels := sorted({label for node in nodes if (label := autocast_label(node.path))}):
    reach = "; the overrides of this call do not reach inside" if ops is not None or overrides else ""
    notes.append(
      f"The function has an autocast inside, policy {' and '.join(labels)}: it decides there, and policy "
      f"{resolved.label} decides the rest{reach}."
    )
  return Explanation(
    resolved,
    recompute,
    of_kind(ExplainedOperation),
    of_kind(ExplainedIsland),
    of_kind(ExplainedCarry),
    unknown=tuple(sorted(unknown)),
    fp8=", ".join(map(in_force, rules.overrides.recipes)),
    note=" ".join(notes),
  )


def kernels_in_float32(plan: CastPlan) -> list[str]:
  """Returns the reasons of the kernels that a half-precision policy leaves in float32, each with a name."""
  nodes = (node for node in plan.all_nodes() if node.half is not None and node.call is None)
  kernels = (node for node in nodes if has(node.equation, Trait.KERNEL) or bodies_of(node.equation))
  rows = (row for node in kernels for row in _rows(node, node.equation, node.path, 1))
  return sorted({row.why for row in rows if row.code is Code.KERNEL_IN_FLOAT32})


def _explained(
  plan: CastPlan, times: int, numbers: Iterator[int]
) -> Iterator[ExplainedOperation | ExplainedIsland | ExplainedCarry]:
  """Yields what is decided in a program, and in its bodies, that runs so many times."""
  island_of: dict[Node, int] = {}
  for unit in plan.units:
    if isinstance(unit, Island) and any(node.mode is not Mode.HALF for node in unit.nodes):
      number = next(numbers)
      yield _island(unit, plan, number, times)
      island_of |= dict.fromkeys(unit.nodes, number)
  cast: set[tuple[Var, np.dtype]] = set()
  for node in plan.nodes:
    equation, island = node.equation, island_of.get(node)
    if node.call is not None:
      for i, (k, carry) in enumerate(zip(call_layout(equation).carry, node.call.carry, strict=False)):
        path, atom = inside(without_marks(node.path), f"carry_{i}"), equation.invars[k]
        if castable(atom.aval):
          yield ExplainedCarry(path, node.name, shape_of(atom), carry.held.dtype.name, carry.why)
      for inner in node.call.plans:
        yield from _explained(inner, times * times_run(equation), numbers)
      continue
    reads = zip(equation.invars, node.reads, strict=True) if island is None else ()
    casts = {(a, d) for a, d in reads if d is not None and is_variable(a) and d != plan.held[a].dtype} - cast
    cast |= casts
    written = times * sum(_bytes(variable, dtype) for variable, dtype in casts)
    yield from _rows(node, equation, node.path, times, casts=len(casts), cast_bytes=written, island=island)


def _rows(
  node: Node, equation: JaxprEqn, path: str, times: int, **of_plan: Any
) -> Iterator[ExplainedOperation]:
  """Yields an operation that is decided, and the kernels and products in one that runs as one.

  What an inner autocast decided has the dtypes that it is traced in.
  """
  kernel, product, label = has(equation, Trait.KERNEL), has(equation, Trait.PRODUCT), autocast_label(path)
  bodies = () if kernel else bodies_of(equation)  # a kernel's is of one block
  is_own, listed, code, about = equation is node.equation, node.listed, node.code, node.about
  held = {v: dtype_of(v) for v in equation.outvars if hasattr(v.aval, "shape")}
  floats = [dtype_of(a) for a in equation.invars if is_float(a.aval)]
  before = after = next((str(dtype) for dtype in held.values()), "")
  if as_traced := kernel or (product and not is_own) or (label and not bodies and held):
    listed, row = "opaque", facts(equation)
    if floats and (kernel or product):
      before = after = str(min(floats, key=lambda dtype: dtype.itemsize))
    if is_fp8(equation):
      before = after = str(equation.params["spec"].formats[0])
    if label:
      before, listed = "float32" if floats else after, row.list
      denied = listed == "deny" and after == "float32"
      code, about = (Code.LISTED, row.reason) if denied else (Code.AUTOCAST_INSIDE, label)
    elif in_region(path):
      code, about = Code.IN_REGION, "kernel" if kernel else "product"
    elif kernel and node.half is not None and _is_float32_kernel(equation):
      code, about = Code.KERNEL_IN_FLOAT32, _name_of_kernel(equation)
    elif kernel:
      code, about = Code.KERNEL, ""
  elif is_own:
    held = {v: h.dtype for v, h in zip(equation.outvars, node.outs, strict=True) if v in held}
    if node.fp8 is not None:
      after = node.fp8.spec.recipe.forward_dtype
    elif node.mode is Mode.HALF:
      after = np.dtype(node.half).name
    elif node.mode is Mode.EACH and node.outs:
      after = str(node.outs[0].dtype)
  if as_traced or (is_own and not label):
    yield ExplainedOperation(
      path=without_marks(path),
      primitive=_name(equation),
      list=listed,
      before=before,
      after=after,
      code=code,
      about=about,
      flops=flops(equation) * times,
      bytes=times * sum(_bytes(v, dtype) for v, dtype in held.items()),
      times=times,
      operands=tuple(dict.fromkeys(map(str, floats))) if kernel else (),
      **of_plan,
    )
  for each in (e for body in bodies for e in open_jaxpr(body).eqns):
    yield from _rows(node, each, inside(path, marked_path(each)), times * times_run(equation))


def _is_float32_kernel(equation: JaxprEqn) -> bool:
  """Returns whether a kernel is only for float32, and not for codes with float32 scales."""
  dtypes = {dtype_of(a) for a in equation.invars if hasattr(a.aval, "dtype")}
  floats = {dtype for dtype in dtypes if jnp.issubdtype(dtype, jnp.floating)}
  return floats == {FLOAT32} and dtypes.isdisjoint({np.dtype("int8"), np.dtype("uint8"), jnp.int4.dtype})


def _name_of_kernel(equation: JaxprEqn) -> str:
  """Returns the name of a kernel, or of its primitive."""
  p = equation.params
  name = p.get("name") or p.get("target_name") or ("jaxpr" in p and _compat.function_name(p["jaxpr"]))
  return name if name and isinstance(name, str) else equation.primitive.name


def _island(island: Island, plan: CastPlan, number: int, times: int) -> ExplainedIsland:
  """Returns what an island costs: what it keeps for the backward pass, and what that computes again."""
  again = [node for node in island.nodes if node.listed != "allow"]
  # The other operands of the products at its end are kept with or without the island.
  read = {v for node in again for v in variables_of(node.equation.invars)}
  narrow = lambda v: island.saved is not None and plan.held[v].kind is Kind.HALF
  kept = sum(_bytes(v, island.saved if narrow(v) else dtype) for v, dtype in island.inputs if v in read)
  statistics = sum(statistics_bytes(node.equation) for node in again) if island.saved is None else 0
  results = [v for node in again for v in node.equation.outvars if is_float(v.aval)]
  return ExplainedIsland(
    number=number,
    path=without_marks(island.nodes[0].path),
    operations=tuple(_name(node.equation) for node in again),
    kept_bytes=times * (kept + statistics),
    recomputed_bytes=times * sum(_bytes(v, dtype_of(v)) for v in results),
    fenced_bytes=times * kept if island.fenced and island.saved is None else 0,
    times=times,
  )


def _name(equation: JaxprEqn) -> str:
  name = equation.primitive.name
  inner = None if call_kind(equation) in LOOPS else equation.params.get("name")
  return f"{name}:{inner}" if isinstance(inner, str) else name


def _bytes(variable: Var, dtype: np.dtype | None) -> int:
  return math.prod(shape_of(variable)) * (np.dtype(dtype).itemsize if isinstance(dtype, np.dtype) else 4)


def _is_full(row: ExplainedOperation) -> bool:
  """Returns whether an operation is float32 under the policy, as it is in the program."""
  return row.after == row.before == "float32"


def _flops(rows: Iterable[ExplainedOperation]) -> int:
  return sum(row.flops for row in rows)


def _reasons(one: Explanation) -> list[str]:
  """Returns a heading, and a line for each reason for float32 under a policy of less, or for no FP8.

  Kernels in float32 come first, then others by size, and last what follows its operands.
  """
  if one.policy.compute_dtype == np.float32 and not one.policy.overrides:
    return []
  kept = (Code.REGION, Code.IN_REGION)  # the dtypes of a region are the program's own
  rows = [row for row in one.rows if row.code in NOT_FP8 or (_is_full(row) and row.code not in kept)]

  def order(alike: list[ExplainedOperation]) -> tuple[bool, bool, int, int]:
    is_warning, follows = alike[0].code is Code.KERNEL_IN_FLOAT32, all(row.list == "infer" for row in alike)
    return not is_warning, follows, -_flops(alike), -sum(row.bytes for row in alike)

  paths, total = {row.path for row in one.rows}, sum(one.matrix_flops().values())
  lines = [f"In float32, {'or not in FP8, ' if one.fp8 else ''}and why:"] if rows else []
  for alike in sorted(_grouped(rows, lambda row: row.why).values(), key=order):
    size, many = _flops(alike), f"{len(alike)} operation{'s' * (len(alike) > 1)}"
    share = f"{percent(size / total)} of the FLOPs" if size else many
    primitives = _few(row.primitive.rpartition(":")[2] for row in alike)
    layers = _grouped(dict.fromkeys(row.path for row in alike), layer_pattern).values()
    modules = _few(_merged(layer, paths) for layer in layers)
    lines.append(f"  {share}, {primitives} in {modules}: {alike[0].why}")
  return lines


def _modules(one: Explanation) -> Iterator[tuple[str, ...]]:
  """Yields modules with their operations, those in float32, their FLOPs and dtypes; layers alike as one."""
  found: dict[tuple[str, ...], list[str]] = {}
  by_path = _grouped(one.rows, lambda row: row.path)
  for path, rows in by_path.items():
    dtypes = _few(row.after for row in rows if row.flops)
    size = with_prefix(_flops(rows), "FLOP") if dtypes else ""
    full = str(sum(map(_is_full, rows)) or "")
    found.setdefault((layer_pattern(path), str(len(rows)), full, size, dtypes), []).append(path)
  for (_, *cells), paths in found.items():
    yield _merged(paths, by_path), str(len(paths)), *cells


def _change(one: Explanation) -> str:
  """Returns how to change what is half precision, with the module of the largest product as the example."""
  to = "float32" if one.policy.compute_dtype.itemsize < 4 else "bfloat16"
  products = [row for row in one.rows if row.flops and row.path]
  how = "overrides= for a part that jax.named_scope names"
  if products:
    largest = layer_pattern(max(products, key=lambda row: (row.after != to, row.flops)).path)
    alike = {row.path for row in one.rows if layer_pattern(row.path) == largest}
    how = f'overrides={{"{merged_path(alike, alike).replace("*", ".*")}": "{to}"}}'
  return f"Change it: {how}, or full_precision(f), half_precision(f) for a function"


def _grouped(items: Iterable[T], key: Callable[[T], str]) -> dict[str, list[T]]:
  """Returns the items of each key, in their order."""
  groups: dict[str, list[T]] = {}
  for item in items:
    groups.setdefault(key(item), []).append(item)
  return groups


def _merged(paths: Collection[str], among: Collection[str]) -> str:
  """Returns one name for modules that are alike but for numbers."""
  return merged_path(paths, among) or "(no module)"


def _few(names: Iterable[str]) -> str:
  """Returns names as text, each once; no more than the first few of them."""
  found = list(dict.fromkeys(names))
  more = f" and {len(found) - _MOST_NAMES} more" if len(found) > _MOST_NAMES else ""
  return ", ".join(found[:_MOST_NAMES]) + more
