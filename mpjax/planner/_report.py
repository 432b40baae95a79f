"""A plan: its data, an answer of twelve lines, and named tables; several plans as one table, then each."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from mpjax._render.plain_text import bytes_text, table, with_prefix
from mpjax._render.tables import Shown, Table, answer_lines
from mpjax.planner._results import (
  ARGUMENT_PARTS,
  TIME_PARTS,
  TRANSIENT_PARTS,
  Collective,
  Compiled,
  Floor,
  HostMemory,
  Memory,
  Note,
  ProductGroup,
  Time,
)

NO_FIT = "DOES NOT FIT"
_MOST_ROWS, _MOST_PLANS, _MOST_PARTS, _MOST_NAMED = 10, 7, 3, 2
_LEAST_SHARE = 1e-3  # of the time, of a part that is named
_MOST_SHARE = 0.97  # the most of a GPU's memory for a process; the driver and the runtime keep the rest
_ROOMY = 0.5  # a larger batch is suggested below this share of the memory
_MISSES = 0.01  # products below the full rate are mentioned above this share of the FLOPs
# Places of notes by kind, 1 for the others: failures first, missing packages last.
_RANKS = {"failed": 0, "out of memory": 0, "install": 2}
_DIVIDE = "a mesh with fsdp divides them"
_WAYS_OUT = {
  "activations": "jax.checkpoint around a block (train.recompute=blocks) keeps fewer of them, a smaller "
  "batch or accumulate=2 halves them",
  "optimizer state": f"optimizer_dtype: int8 in the policy takes a quarter of it, {_DIVIDE}",
  "outputs": "jax.jit(step, donate_argnums=...) writes them where the inputs lie",
  **dict.fromkeys(("workspace", "temporaries"), "a smaller batch or accumulate=2 halves them"),
  **dict.fromkeys(("compute copies", "gradients", "master weights"), _DIVIDE),
}

# Names and values of a plan in a table's order: bytes, or text; `None` for what the plan lacks.
_Rows = Iterator[tuple[str, Any]]


@dataclasses.dataclass(frozen=True, repr=False)
class Plan(Shown):
  """The cost of one step on one target, as `mpjax.plan` returns it; `str()` gives the short answer.

  ```python
  plan = mpjax.plan(step, state, batch, target="h200", compile=False)
  print(plan.peak, plan.room)  # bytes that the step needs, and bytes that it has
  print(plan.table("memory"))  # one table; plan.tables has the names
  ```

  Attributes:
    label: its name in a comparison; by default the policy's.
    target: name of the target.
    device: what the target is, in words.
    devices: number of devices that the step runs on; all bytes and FLOPs are those of one device.
    device_memory: bytes of one device's memory; 0 if not known.
    parameters: number of trained parameters.
    memory: memory by the analytic plan.
    compiled: figures of the compiler, or `None`.
    products: the matrix products, the most FLOPs first, then the fused kernels.
    collectives: what crosses devices, from the compiled program. Without a compiled program: what the step
      itself states. A step of `mpjax.make_train_step` with a mesh states all but those of a `tensor` axis.
    floor: the shortest possible time, or `None` if the target has no published peak rates.
    notes: sentences for the reader of the plan.
    subject: what the step trains, in words; empty if not known.
    usable_memory: bytes of a device that JAX takes; 0 for all of them.
    fp8: the FP8 recipe and the formats in force on the target, in words; empty without a recipe.
    time: an estimate of the time, or `None` if the target has no published peak rates.
    model_flops: FLOPs of the matrix products and kernels on one device, without what is computed again.
    peak_flops: the published rate, in FLOP/s, of the target's 16-bit products, for `utilisation`.
    items: number of tokens, images or rows of a step on all devices; 0 if not known.
    item: what is counted: `tokens`, `images` or `rows`.
    host: what is in the host's memory between steps, which no other figure of memory counts; `None` if
      nothing is.
  """

  label: str
  target: str
  device: str
  devices: int
  device_memory: int
  parameters: int
  memory: Memory
  compiled: Compiled | None
  products: tuple[ProductGroup, ...]
  collectives: tuple[Collective, ...]
  floor: Floor | None
  notes: tuple[Note, ...]
  subject: str = ""
  usable_memory: int = 0
  fp8: str = ""
  time: Time | None = None
  model_flops: int = 0
  peak_flops: float = 0.0
  items: int = 0
  item: str = ""
  host: HostMemory | None = None

  def _answer(self) -> list[str]:
    return answer_of([self])

  def _sections(self) -> Iterator[Table]:
    return sections_of([self])

  @property
  def out_of_memory(self) -> bool:
    """Whether the compiler gave up because the step does not fit the device."""
    return any(note.kind == "out of memory" for note in self.notes)

  @property
  def throughput(self) -> float:
    """Items (tokens, images or rows) a second on all devices, by `time`; 0 if not known."""
    return self.items / self.time.seconds if self.time and self.time.seconds else 0.0

  @property
  def utilisation(self) -> float:
    """Model FLOPs, without recomputation, over those of the 16-bit peak in `time` (arXiv 2204.02311)."""
    busy = self.time.seconds * self.peak_flops if self.time else 0.0
    return self.model_flops / busy if busy else 0.0

  @property
  def room(self) -> int:
    """Bytes that the step must fit in: what JAX takes of a device's memory; 0 if not known."""
    return self.usable_memory or self.device_memory

  @property
  def peak(self) -> int:
    """Bytes that the step needs: the compiler's figure if there is one, else the analytic figure."""
    return self.compiled.peak if self.compiled else self.memory.peak

  def bytes_per_parameter(self, *parts: str) -> float:
    """Returns analytic bytes per parameter of the named parts, or of all parts without names."""
    chosen = parts or tuple(self.memory.parts)
    return sum(self.memory.parts.get(part, 0) for part in chosen) / max(1, self.parameters)

  def matrix_flops(self) -> dict[str, int]:
    """Returns the FLOPs of matrix products by dtype (with its passes: `bfloat16 x3`), the most first.

    A product in several passes counts the FLOPs of one.
    """
    total: dict[str, int] = {}
    for product in self.products:
      if not product.kernel:
        total[product.units] = total.get(product.units, 0) + product.flops
    return dict(sorted(total.items(), key=lambda item: -item[1]))

  @property
  def eligible(self) -> float:
    """Share of the matrix FLOPs that run on matrix units at full rate."""
    whole = sum(self.matrix_flops().values())
    return sum(product.flops for product in self.products if product.eligible) / whole if whole else 1.0

  def to_dict(self) -> dict[str, Any]:
    """Returns plain data for JSON."""
    derived = {"peak": self.peak, "matrix_flops": self.matrix_flops(), "eligible": self.eligible}
    derived |= {"throughput": self.throughput, "utilisation": self.utilisation}
    return dataclasses.asdict(self) | derived


def answer_of(plans: Sequence[Plan], first: Sequence[str] = (), *, rates: bool = False) -> list[str]:
  """Returns the answer for plans, in at most eleven lines: the figures of one, or a row for each of several.

  Args:
    plans: the plans, the most important first.
    first: sentences before it.
    rates: whether to add items a second and utilisation.
  """
  ranked = lambda plan: sorted(plan.notes, key=lambda note: _RANKS.get(note.kind, 1))
  notes = [f"note: {text}" for text in _each_once(plans, ranked)]
  if len(plans) == 1:
    advice = [f"advice: {line}" for line in _advice(plans[0])][:2]
    return answer_lines([*first, *_figures(plans[0], rates)], notes, advice, rest="notes left out: {}")
  rows, left = _summary(plans[:_MOST_PLANS], rates)
  lines = [line for row in table(rows, left=left) for line in row]
  if plans[_MOST_PLANS:]:
    lines.append(f"{len(plans) - _MOST_PLANS} more in the table summary")
  said = [*_each_once(plans, lambda plan: [plan.fp8]), *notes]
  return answer_lines([*first, _title(plans), *lines], said, rest="notes left out: {}")


def sections_of(plans: Sequence[Plan]) -> Iterator[Table]:
  """Yields a table of what each plan needs, then the tables of each plan."""
  rows, left = _summary(plans)
  memory = lambda plan: bytes_text(plan.device_memory) if plan.device_memory else "unknown"
  devices = dict.fromkeys(f"target {p.target}: {p.devices} of {p.device}, memory {memory(p)}" for p in plans)
  yield Table("summary", _title(plans), rows, [*devices], left)
  tables: dict[str, tuple[str, Callable[[Plan], _Rows]]] = {
    "memory": ("Memory of one device", _memory),
    "activations": ("Largest saved activations", _activations),
    "products": ("Matrix products of one step on one device, and those below the full rate", _products),
    "collectives": ("Collectives of one step on one device", _collectives),
    "time": ("Time of a step", _time),
  }
  for plan in plans:
    for name, (title, of) in tables.items():
      text = lambda value: value if isinstance(value, str) else bytes_text(value)
      if found := [[row, text(value)] for row, value in of(plan) if value is not None]:
        yield Table(name, title, [["", plan.label], *found])
  if notes := _each_once(plans, lambda plan: [plan.fp8, *plan.notes]):
    yield Table("notes", "Notes", lines=notes)


# Tables.


def _summary(plans: Sequence[Plan], rates: bool = False) -> tuple[list[list[str]], list[int]]:
  """Returns a heading and a row of cells for each plan, and the columns that are aligned left."""
  item = next((plan.item for plan in plans if plan.item), "rows")
  rows = [["policy", "needs", "of memory", "products", "full rate", "time", "mostly", "at least"]]
  rows[0] += [f"{item}/s", "MFU"] * rates
  for p in plans:
    (dtype, share), *others = [*_shares(p.matrix_flops())] or [("-", "")]
    row = [p.label, bytes_text(p.peak), _fit(p), f"{dtype} {share}" if others else dtype]
    row += [percent_text(p.eligible), _seconds(p.time), p.time.longest if p.time else "", _seconds(p.floor)]
    known = [f"{p.throughput:,.0f}", percent_text(p.utilisation)] if p.throughput else ["-", "-"]
    rows.append(row + known * rates)
  return rows, [0, 3, 6]


def _memory(plan: Plan) -> _Rows:
  parts = plan.memory.parts
  for name in (*ARGUMENT_PARTS, *TRANSIENT_PARTS):
    yield name, parts.get(name)
    if name == "optimizer state":
      yield from ((f"  {slot}", size) for slot, size in plan.memory.optimizer.items())
  yield "peak, analytic", plan.memory.peak
  yield "  per parameter", f"{plan.bytes_per_parameter():.2f} B" if plan.parameters else None
  if compiled := plan.compiled:
    yield "peak, compiled", compiled.peak
    yield from ((f"  {name}", compiled.memory.parts.get(name)) for name in TRANSIENT_PARTS)
  yield "peak of JAX's memory" if plan.room < plan.device_memory else "peak of device memory", _fit(plan)


def _activations(plan: Plan) -> _Rows:
  yield "all, at their maximum", plan.memory.saved_bytes or None
  for s in plan.memory.saved[:_MOST_ROWS]:
    name = f"{s.path} {s.source} {_by(s.shape)}".strip()
    yield name, f"{s.count} of {s.dtype}  {bytes_text(s.nbytes):>10}"


def _products(plan: Plan) -> _Rows:
  """Yields the FLOPs by dtype and kernel, the products below the full rate, and the fused kernels."""
  if flops := plan.matrix_flops():
    yield "all", with_prefix(sum(flops.values()), "FLOP")
    yield from _shares(flops)
    yield "eligible at full rate", percent_text(plan.eligible)
  if plan.compiled:
    yield from ((f"by the compiler, {name}", share) for name, share in _shares(plan.compiled.kernels))
  slow = [product for product in plan.products if not product.eligible]
  for p in slow[:_MOST_ROWS]:
    shape = f"{p.batch} of {_by(p.shape)}" if p.batch > 1 else _by(p.shape)
    why = f"{p.why}, full rate at {_by(p.padded)}" if p.padded != p.shape else p.why
    what = f"{p.batch} kernels of {p.dtype}, in no other figure" if p.kernel else why
    stated = with_prefix(p.flops, "FLOP") if p.flops else "not stated"
    module = f"{p.path} ({p.phase})".lstrip() if p.phase else p.path
    yield f"{module} {p.source} {p.kernel or shape}".strip(), f"{what}  {stated:>13}"
  yield "more", str(len(slow) - _MOST_ROWS) if slow[_MOST_ROWS:] else None


def _collectives(plan: Plan) -> _Rows:
  for c in plan.collectives:
    name = f"{c.operation} {c.dtype}{f' among {c.group}' if c.group else ''}"
    yield name, f"{c.count} times, {bytes_text(c.nbytes)}: {', '.join(c.sources)}"
  if plan.collectives and plan.compiled is None:
    yield "of the compiler", "not known: these the step states itself"


def _time(plan: Plan) -> _Rows:
  """Yields the estimated time by part and module, where it is from, the rates, and the floor."""
  if time := plan.time:
    yield f"time by the {time.source}", f"{_seconds(time)} (+-{100 * time.error:.0f}%)"
    yield from ((f"  {name}", _seconds(time.parts[name])) for name in TIME_PARTS if name in time.parts)
    yield "hidden by other work", _seconds(time.hidden) if time.hidden else None
  yield f"{plan.item} a second", f"{plan.throughput:,.0f}" if plan.throughput else None
  yield "model FLOPs utilisation", percent_text(plan.utilisation) if plan.utilisation else None
  if floor := plan.floor:
    yield "no step is faster than", f"{_seconds(floor)} ({floor.bound})"
    yield from ((f"  {name}", _seconds(seconds)) for name, seconds in floor.parts.items())
  modules = _by_size(plan.time.modules) if plan.time else []
  yield from ((f"in {name or 'no module'}", _seconds(seconds)) for name, seconds in modules[:_MOST_ROWS])


# Lines of answers.


def _title(plans: Sequence[Plan]) -> str:
  """Returns the step that is planned, and the device."""
  first, label = plans[0], "plans" if plans[1:] else f"plan of {plans[0].label}"
  devices = f", {first.devices} devices" if first.devices > 1 else ""
  step = f"a step of {first.parameters:,} parameters" if first.parameters else "a step"
  subjects = "; ".join(dict.fromkeys(plan.subject or step for plan in plans))
  return f"{label} on {_name_of(first.target)}{devices}: {subjects}"


def _figures(plan: Plan, rates: bool) -> Iterator[str]:
  """Yields whether a plan fits, its largest parts, its products, what crosses devices, and its time."""
  yield _title([plan])
  needs = f"{bytes_text(plan.peak)}; the size of the device's memory is not known"
  if plan.room:
    whose = "that JAX takes" if plan.room < plan.device_memory else "of a device"
    room = f"{bytes_text(plan.peak)} of the {bytes_text(plan.room)} {whose}"
    needs = f"{NO_FIT if plan.peak > plan.room else 'fits'}: {room}, {percent_text(plan.peak / plan.room)}"
  yield f"memory: {needs} ({'by the compiler' if plan.compiled else 'analytic'})"
  yield _largest(_parts(plan), bytes_text)
  if host := plan.host:
    each = f"{bytes_text(host.to_device)} to the device and {bytes_text(host.to_host)} back in each step"
    yield f"  on the host: {bytes_text(host.held)}; {each}"
  if flops := plan.matrix_flops():
    shares = ", ".join(f"{dtype} {share}" for dtype, share in _shares(flops))
    rate = "all at" if plan.eligible == 1 else f"{percent_text(1 - plan.eligible)} below"
    whole = with_prefix(sum(flops.values()), "FLOP")
    yield f"products: {shares} of {whole}; {rate} the full rate of the units"
  if 1 - plan.eligible >= _MISSES:
    slow = [p for p in plan.products if not (p.eligible or p.kernel)]
    named = dict.fromkeys(f"{p.path or p.source} ({p.why})" for p in slow)
    yield f"  below the full rate: {_first([*named], gap='; ')}"
  if kernels := list(dict.fromkeys(product.kernel for product in plan.products if product.kernel)):
    yield f"fused kernels: {_first(kernels)}; not in the products or the least time"
  if plan.fp8:
    yield f"fp8: {plan.fp8}"
  if crossing := [f"{c.operation} {c.dtype} {bytes_text(c.nbytes)}" for c in plan.collectives]:
    yield f"between devices: {_first(crossing)}"
  if plan.floor is None:
    yield f"time: not known, because {_name_of(plan.target)} has no published peak rates"
  elif time := plan.time:
    about = f"about {_seconds(time)} (+-{100 * time.error:.0f}%) by the {time.source}"
    yield f"time: {about}; at least {_seconds(plan.floor)} ({plan.floor.bound})"
    longest = {
      name: seconds for name, seconds in time.parts.items() if seconds >= _LEAST_SHARE * time.seconds
    }
    yield _largest(longest, _seconds)
  if rates:
    of = f"{percent_text(plan.utilisation)} of {with_prefix(plan.peak_flops, 'FLOP/s')}"
    known = f"{plan.throughput:,.0f} {plan.item}/s; model FLOPs utilisation (MFU) {of}"
    yield f"rate: {known if plan.throughput else 'not known, because the time is not known'}"


def _advice(plan: Plan) -> Iterator[str]:
  """Yields what to change, the most important first."""
  if plan.room and plan.peak > plan.room:
    share = math.ceil(100 * plan.peak / max(1, plan.device_memory)) / 100
    if share <= _MOST_SHARE:
      yield f"XLA_PYTHON_CLIENT_MEM_FRACTION={share:g} in the environment: so it fits the device"
    for name, size in [part for part in _by_size(_parts(plan)) if part[0] in _WAYS_OUT][:1]:
      yield f"{name} {bytes_text(size)}: {_WAYS_OUT[name]}; --fit (mpjax.largest_batch) finds what fits"
  first = next(iter(plan.matrix_flops()), "")
  if plan.floor and (first in ("float32", "tensorfloat32") or " x" in first):
    yield "a policy in half precision (bf16 or fp16) multiplies at a higher rate"
  if plan.time and plan.time.longest == "collectives":
    yield "reduce_dtype: bfloat16 or gather_dtype: float8_e4m3fn in the policy sends fewer bytes"
  if plan.room and plan.peak < _ROOMY * plan.room:
    yield "a larger batch fits: --fit (mpjax.largest_batch) finds the largest"


# Cells and words.


def _each_once(plans: Sequence[Plan], of: Callable[[Plan], Sequence[str]]) -> list[str]:
  """Returns each text of the plans once, behind the labels of its plans unless all have it."""
  found: dict[str, list[str]] = {}
  for plan in plans:
    for text in dict.fromkeys(filter(None, of(plan))):
      found.setdefault(text, []).append(plan.label)
  every = len(plans)
  return [text if len(labels) == every else f"{', '.join(labels)}: {text}" for text, labels in found.items()]


def _parts(plan: Plan) -> dict[str, int]:
  """Returns the parts of a plan's peak, the compiler's if it has them."""
  return plan.compiled.memory.parts if plan.compiled else plan.memory.parts


def _by_size(parts: dict[str, Any]) -> list[tuple[str, Any]]:
  return sorted(parts.items(), key=lambda part: -part[1])


def _shares(flops: dict[str, int]) -> Iterator[tuple[str, str]]:
  """Yields names with their shares of all FLOPs."""
  whole = max(1, sum(flops.values()))
  yield from ((name, percent_text(count / whole)) for name, count in flops.items())


def _largest(parts: dict[str, Any], text: Callable[[Any], str]) -> str:
  named = [f"{name} {text(size)}" for name, size in _by_size(parts)[:_MOST_PARTS]]
  return f"  largest: {', '.join(named)}"


def _first(names: Sequence[str], gap: str = ", ") -> str:
  """Returns the first names, and how many are left out."""
  more = [f"{len(names) - _MOST_NAMED} more"] if names[_MOST_NAMED:] else []
  return gap.join([*names[:_MOST_NAMED], *more])


def _fit(plan: Plan) -> str:
  if not plan.room:
    return "not known"
  return percent_text(plan.peak / plan.room) + (f"  {NO_FIT}" if plan.peak > plan.room else "")


def percent_text(share: float) -> str:
  """Returns a share as `99.9%`; only a whole is shown as 100.0%, and only nothing as 0.0%."""
  if 0 < share < 5e-4:
    return "<0.1%"
  return f"{min(100 * share, 99.9) if share < 1 else 100 * share:.1f}%"


def _name_of(target: str) -> str:
  return "this machine" if target == "here" else target


def _seconds(of: Any) -> str:
  """Returns seconds, or those of what has them, as text; a dash for `None`."""
  return "-" if of is None else with_prefix(getattr(of, "seconds", of), "s")


def _by(shape: Sequence[int]) -> str:
  return "x".join(map(str, shape)) or "scalar"
