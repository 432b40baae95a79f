"""`mpjax.plan`: what one step, of a user's own or of `make_train_step`, costs on a device."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Never

import numpy as np

from mpjax._calls import refuse_keywords
from mpjax._render.plain_text import bytes_text
from mpjax._types import PolicyLike, PyTree
from mpjax.formats import narrow_bits
from mpjax.jaxpr import constants_of
from mpjax.planner._arguments import Argument, argument_parts
from mpjax.planner._from_jaxpr import from_jaxpr
from mpjax.planner._memory import analytic_memory, host_memory, stored_program
from mpjax.planner._products import list_products, model_flops
from mpjax.planner._program import Program, by_part, collectives_of, live_at_peak, loops_of
from mpjax.planner._report import Plan
from mpjax.planner._results import TRANSIENT_PARTS, Compiled, Memory, Note, ProductGroup
from mpjax.planner._targets import Target, get_target, missing
from mpjax.planner._time import compiled_time, time_floor, traced_time
from mpjax.planner._traced_step import TracedStep, trace_step
from mpjax.planner.compiled._compile import CompiledProgram, CompileError, compile_step
from mpjax.planner.compiled._from_hlo import from_hlo, kept_of
from mpjax.planner.compiled._hlo import parse
from mpjax.planner.compiled._work import kernel_flops, state_kernels

_EXPLAINED = 0.9  # the share of the peak that a program's buffers must explain to be shown
_WORTH_A_NOTE = 10**6
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
  memory = analytic_memory(program, traced.arguments, device)
  products = list_products(program, device)
  compiled, by_compiler, notes = _by_the_compiler(traced, program, device, compile)
  crossing = by_compiler or program
  return Plan(
    label=label or traced.label,
    target=device.name,
    device=device.device,
    devices=traced.devices,
    device_memory=device.memory,
    usable_memory=device.usable,
    parameters=sum(a.elements for a in traced.arguments if a.part == "master weights"),
    memory=memory,
    compiled=compiled,
    products=products,
    collectives=collectives_of(crossing),
    floor=time_floor(program, crossing, compiled.memory if compiled else memory, device),
    notes=(*_notes(traced, products, device), *notes),
    fp8=traced.fp8,
    model_flops=model_flops(program),
    peak_flops=device.flops.get("bfloat16") or max(device.flops.values(), default=0.0),
    time=compiled_time(by_compiler, device) if by_compiler else traced_time(program, device),
    host=host_memory(program, traced.arguments),
  )


def _by_the_compiler(
  traced: TracedStep, step: Program, device: Target, compile: bool | str
) -> tuple[Compiled | None, Program | None, tuple[Note, ...]]:
  """Returns the compiler's figures and its program, `None` without them, and notes.

  Raises:
    ValueError: if `compile` is True and the compiler is not installed.
    CompileError: if `compile` is True and the compiler fails.
  """
  lacks = missing(device) if compile else ""
  if lacks and compile is True:
    raise ValueError(f"compile=True: {lacks}")
  notes = [Note(lacks, "install")] if lacks else []
  if compile and not lacks:
    donated = [i for i, given in enumerate(traced.donated) if given]
    try:
      made = compile_step(traced.jitted, traced.args, donated, device)
      return read_program(made, traced.arguments, device, step)
    except CompileError as error:
      if compile is True:
        raise
      kind = "out of memory" if error.out_of_memory else "failed"
      text = f"the compiler failed{', out of memory' if error.out_of_memory else ''}: {error}"
      notes = [Note(text, kind)]
  return None, None, (*loops_of(step, "the step"), *_gathered(traced, step), *notes)


def read_program(
  made: CompiledProgram, arguments: Sequence[Argument], target: Target, traced: Program
) -> tuple[Compiled, Program | None, tuple[Note, ...]]:
  """Reads a compiled program; if it cannot be read, the totals of the compiler's memory analysis are left.

  Args:
    made: the output of the target's compiler.
    arguments: the leaves of the step's arguments.
    target: the target of the compiler.
    traced: the traced program, which states the FLOPs of kernels.

  Returns:
    Totals, with parts and kernels if the program could be read; the program; and what is not understood in
    it.
  """
  named, slots = argument_parts(arguments)

  def figures(transient: dict[str, int], saved: int, explained: float, flops: dict[str, int]) -> Compiled:
    parts = named | transient | {"outputs": made.outputs - made.aliases}
    memory = Memory({name: n for name, n in parts.items() if n}, slots, (), saved, sum(parts.values()))
    names = ("arguments", "outputs", "aliases", "temporaries", "peak")
    same = {name: getattr(made, name) for name in names}
    return Compiled(**same, memory=memory, explained=explained, kernels=flops)

  weights = {shape for a in arguments if a.part == "master weights" for shape in (a.shape, a.local)}
  known, undivided = made.temporaries, {"temporaries": made.temporaries}
  try:
    program = from_hlo(parse(made.proto), target.kind, weights)
    state_kernels(program, traced)
    parts = by_part(live_at_peak(program).live, kept_of(program))
    flops = kernel_flops(program)
    notes = loops_of(program, "the compiled program")
  except Exception as error:
    reason = ": ".join(filter(None, (type(error).__name__, str(error).partition("\n")[0])))
    text = (
      f"the compiled program cannot be read ({reason[:200]}): the compiler's totals are shown, without "
      "parts and kernels, and the collectives that the step states"
    )
    return figures(undivided, 0, 0.0, {}), None, (Note(text, "program"),)
  listed = parts.total()
  divided = {name: parts[name] * known // max(listed, known, 1) for name in TRANSIENT_PARTS}
  divided["allocator"] = known - sum(divided.values())
  # The compiler may say what is live at the peak: the rest of its temporaries are gaps between buffers.
  gaps = known - made.live if 0 < made.live < known and listed <= known else 0
  missed = max(0, abs(listed - known) - gaps)
  explained = max(0.0, 1 - missed / made.peak) if made.peak else 1.0
  if explained < _EXPLAINED:
    text = f"temporaries: the buffers in the program do not explain {bytes_text(missed)} of the compiler's "
    notes = (*notes, Note(f"{text}{bytes_text(known)}, which are shown undivided", "program"))
    divided, parts = undivided, collections.Counter()
  return figures(divided, parts["activations"], explained, flops), program, notes


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


def _notes(traced: TracedStep, products: Sequence[ProductGroup], device: Target) -> Iterator[Note]:
  """Yields sentences for the reader of the plan, on devices, weights, FP8 and constants."""
  if device.devices > traced.devices and not device.is_here:
    has = f"target {device.name} has {device.devices} devices and the step runs on {traced.devices}"
    yield Note(f"{has}: give its arguments shardings over a mesh to use them all", "devices")
  if all(a.part != "master weights" for a in traced.arguments):
    text = "no argument was recognised as the weights: name it, as in parts={'params': 'master weights'}"
    yield Note(text, "weights")
  if traced.policy is not None and traced.policy.fp8 and not any(narrow_bits(p.dtype) for p in products):
    yield Note("no product runs in FP8: mpjax.explain gives the reason for each", "fp8")
  held = sum(getattr(constant, "nbytes", 0) for constant in constants_of(traced.jaxpr))
  if held > _WORTH_A_NOTE:
    text = f"the step closes over {bytes_text(held)} of arrays, which no part includes"
    yield Note(f"{text}: pass them as arguments", "constants")
