"""Traces a step for the shapes of its arguments: both halves of a plan start from it."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from mpjax._calls import require_call
from mpjax._lazy import nnx
from mpjax._own_autocast import require_no_autocast
from mpjax._types import ClosedJaxpr, PolicyLike, PyTree
from mpjax.casting import autocast
from mpjax.jaxpr import is_library
from mpjax.planner._arguments import Argument, name_arguments
from mpjax.planner._targets import Target, policy_on_target
from mpjax.policy import Policy, get_policy
from mpjax.sharding import in_host_memory
from mpjax.step import TrainStep, require_state_and_batch


@dataclasses.dataclass(frozen=True)
class TracedStep:
  """A traced step.

  Attributes:
    jitted: the function to compile.
    args: shapes of its arguments, with shardings if it runs on several devices.
    jaxpr: its program.
    arguments: the leaves of `args`, each with its part of memory.
    donated: for each leaf, whether the results may take its memory.
    devices: number of devices that it runs on.
    policy: the policy whose dtypes it computes in; `None` if not known.
    label: the plan's name.
    fp8: the FP8 recipe and the formats in force on the target, in words; empty without a recipe.
  """

  jitted: jax.stages.Wrapped
  args: tuple[PyTree, ...]
  jaxpr: ClosedJaxpr
  arguments: Sequence[Argument]
  donated: Sequence[bool]
  devices: int
  policy: Policy | None
  label: str
  fp8: str


def trace_step(
  step: Callable[..., Any],
  args: tuple[PyTree, ...],
  device: Target,
  *,
  policy: PolicyLike | None = None,
  parts: Mapping[str | int, str] | None = None,
  donate_argnums: int | Sequence[int] | None = None,
) -> TracedStep:
  """Traces a step; takes the arguments of `mpjax.plan`.

  Raises:
    TypeError: for arguments that the step does not take.
    ValueError: for arguments that are not arrays or lie on a mesh larger than the target, for a step that
      cannot be traced, and for `parts` that fit nothing.
  """
  resolved = None if policy is None else get_policy(policy, backend=device.kind)
  fp8 = ""
  if isinstance(step, TrainStep):
    args = require_state_and_batch("plan", args)
    there, fp8 = policy_on_target(step.policy if resolved is None else resolved, device)
    if there != step.policy and not (resolved is None and step.needs_batch):
      step, args = _adopted(step, there.without_histories(), args)
    if step.layout is not None:
      args = step.layout.shapes(*args)
    resolved = there if resolved is None else resolved
  else:
    require_call("plan", step, args, how=", target='h100'")
    if resolved is not None:
      require_no_autocast(step, resolved)
      resolved, fp8 = policy_on_target(resolved.without_histories(), device)
  jitted, names = _jitted(step, args, resolved, donate_argnums)
  args = tuple(_abstract(argument) for argument in args)
  devices = _mesh_size(args, device)
  if device.is_here:
    args = _on_devices(args)
  traced = _trace(jitted, args)
  donated = [bool(leaf.donated) for leaf in jax.tree.leaves(traced.args_info)]
  if len(donated) != len(jax.tree.leaves(args)):
    raise ValueError("the step has static arguments: bind them with functools.partial, before jax.jit")
  return TracedStep(
    jitted=jitted,
    args=args,
    jaxpr=traced.jaxpr,
    arguments=name_arguments(args, names, parts, device.kind),
    donated=donated,
    devices=devices,
    policy=resolved,
    label=resolved.label if resolved is not None else getattr(step, "__name__", "step"),
    fp8=fp8,
  )


def _adopted(
  step: TrainStep, policy: Policy, args: tuple[PyTree, PyTree]
) -> tuple[TrainStep, tuple[PyTree, PyTree]]:
  """Returns the step under another policy, with the shapes of its state in the given state's layout."""
  state, batch = args
  other = step.with_policy(policy)
  shapes = jax.eval_shape(lambda s: other.adopt(s, step, warn=False), state)
  if other.layout is not None:
    return other, (shapes, batch)
  before = dict(jax.tree_util.tree_leaves_with_path(state))

  def placed(path: jax.tree_util.KeyPath, x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    there = before.get(path, x)
    return x.update(sharding=getattr(there, "sharding", None)) if there.shape == x.shape else x

  return other, (jax.tree_util.tree_map_with_path(placed, shapes), batch)


def _jitted(
  step: Any, args: tuple[PyTree, ...], policy: Policy | None, donate_argnums: int | Sequence[int] | None
) -> tuple[jax.stages.Wrapped, tuple[str, ...]]:
  """Returns the jitted function of a step, under a policy if given, and the names of its parameters."""
  if isinstance(step, TrainStep):
    return step.jitted, ("state", "batch")
  names: tuple[str, ...] = ()
  with contextlib.suppress(TypeError, ValueError):
    parameters = inspect.signature(getattr(step, "__wrapped__", step)).parameters
    names = tuple(name for name in parameters if name != "self")
  if hasattr(step, "trace") and hasattr(step, "lower"):
    if donate_argnums is not None:
      raise ValueError("donate_argnums with a jitted step: it is known from the step, leave it out")
    if policy is None:
      return step, names
    given, _ = _trace(step, tuple(map(_abstract, args))).args_info
    donate_argnums = [i for i, info in enumerate(given) if any(x.donated for x in jax.tree.leaves(info))]
  fun = step if policy is None else autocast(step, policy)
  return jax.jit(fun, donate_argnums=() if donate_argnums is None else donate_argnums), names


def _abstract(argument: PyTree) -> PyTree:
  """Returns the shapes of an argument's leaves, with shardings for leaves on a mesh or on the host.

  Raises:
    ValueError: for leaves that are neither arrays nor numbers.
  """

  def leaf(path: jax.tree_util.KeyPath, x: Any) -> jax.ShapeDtypeStruct:
    if isinstance(x, nnx_types):
      raise ValueError(
        f"an nnx.{'Module' if isinstance(x, nnx.Module) else 'Optimizer'} in an argument of the step: pass a "
        "TrainState (step.init), or nnx.split it and plan a function of its state"
      )
    if not hasattr(x, "shape") or not hasattr(x, "dtype"):
      if not isinstance(x, (bool, int, float, complex)):
        raise ValueError(
          f"an argument of the step holds a {type(x).__name__} at {jax.tree_util.keystr(path) or 'its top'}: "
          "expected arrays, shapes or numbers; bind static values with functools.partial, or take them out "
          "of the tree (equinox.filter)"
        )
      x = np.asarray(x)
    there = getattr(x, "sharding", None)
    on_mesh = isinstance(there, jax.sharding.NamedSharding) and (there.mesh.size > 1 or in_host_memory(x))
    # As in JAX: without x64, NumPy's wide types and Python's numbers have 32 bits.
    extended = jax.dtypes.issubdtype(x.dtype, jax.dtypes.extended)
    dtype = x.dtype if extended else jax.dtypes.canonicalize_dtype(x.dtype)
    return jax.ShapeDtypeStruct(x.shape, dtype, sharding=there if on_mesh else None)

  nnx_types = (nnx.Module, nnx.Optimizer)
  return jax.tree_util.tree_map_with_path(leaf, argument, is_leaf=lambda x: isinstance(x, nnx_types))


def _on_devices(args: tuple[PyTree, ...]) -> tuple[PyTree, ...]:
  """Puts shardings over an abstract mesh on this machine's devices."""

  def leaf(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    if x.sharding is None or not isinstance(x.sharding.mesh, jax.sharding.AbstractMesh):
      return x
    abstract = x.sharding.mesh
    devices = np.array(jax.devices()[: abstract.size]).reshape(abstract.axis_sizes)
    mesh = jax.sharding.Mesh(devices, abstract.axis_names, axis_types=abstract.axis_types)
    there = jax.sharding.NamedSharding(mesh, x.sharding.spec, memory_kind=x.sharding.memory_kind)
    return x.update(sharding=there)

  return jax.tree.map(leaf, args)


def _mesh_size(args: tuple[PyTree, ...], target: Target) -> int:
  """Returns the number of devices that the arguments lie on.

  Raises:
    ValueError: for several meshes, or a mesh that is larger than the target.
  """
  sizes = {leaf.sharding.mesh.size for leaf in jax.tree.leaves(args) if leaf.sharding is not None}
  if len(sizes) > 1:
    raise ValueError(f"arguments on meshes of {sorted(sizes)} devices: expected one mesh")
  size = max(sizes, default=1)
  if size > target.devices:
    raise ValueError(
      f"a mesh of {size} devices is larger than target {target.name}, which has {target.devices}: use a "
      f"smaller mesh, or a larger target, such as target='h200:{size}' or, on 16 devices, 'v5e:4x4'"
    )
  return size


def _trace(jitted: jax.stages.Wrapped, args: tuple[PyTree, ...]) -> jax.stages.Traced:
  """Traces a function.

  Raises:
    ValueError: if the function raises; the message has the line of the user's program.
  """
  try:
    return jitted.trace(*args)
  except Exception as error:
    frames = traceback.extract_tb(error.__traceback__)
    where = [f"{f.filename.rpartition('/')[2]}:{f.lineno}" for f in frames if not is_library(f.filename)]
    message = next((line for line in str(error).splitlines() if line.strip()), "")
    place = f" at {where[-1]}" if where else ""
    raise ValueError(f"the step cannot be traced{place}: {type(error).__name__}: {message}") from error
