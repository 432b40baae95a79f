"""`mpjax.plan`: what one step, of a user's own or of `make_train_step`, costs on a device."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Never

import jax.numpy as jnp
import numpy as np

from mpjax._calls import refuse_keywords
from mpjax._render.plain_text import bytes_text
from mpjax._types import PolicyLike, PyTree
from mpjax.formats import narrow_bits, runs_on
from mpjax.jaxpr import constants_of
from mpjax.planner._arguments import Argument, argument_parts
from mpjax.planner._from_jaxpr import from_jaxpr
from mpjax.planner._memory import analytic_memory, host_memory, stored_program
from mpjax.planner._products import list_products, model_flops, serving_dtype
from mpjax.planner._program import Program, by_part, collectives_of, live_at_peak, loops_of
from mpjax.planner._report import Plan
from mpjax.planner._results import TRANSIENT_PARTS, Compiled, Memory, Note, ProductGroup
from mpjax.planner._targets import Target, get_target, missing
from mpjax.planner._time import compiled_time, time_floor, traced_time
from mpjax.planner._traced_step import TracedStep, trace_step
from mpjax.planner.compiled._compile import CompiledProgram, CompileError, compile_step
from mpjax.planner.compiled._from_hlo import Kernels, from_hlo, kept_of, traced_kernels
from mpjax.planner.compiled._hlo import parse

_WORTH_A_NOTE = 10**6
_EXPLAINED = 0.9  # the share of the peak that a program's buffers must explain to be shown
_OTHER_HALF = {"bfloat16": "float16", "float16": "bfloat16"}
COMPILE = ("auto", True, False)
_ELSEWHERE = {
  **dict.fromkeys(("device", "backend", "platform", "hardware", "topology"), "pass target='h100'"),
  **dict.fromkeys(
    ("abstract_args", "args", "params", "state", "batch"),
    "the arguments follow the step one by one, as in mpjax.plan(step, state, batch)",
  ),
}


def plan(
  fun_or_step: Callable[..., Any],
  *args: PyTree,
  policy: PolicyLike | None = None,
  target: str | Target | None = None,
  compile: bool | str = "auto",
  label: str | None = None,
  parts: Mapping[str | int, str] | None = None,
  donate_argnums: int | Sequence[int] | None = None,
  **unknown: Never,
) -> Plan:
  """Predicts the cost of a step on a device that need not exist here: memory, products, collectives, time.

  ```python
  print(mpjax.plan(step, state, batch, target="h200"))  # arrays, or their shapes
  print(mpjax.plan(jax.grad(loss_fn), params, batch, policy="bf16", target="v5e"))  # under mpjax.autocast
  ```

  Nothing is allocated and nothing runs. The step is traced for the shapes of its arguments. The target's
  compiler compiles it if that is installed.

  Args:
    fun_or_step: a training step or any function of arrays: what `mpjax.make_train_step` returns, a jitted
      function, or a plain one.
    *args: its positional arguments, as arrays or `jax.ShapeDtypeStruct`. For several devices, give them
      shardings over a mesh; a `jax.sharding.AbstractMesh` will do.
    policy: the policy to plan for: a `TrainStep` runs under it instead of its own, a function runs under
      `mpjax.autocast`. By default nothing changes.
    target: `None` or `"here"` for this machine, or a device, such as `"h200"`, `"h100:8"` or `"v5e:2x4"`.
    compile: `"auto"`: compile if the target's compiler is installed; `True`: compile, or raise; `False`: do
      not compile.
    label: name of the plan in comparisons; the policy's name by default.
    parts: from a parameter of the step, by name or number, to a part of `ARGUMENT_PARTS`. Needed only if the
      names and types of the arguments do not say which are the weights.
    donate_argnums: the donated arguments of a plain function; those of a jitted function are known.

  Returns:
    A `Plan`: `str()` gives the answer, `table(NAME)` one table as text, `to_dict()` the data.

  Raises:
    TypeError: for arguments that the step does not take; the message shows the right call.
    ValueError: for an unknown target (the message lists the known ones), a mesh larger than the target, a
      step that cannot be traced, `parts` that fit nothing, or `compile=True` without the packages.
    mpjax.planner.CompileError: if `compile=True` and the compiler fails.
  """
  refuse_keywords(plan, unknown, _ELSEWHERE)
  if compile not in COMPILE:
    raise ValueError(f"compile={compile!r}: expected 'auto', True or False")
  device = get_target(target)
  traced = trace_step(fun_or_step, args, device, policy=policy, parts=parts, donate_argnums=donate_argnums)
  step = from_jaxpr(traced.jaxpr, traced.arguments, device, traced.devices)
  donated = [value for value, given in zip(step.arguments, traced.donated, strict=True) if given]
  program = stored_program(step, device.kind, donated)
  memory = analytic_memory(step, program, traced.arguments, device)
  products = list_products(step, device)
  weights = [a for a in traced.arguments if a.part == "master weights"]
  served = traced.policy.compute_dtype if traced.policy is not None else serving_dtype(step)
  served_bytes = lambda a: a.elements * served.itemsize if jnp.issubdtype(a.dtype, np.floating) else a.whole
  compiled, by_compiler, notes = _by_the_compiler(traced, step, device, compile)
  crossing = by_compiler or step
  sent = collectives_of(crossing, least=True)
  return Plan(
    label=label or traced.label,
    target=device.name,
    device=device.device,
    devices=traced.devices,
    device_memory=device.memory,
    usable_memory=device.usable,
    parameters=sum(a.elements for a in weights),
    memory=memory,
    compiled=compiled,
    inference=sum(map(served_bytes, weights)),
    checkpoint=sum(a.whole for a in traced.arguments if a.part != "batch"),
    products=products,
    collectives=collectives_of(crossing),
    floor=time_floor(step, traced.arguments, compiled.memory if compiled else memory, sent, device),
    notes=(*_notes(traced, step, products, device), *notes),
    fp8=traced.fp8,
    model_flops=model_flops(step),
    peak_flops=device.flops.get("bfloat16") or max(device.flops.values(), default=0.0),
    time=compiled_time(by_compiler, device) if by_compiler else traced_time(program, device),
    host=host_memory(step, traced.arguments, device.kind),
  )


def _by_the_compiler(
  traced: TracedStep, step: Program, device: Target, compile: bool | str
) -> tuple[Compiled | None, Program | None, tuple[Note, ...]]:
  """Returns the compiler's figures and its program, `None` without them, and notes.

  Raises:
    ValueError: if `compile` is True and the compiler is not installed.
    CompileError: if `compile` is True and the compiler fails.
  """
  uncounted = *loops_of(step, "the step"), *_gathered(traced, step)
  if compile is False:
    return None, None, uncounted
  if lacks := missing(device):
    if compile is True:
      raise ValueError(f"compile=True: {lacks}")
    return None, None, (*uncounted, Note(lacks, "install"))
  donated = [i for i, given in enumerate(traced.donated) if given]
  try:
    made = compile_step(traced.jitted, traced.args, donated, device)
  except CompileError as error:
    if compile is True:
      raise
    text = f"the compiler failed{', out of memory' if error.out_of_memory else ''}: {error}"
    return None, None, (*uncounted, Note(text, "out of memory" if error.out_of_memory else "failed"))
  return read_program(made, traced.arguments, device, traced_kernels(step))


def read_program(
  made: CompiledProgram, arguments: Sequence[Argument], target: Target, kernels: Kernels
) -> tuple[Compiled, Program | None, tuple[Note, ...]]:
  """Reads a compiled program; if it cannot be read, the totals of the compiler's memory analysis are left.

  Args:
    made: the output of the target's compiler.
    arguments: the leaves of the step's arguments.
    target: the target of the compiler.
    kernels: FLOPs of fused kernels, as `traced_kernels` returns them.

  Returns:
    Totals, with parts and kernels if the program could be read; the program; and what is not understood in
    it.
  """
  whole = _totals(made, arguments, target)
  weights = {shape for a in arguments if a.part == "master weights" for shape in (a.shape, a.local)}
  try:
    program = from_hlo(parse(made.proto), target.kind, weights, kernels)
    memory, explained = _divided(program, whole, made.live)
    counts: collections.Counter[str] = collections.Counter()
    for operation, times in program.each():
      for product in operation.products:
        if product.operands:
          counts[f"{product.kernel}: {' x '.join(product.operands)}"] += int(product.flops * times)
    kernels_by_flops = {name: n for name, n in counts.most_common() if n}
    notes = [*loops_of(program, "the compiled program")]
  except Exception as error:
    reason = ": ".join(filter(None, (type(error).__name__, str(error).partition("\n")[0])))
    text = (
      f"the compiled program cannot be read ({reason[:200]}): the compiler's totals are shown, without "
      "parts and kernels, and the collectives that the step states"
    )
    return whole, None, (Note(text, "program"),)
  if explained < _EXPLAINED:
    missed = bytes_text((1 - explained) * whole.peak)
    text = f"temporaries: the buffers in the program do not explain {missed} of the compiler's "
    notes.append(Note(f"{text}{bytes_text(whole.temporaries)}, which are shown undivided", "program"))
    memory = whole.memory
  compiled = dataclasses.replace(whole, memory=memory, explained=explained, kernels=kernels_by_flops)
  return compiled, program, tuple(notes)


def _divided(program: Program, whole: Compiled, known_live: int) -> tuple[Memory, float]:
  """Returns the parts of a program's peak, and the share of the peak that they account for.

  Args:
    program: the program.
    whole: the compiler's totals, with `temporaries` undivided.
    known_live: bytes of `temporaries` that are live at the peak, by the compiler; 0 if not known. The rest
      are gaps between buffers.
  """
  parts = by_part(live_at_peak(program).live, kept_of(program))
  known, listed = whole.temporaries, parts.total()
  divided = {name: parts[name] * known // max(listed, known, 1) for name in TRANSIENT_PARTS}
  gaps = known - known_live if 0 < known_live < known and listed <= known else 0
  missed = max(0, abs(listed - known) - gaps)
  every = whole.memory.parts | divided
  every["outputs"] = whole.memory.parts.get("outputs", 0)
  every["allocator"] = known - sum(divided.values())
  sized = {name: n for name, n in every.items() if n}
  memory = dataclasses.replace(whole.memory, parts=sized, saved_bytes=parts["activations"])
  return memory, max(0.0, 1 - missed / whole.peak) if whole.peak else 1.0


def _totals(made: CompiledProgram, arguments: Sequence[Argument], target: Target) -> Compiled:
  """Returns the compiler's own figures: the arguments by part, and all else undivided."""
  named, slots = argument_parts(arguments, target.kind)
  parts = named | {"temporaries": made.temporaries, "outputs": made.outputs - made.aliases}
  memory = Memory({name: n for name, n in parts.items() if n}, slots, (), 0, sum(parts.values()))
  names = ("arguments", "outputs", "aliases", "temporaries", "peak", "seconds")
  same = {name: getattr(made, name) for name in names}
  return Compiled(**same, memory=memory, explained=0.0, kernels={})


def _gathered(traced: TracedStep, step: Program) -> Iterator[Note]:
  """Yields a note on weights divided as the batch is, if the step leaves their gathering to the compiler."""

  def axes(part: str) -> set[str]:
    there = [a.sharding for a in traced.arguments if a.part == part and a.sharding is not None]
    names = {(s.mesh, name) for s in there for each in s.spec for name in np.atleast_1d(each or ())}
    return {str(name) for mesh, name in names if mesh.shape[name] > 1}

  if (shared := axes("master weights") & axes("batch")) and not collectives_of(step):
    text = (
      f"weights are divided over {' and '.join(sorted(shared))}: whole copies that a compiler gathers are "
    )
    yield Note(f"{text}left out; compile=True counts them", "gathered")


def _notes(
  traced: TracedStep, step: Program, products: Sequence[ProductGroup], device: Target
) -> Iterator[Note]:
  """Yields sentences for the reader of the plan, on devices, weights, units, FP8 and constants."""
  if device.devices > traced.devices and not device.is_here:
    text = (
      f"target {device.name} has {device.devices} devices and the step runs on {traced.devices}: give its "
    )
    yield Note(f"{text}arguments shardings over a mesh to use them all", "devices")
  if all(a.part != "master weights" for a in traced.arguments):
    text = "no argument was recognised as the weights: name it, as in parts={'params': 'master weights'}"
    yield Note(text, "weights")
  half = serving_dtype(step).name
  other = _OTHER_HALF.get(half, half)
  if not runs_on(device.matrix_units, half) and runs_on(device.matrix_units, other):
    text = f"{device.name} has no matrix units for {half}, which runs at the rate of float32; it has matrix "
    yield Note(f"{text}units for {other}", "units")
  if traced.policy is not None and traced.policy.fp8 and not any(narrow_bits(p.dtype) for p in products):
    yield Note("no product runs in FP8: mpjax.explain gives the reason for each", "fp8")
  held = sum(getattr(constant, "nbytes", 0) for constant in constants_of(traced.jaxpr))
  if held > _WORTH_A_NOTE:
    text = (
      f"the step closes over {bytes_text(held)} of arrays, which no part includes: pass them as arguments"
    )
    yield Note(text, "constants")
