"""`mpjax.plan`: what one step, of a user's own or of `make_train_step`, costs on a device."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from mpjax import _compat
from mpjax._lazy import nnx
from mpjax._text import bytes_text
from mpjax.planner._arguments import Argument, name_arguments
from mpjax.planner._figures import Compiled, Floor, Memory, Plan, ProductGroup
from mpjax.planner._fp8_on_target import policy_on_target
from mpjax.planner._targets import Target, get_target
from mpjax.planner.analytic import _memory, _products
from mpjax.planner.analytic._graph import Graph, make_graph
from mpjax.planner.compiled import _compile as compilers
from mpjax.planner.compiled import _hlo, _hlo_parts, _hlo_products
from mpjax.planner.compiled._differences import differences
from mpjax.policy import Policy, get_policy
from mpjax.step import TrainStep

# Of a collective's bytes, the share that a device sends in a group of two, or where the network adds up.
_SENT = {"all-reduce": 1.0, "reduce-scatter": 1.0, "collective-permute": 1.0}
_WORTH_A_NOTE = 10**6
COMPILE = ("auto", True, False)


def plan(
  step: Callable[..., Any],
  abstract_args: Sequence[Any] | Mapping[str, Any],
  *,
  target: str | Target | None = None,
  compile: bool | str = "auto",
  label: str | None = None,
  policy: Any = None,
  parts: Mapping[str | int, str] | None = None,
  donate_argnums: int | Sequence[int] | None = None,
) -> Plan:
  """What a step costs on a device that need not be there: memory by part, matrix units, collectives, time.

  Nothing is allocated: the step is traced for the shapes of its arguments, and compiled by the target's own
  compiler where that is installed.

  Args:
    step: a training step (or any function of arrays): what `mpjax.make_train_step` returns, a jitted
      function, or a plain one.
    abstract_args: its positional arguments, as arrays or `jax.ShapeDtypeStruct`; with shardings over a mesh
      (a `jax.sharding.AbstractMesh` will do) where it is to run on several devices.
    target: `None` or `"here"` for this machine; `"h200"`, `"h100:8"`, `"v5e:2x4"` and the like for another.
    compile: `"auto"`: if the target's compiler is installed; `True`: or else raise; `False`: analytic only.
    label: what to call the plan beside others; the policy's name by default.
    policy: whose compute dtype weights are served in; that of a `TrainStep` by default, else the dtype of
      most matrix FLOPs.
    parts: from a parameter of the step, by name or number, to a part of `ARGUMENT_PARTS`, where the names and
      types of the arguments do not tell which are the weights.
    donate_argnums: of a plain function; of a jitted one it is known.

  Returns:
    A `Plan`: `str()` of it is a report, `to_dict()` the data.

  Raises:
    ValueError: for an unknown target (lists them), a mesh larger than the target, a step that cannot be
      traced (says where), `parts` that fit nothing, or `compile=True` without the packages.
    mpjax.planner.compiled._compile.CompileError: if `compile=True` and the compiler fails.
  """
  device = get_target(target)
  if compile not in COMPILE:
    raise ValueError(f"compile={compile!r}: expected 'auto', True or False")
  if isinstance(abstract_args, Mapping) or not isinstance(abstract_args, (tuple, list)):
    raise ValueError(
      f"abstract_args of type {type(abstract_args).__name__}: expected a tuple of the step's positional "
      "arguments, as in mpjax.plan(step, (state, batch))"
    )
  resolved = step.policy if isinstance(step, TrainStep) and policy is None else policy
  resolved = None if resolved is None else get_policy(resolved, backend=device.kind)
  notes = []
  if isinstance(step, TrainStep):
    there, note = policy_on_target(step.policy, device)
    notes += [note] if note else []
    resolved = there if policy is None else resolved
    step = step if there == step.policy or step.needs_batch else step.with_policy(there)
  function, jitted = _function(step, donate_argnums)
  args = tuple(_abstract(argument) for argument in abstract_args)
  devices = _mesh_size(args, device)
  if device.is_here:
    args = _on_devices(args)
  traced = _trace(jitted, args)
  donated = [bool(leaf.donated) for leaf in jax.tree.leaves(traced.args_info)]
  if len(donated) != len(jax.tree.leaves(args)):
    raise ValueError("the step has static arguments: bind them with functools.partial, before jax.jit")
  arguments = name_arguments(args, _parameters(function), donated, parts)
  graph = make_graph(traced.jaxpr)
  results = len(jax.tree.leaves(traced.out_info))
  analytic = _memory.analyse(graph, arguments, donated, device, results)
  listed = _products.list_products(graph, device, devices)
  notes += _notes(device, devices, graph, arguments)
  notes += _more_notes(traced.jaxpr, listed, resolved)
  compiled, crossing = None, ()
  lacks = compilers.missing(device)
  if compile is True and lacks:
    raise ValueError(f"compile=True: {lacks}")
  if compile is not False and lacks:
    notes.append(lacks)
  elif compile is not False:
    try:
      compiled, crossing = _compile(jitted, args, donated, device, arguments, analytic)
    except compilers.CompileError as error:
      if compile is True:
        raise
      notes.append(f"the compiler failed{', out of memory' if error.out_of_memory else ''}: {error}")
  return Plan(
    label=label or _label(step, resolved),
    target=device.name,
    device=device.device,
    devices=devices,
    device_memory=device.memory,
    parameters=_parameter_count(arguments),
    memory=analytic,
    compiled=compiled,
    inference=_inference(arguments, resolved, listed),
    checkpoint=sum(a.whole for a in arguments if a.part != "batch"),
    products=listed,
    collectives=crossing,
    floor=_floor(graph, arguments, device, devices, analytic, compiled, crossing),
    notes=tuple(notes),
  )


def _function(step: Any, donate_argnums: Any) -> tuple[Any, Any]:
  """The function whose parameters are named, and the jitted one."""
  if isinstance(step, TrainStep):
    return step._step, step.jitted
  if not callable(step):
    raise ValueError(f"step of type {type(step).__name__}: expected a function")
  if hasattr(step, "trace") and hasattr(step, "lower"):
    if donate_argnums is not None:
      raise ValueError("donate_argnums with a jitted step: it is known from the step, leave it out")
    return getattr(step, "__wrapped__", step), step
  return step, jax.jit(step, donate_argnums=donate_argnums if donate_argnums is not None else ())


def _label(step: Any, policy: Policy | None) -> str:
  if policy is not None:
    return policy.name or str(policy)
  return getattr(step, "__name__", None) or "step"


def _parameters(function: Any) -> tuple[str, ...]:
  try:
    return tuple(name for name in inspect.signature(function).parameters if name != "self")
  except (TypeError, ValueError):
    return ()


def _abstract(argument: Any) -> Any:
  """Shapes of an argument's leaves, with the shardings of those that lie on a mesh."""

  def leaf(path: Any, x: Any) -> Any:
    if isinstance(x, (nnx.Module, nnx.Optimizer)):
      raise ValueError(
        f"an nnx.{'Module' if isinstance(x, nnx.Module) else 'Optimizer'} in an argument of the step: pass a "
        "TrainState (step.init), or nnx.split it and plan a function of its state"
      )
    if not hasattr(x, "shape") or not hasattr(x, "dtype"):
      if not isinstance(x, (bool, int, float, complex)):
        raise ValueError(
          f"an argument of the step holds a {type(x).__name__} at {jax.tree_util.keystr(path) or 'its top'}: "
          "expected arrays, shapes or numbers; bind what is static with functools.partial, or take it out of "
          "the tree (equinox.filter)"
        )
      x = np.asarray(x)
    sharding = getattr(x, "sharding", None)
    on_mesh = isinstance(sharding, jax.sharding.NamedSharding) and sharding.mesh.size > 1
    # As JAX reads it: without x64, NumPy's wide types and Python's numbers have 32 bits.
    dtype = x.dtype if jax.dtypes.issubdtype(x.dtype, jax.dtypes.extended) else _canonical(x.dtype)
    return jax.ShapeDtypeStruct(x.shape, dtype, sharding=sharding if on_mesh else None)

  stops = lambda x: isinstance(x, (nnx.Module, nnx.Optimizer))
  return jax.tree_util.tree_map_with_path(leaf, argument, is_leaf=stops)


def _on_devices(args: tuple[Any, ...]) -> tuple[Any, ...]:
  """Shardings over an abstract mesh as ones over this machine's devices."""

  def leaf(x: Any) -> Any:
    if x.sharding is None or not isinstance(x.sharding.mesh, jax.sharding.AbstractMesh):
      return x
    abstract = x.sharding.mesh
    devices = np.array(jax.devices()[: abstract.size]).reshape(abstract.axis_sizes)
    mesh = jax.sharding.Mesh(devices, abstract.axis_names, axis_types=abstract.axis_types)
    return x.update(sharding=jax.sharding.NamedSharding(mesh, x.sharding.spec))

  return jax.tree.map(leaf, args)


def _canonical(dtype: Any) -> Any:
  return jax.dtypes.canonicalize_dtype(dtype)


def _mesh_size(args: Any, target: Target) -> int:
  sizes = {leaf.sharding.mesh.size for leaf in jax.tree.leaves(args) if leaf.sharding is not None}
  if len(sizes) > 1:
    raise ValueError(f"arguments on meshes of {sorted(sizes)} devices: expected one mesh")
  size = max(sizes, default=1)
  if size > target.devices:
    raise ValueError(
      f"a mesh of {size} devices is larger than target {target.name}, which has {target.devices}: use a "
      f"smaller mesh, or a larger target such as {_larger(target, size)}"
    )
  return size


def _larger(target: Target, size: int) -> str:
  base = target.name.partition(":")[0]
  if target.kind == "tpu":
    side = 1
    while side * side < size:
      side *= 2
    return f"{base}:{side}x{side}" if base != "v5p" else f"{base}:{side}x{side}x1"
  return f"{base}:{size}" if not target.is_here else f"h200:{size}"


def _trace(jitted: Any, args: tuple[Any, ...]) -> Any:
  try:
    return jitted.trace(*args)
  except Exception as error:
    where = [
      f"{frame.filename.rpartition('/')[2]}:{frame.lineno}"
      for frame in traceback.extract_tb(error.__traceback__)
      if not _compat.is_library(frame.filename)
    ]
    lines = [line for line in str(error).splitlines() if line.strip()]
    message = lines[0] if lines else ""
    place = f" at {where[-1]}" if where else ""
    raise ValueError(f"the step cannot be traced{place}: {type(error).__name__}: {message}") from error


def _parameter_count(arguments: Sequence[Argument]) -> int:
  return sum(a.elements for a in arguments if a.part == "master weights")


def _inference(arguments: Sequence[Argument], policy: Policy | None, listed: Any) -> int:
  dtype = policy.compute_dtype if policy is not None else _products.half_dtype(listed)
  return sum(
    a.elements * np.dtype(dtype).itemsize if jax.dtypes.issubdtype(a.dtype, np.floating) else a.whole
    for a in arguments
    if a.part == "master weights"
  )


def _compile(
  jitted: Any,
  args: tuple[Any, ...],
  donated: Sequence[bool],
  target: Target,
  arguments: Sequence[Argument],
  analytic: Memory,
) -> tuple[Compiled, Any]:
  program = compilers.compile_step(jitted, args, [i for i, given in enumerate(donated) if given], target)
  module = _hlo.parse(program.text)
  named, slots = _memory.argument_parts(arguments, target.kind)
  outputs = program.outputs - program.aliases
  weights = {a.shape for a in arguments if a.part == "master weights"}
  parts, explained = _hlo_parts.divide(
    module, named, slots, weights, temporaries=program.temporaries, outputs=outputs, known_live=program.live
  )
  peak = program.arguments + outputs + program.temporaries
  found = _hlo_products.by_dtypes(_hlo_products.kernel_products(module, target.kind))
  compiled = Compiled(
    arguments=program.arguments,
    outputs=program.outputs,
    aliases=program.aliases,
    temporaries=program.temporaries,
    peak=peak,
    memory=parts,
    explained=explained,
    difference=differences(analytic, parts, program, sum(named.values()), target),
    kernels={name: row["flops"] for name, row in found.items()},
    seconds=program.seconds,
  )
  return compiled, _hlo_products.collectives(module)


def _floor(
  graph: Graph,
  arguments: Sequence[Argument],
  target: Target,
  devices: int,
  analytic: Memory,
  compiled: Compiled | None,
  crossing: Any,
) -> Floor | None:
  units = _products.seconds_on_units(graph, target, devices)
  if units is None or not target.bandwidth:
    return None
  cache = target.cache
  written = _memory.written_bytes(graph, arguments, target.kind)
  moved = _memory.floor_bytes(compiled.memory if compiled else analytic, written, cache)
  parts = {"matrix units": units, "memory": moved / target.bandwidth}
  if crossing and target.interconnect and devices > 1:
    # The least that each device sends, whatever the algorithm and the size of the groups.
    sent = sum(c.nbytes * _SENT.get(c.operation, 0.5) for c in crossing)
    parts["interconnect"] = sent / target.interconnect
  bound = max(parts, key=lambda name: parts[name])
  return Floor(parts[bound], parts, bound, moved)


def _more_notes(jaxpr: Any, listed: Sequence[ProductGroup], policy: Policy | None) -> list[str]:
  notes = []
  if policy is not None and policy.fp8 and not any(p.dtype.startswith("float8") for p in listed):
    notes.append("no product is FP8: mpjax.explain says why each is not")
  held = sum(getattr(constant, "nbytes", 0) for constant in _compat.constants(jaxpr))
  if held > _WORTH_A_NOTE:
    notes.append(
      f"the step closes over {bytes_text(held)} of arrays, which no part counts: pass them as arguments"
    )
  return notes


def _notes(target: Target, devices: int, graph: Graph, arguments: Sequence[Argument]) -> list[str]:
  notes = []
  if target.devices > devices and not target.is_here:
    notes.append(
      f"target {target.name} has {target.devices} devices and the step runs on {devices}: give its arguments "
      "shardings over a mesh to use them all"
    )
  if not any(a.part == "master weights" for a in arguments):
    notes.append("no argument was taken for the weights: say which, as in parts={'params': 'master weights'}")
  state = {a.part for a in arguments} & {"master weights", "optimizer state"}
  per_element = sum(a.whole for a in arguments if a.part in state) / max(1, _parameter_count(arguments))
  weights = {
    i: (a.path.partition("/")[2] or a.path, round(per_element))
    for i, a in enumerate(arguments)
    if a.part == "master weights"
  }
  return [*notes, *_products.padding_advice(graph, target, weights)]
