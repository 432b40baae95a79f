"""The one place that knows which JAX runs."""

from __future__ import annotations

import contextlib
import functools
import math
import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.extend.core
import numpy as np
from jax._src import clusters, distributed, sharding_impls, source_info_util
from jax._src.interpreters import ad, partial_eval
from jax.extend.core import Literal, Var

if TYPE_CHECKING:
  from typing_extensions import TypeIs

# Those of some supported releases of JAX alone, among the primitives that mpjax knows.
PRIMITIVES_OF_SOME_RELEASES = frozenset(
  [
    "dot_product_attention_bwd_wrapper",
    "dot_product_attention_fp8_bwd_wrapper",
    "dot_product_attention_fp8_fwd_wrapper",
    "dot_product_attention_fwd_wrapper",
    "log2",
    "one_minus_square",
    "polynomial",
    "reduced_vary_cast",
    "relayout",
    "shard_alike",
    "unreduced_pmax",
    "unreduced_pmin",
    "vary_unreduced_cast",
  ]
)


def newer(name: str) -> jax.extend.core.Primitive | str:
  """`jax.lax`'s primitive of a name, `log2_p`; in a JAX that has none yet, what it will be called: `log2`."""
  return getattr(jax.lax, name, name.removesuffix("_p"))


def is_array(leaf: Any) -> bool:
  """Whether JAX can trace `leaf` as an array: not so for `float0`."""
  if isinstance(leaf, (bool, int, float, complex)):
    return True
  return isinstance(leaf, (jax.Array, np.ndarray, np.generic)) and leaf.dtype != jax.dtypes.float0


def is_variable(atom: Var | Literal) -> TypeIs[Var]:
  """Returns whether a jaxpr's atom is a variable, and not a literal."""
  return not isinstance(atom, Literal)


def open_jaxpr(jaxpr: Any) -> Any:
  """A jaxpr with `eqns`, whether it came closed over its constants or not."""
  return getattr(jaxpr, "jaxpr", jaxpr)


def constants(jaxpr: Any) -> list[Any]:
  """The constants that a jaxpr is closed over, in the order of its `constvars`."""
  return list(getattr(jaxpr, "consts", ()))


def bodies(equation: Any) -> list[Any]:
  """The jaxprs among the parameters of a higher-order primitive's equation."""
  found = []
  for value in equation.params.values():
    for item in value if isinstance(value, (tuple, list)) else (value,):
      if hasattr(open_jaxpr(item), "eqns"):
        found.append(item)
  return found


def module_path(equation: Any) -> str:
  """The scopes that an equation was traced in, without transformations and einsums: `GPT/h0/attn`."""
  stack = equation.source_info.name_stack.stack
  return "/".join(e.name for e in stack if type(e).__name__ == "Scope" and "->" not in e.name)


def operation(equation: Any) -> str:
  """The name of the function that a call is of, `softmax`; elsewhere the primitive's."""
  name = equation.params.get("name")
  if not name and "call_jaxpr" in equation.params:
    info = getattr(open_jaxpr(equation.params["call_jaxpr"]), "debug_info", None)
    name = str(getattr(info, "func_src_info", "")).partition(" at ")[0]
  return str(name) if name and str(name).isidentifier() else equation.primitive.name


def backward_depth(equation: Any) -> int:
  """How many backward passes an equation is inside of, as its scopes tell."""
  stack = equation.source_info.name_stack.stack
  return sum(type(e).__name__ == "Transform" and e.name == "transpose" for e in stack)


@contextlib.contextmanager
def at(equation: Any) -> Iterator[None]:
  """In which new equations bear an equation's source line, scope and context."""
  info = equation.source_info
  stack = source_info_util.current_name_stack() + info.name_stack
  with source_info_util.user_context(info.traceback, name_stack=stack), equation.ctx.manager:
    yield


def bind(equation: Any, operands: list[Any], **changes: Any) -> list[Any]:
  """Applies an equation's primitive to other operands, with some parameters changed."""
  parameters = equation.primitive.get_bind_params({**equation.params, **changes})
  out = equation.primitive.bind(*operands, **parameters)
  return list(out) if equation.primitive.multiple_results else [out]


def bind_jit(equation: Any, operands: list[Any], extra: list[Any], closed: Any) -> list[Any]:
  """A `jit` of another body, whose inputs are `operands` and then `extra`, of any sharding."""
  n = len(extra)
  p = equation.params
  more = {
    "in_shardings": (*p["in_shardings"], *(sharding_impls.UNSPECIFIED,) * n),
    "in_layouts": (*p["in_layouts"], *(None,) * n),
    "donated_invars": (*p["donated_invars"], *(False,) * n),
  }
  return bind(equation, [*operands, *extra], jaxpr=closed, **(more if n else {}))


def trace(fun: Callable[..., Any], operands: list[Any]) -> Any:
  """The closed jaxpr of `fun` for operands of these types."""
  return jax.make_jaxpr(fun)(*operands)


def trace_open(fun: Callable[..., Any], operands: list[Any]) -> tuple[Any, list[Any]]:
  """A jaxpr without constants, and what to pass before `operands` in their place."""
  closed = trace(fun, operands)
  return partial_eval.convert_constvars_jaxpr(open_jaxpr(closed)), constants(closed)


def joined_branches(traced: list[tuple[Any, list[Any]]], operands: list[Any]) -> tuple[Any, ...]:
  """Branches that take one list of operands: the constants of all of them, in order, and then `operands`."""
  counts = [len(own) for _, own in traced]
  every = [c for _, own in traced for c in own]

  def branch(i: int, jaxpr: Any) -> Any:
    start = sum(counts[:i])

    def run(*xs: Any) -> list[Any]:
      return as_function(jaxpr)(*xs[start : start + counts[i]], *xs[len(every) :])

    return trace(run, [*every, *operands]) if every else jax.extend.core.ClosedJaxpr(jaxpr, [])

  return tuple(branch(i, jaxpr) for i, (jaxpr, _) in enumerate(traced))


class ScanParts(NamedTuple):
  """How many operands of a `scan` are constants and carries, and its options for `jax.lax.scan`."""

  consts: int
  carry: int
  options: dict[str, Any]


def scan_parts(equation: Any) -> ScanParts:
  """The layout of a `scan`'s operands, which releases of JAX write down in two ways."""
  p = equation.params
  if "num_consts" in p:
    consts, carry = p["num_consts"], p["num_carry"]
  else:
    consts, carry = (len(part) for part in p["ft_in"].unpack()[:2])
  return ScanParts(consts, carry, {key: p[key] for key in ("length", "reverse", "unroll")})


def shard_map_like(
  equation: Any, fun: Callable[..., Any], replicated: int = 0, split: int = 0
) -> tuple[Callable[..., Any], int]:
  """`fun` under the same `shard_map` as an equation's, with more operands, and over how many devices.

  Args:
    equation: the equation.
    fun: takes its operands and the further ones.
    replicated: how many further operands are the same everywhere.
    split: how many have a row for each device, after those.
  """
  p = equation.params
  axes = tuple(sorted(p["newly_manual_axes"]))
  more = (*(jax.sharding.PartitionSpec(),) * replicated, *(jax.sharding.PartitionSpec(axes),) * split)
  mapped = jax.shard_map(
    fun,
    mesh=p["mesh"],
    in_specs=(*p["in_specs"], *more),
    out_specs=tuple(p["out_specs"]),
    axis_names=set(p["newly_manual_axes"]),
    check_vma=p["check_vma"],
  )
  return mapped, math.prod(p["mesh"].shape[axis] for axis in axes)


def custom_jvp_rule(equation: Any) -> Callable[..., list[Any]]:
  """The rule of a `custom_jvp_call`: (*primals, *tangents) to [*primals, *tangents]."""
  _, rule = equation.primitive.get_bind_params(equation.params)["subfuns"]
  return rule.call_wrapped


def custom_vjp_rules(equation: Any) -> tuple[Callable[..., Any], Callable[..., Any]]:
  """The rules of a `custom_vjp_call`.

  Returns:
    forward: (operands, which of them are differentiated) to (residuals, outputs), two lists.
    backward: (residuals, cotangents of the outputs) to the cotangents of the operands, `None` for zero.
  """
  _, forward, backward = equation.primitive.get_bind_params(equation.params)["subfuns"]

  def run_forward(operands: list[Any], perturbed: list[bool]) -> tuple[list[Any], list[Any]]:
    out = forward.call_wrapped(*(x for pair in zip(operands, perturbed, strict=True) for x in pair))
    # Residuals that are operands are not returned a second time.
    _, _, forwarded = equation.params["out_trees"]()
    returned = iter(out)
    residuals = [next(returned) if i is None else operands[i] for i in forwarded]
    return residuals, list(returned)

  def run_backward(residuals: list[Any], cotangents: list[Any]) -> list[Any]:
    out = backward.call_wrapped(*residuals, *cotangents)
    out = out[0] if isinstance(out, tuple) else out  # later releases return logs beside
    return [None if isinstance(x, (ad.Zero, jax.custom_derivatives.SymbolicZero)) else x for x in out]

  return run_forward, run_backward


def eval_jaxpr(closed: Any, at_definition: Callable[[Any, Any], Any]) -> list[Any]:
  """Evaluates a closed jaxpr without arguments, each value replaced by what `at_definition` makes of it.

  Args:
    closed: what `jax.make_jaxpr(f)()` returns.
    at_definition: (variable, value) -> value that every later equation reads.
  """
  environment = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
  read = lambda atom: environment[atom] if is_variable(atom) else atom.val
  for equation in closed.jaxpr.eqns:
    with at(equation):
      out = bind(equation, [read(atom) for atom in equation.invars])
    for variable, value in zip(equation.outvars, out, strict=True):
      environment[variable] = at_definition(variable, value)
  return [read(atom) for atom in closed.jaxpr.outvars]


def vary_like(tree: Any, like: Any) -> Any:
  """`tree` marked as varying over the `shard_map` axes that `like` varies over; elsewhere as it is."""
  axes = varying_axes(like)

  def leaf(x: Any) -> Any:
    missing = axes - varying_axes(x)
    return jax.lax.pcast(x, tuple(sorted(missing)), to="varying") if missing else x

  return jax.tree.map(leaf, tree) if axes else tree


def permuted_sharding(aval: Any, permutation: Sequence[int]) -> Any:
  """The sharding of what becomes a value of this type by a transpose; `None` without explicit axes."""
  if not is_explicit(aval):
    return None
  sharding = aval.sharding
  spec = dict(zip(permutation, sharding.spec, strict=True))
  return sharding.update(spec=jax.sharding.PartitionSpec(*(spec[i] for i in range(len(permutation)))))


def is_explicit(aval: Any) -> bool:
  """Whether a value's type says how it lies over a mesh."""
  sharding = getattr(aval, "sharding", None)
  return bool(sharding is not None and getattr(sharding.mesh, "explicit_axes", ()))


def varying_axes(tree: Any) -> frozenset[str]:
  """The `shard_map` axes that a leaf of `tree` is known to vary over: none where that is not tracked."""
  return frozenset().union(*(varying_axes_of_type(jax.typeof(leaf)) for leaf in jax.tree.leaves(tree)))


def varying_axes_of_type(kind: Any) -> frozenset[str]:
  """The `shard_map` axes that values of a type vary over."""
  if hasattr(kind, "manual_axis_type"):
    return kind.manual_axis_type.varying
  return getattr(kind, "vma", frozenset())  # the name in earlier releases


def closure_as_argument(
  fun: Callable[..., Any], *args: Any
) -> tuple[Callable[..., Any], list[Any], set[str]]:
  """`fun` with the arrays that it closes over as its first argument, those, and the axes of collectives."""
  closed, shapes = jax.make_jaxpr(fun, return_shape=True)(*args)
  structure: Any = jax.tree.structure(shapes)

  def converted(constants: list[Any], *args: Any) -> Any:
    run = jax.extend.core.jaxpr_as_fun(jax.extend.core.ClosedJaxpr(closed.jaxpr, constants))
    return jax.tree.unflatten(structure, run(*jax.tree.leaves(args)))

  return converted, list(closed.consts), _collective_axes(closed.jaxpr)


def _collective_axes(jaxpr: Any) -> set[str]:
  axes: set[str] = set()
  for equation in jaxpr.eqns:
    if equation.primitive.name in ("pvary", "pcast"):
      continue  # a matter of types alone
    for key in ("axes", "axis_name"):
      names = equation.params.get(key, ())
      axes |= {name for name in (names if isinstance(names, tuple) else (names,)) if isinstance(name, str)}
    for value in equation.params.values():
      for item in value if isinstance(value, (tuple, list)) else (value,):
        inner = getattr(item, "jaxpr", item)
        axes |= _collective_axes(inner) if hasattr(inner, "eqns") else set()
  return axes


def transforms(equation: Any) -> list[str]:
  """The transformations that an equation was traced under, outermost first: `transpose`, `jvp`."""
  stack = equation.source_info.name_stack.stack
  return [e.name for e in stack if type(e).__name__ == "Transform"]


def scopes(equation: Any) -> list[list[str]]:
  """The scopes that an equation was traced in, without einsums, in runs between its transformations."""
  runs: list[list[str]] = [[]]
  for e in equation.source_info.name_stack.stack:
    if type(e).__name__ != "Scope":
      runs.append([])
    elif "->" not in e.name:
      runs[-1] += e.name.split("/")
  return [run for run in runs if run]


def as_function(jaxpr: Any) -> Callable[..., list[Any]]:
  """A jaxpr without constants of its own, or closed over them, as a function of its inputs."""
  closed = jaxpr if hasattr(jaxpr, "consts") else jax.extend.core.ClosedJaxpr(jaxpr, [])
  return jax.extend.core.jaxpr_as_fun(closed)


# Code that a user's model goes through, and that is not the line that the user wrote.
_LIBRARIES = ("jax", "jaxlib", "flax", "optax", "haiku", "equinox", "jmp", "einops")
_OWN = pathlib.Path(__file__).parent


@functools.cache
def is_library(file: str) -> bool:
  """Whether a file is of JAX, of a library over it or of this package, and not of the user's program."""
  path = pathlib.Path(file)
  if path.is_relative_to(_OWN):
    return not path.is_relative_to(_OWN / "train")
  parts = path.parts
  return "site-packages" in parts and parts[parts.index("site-packages") + 1] in _LIBRARIES


def source_line(equation: Any) -> str:
  """File and line of the user's program where an equation was traced, `model.py:31`; empty for none."""
  for frame in source_info_util.user_frames(equation.source_info.traceback):
    if not is_library(frame.file_name):
      return f"{pathlib.Path(frame.file_name).name}:{frame.start_line}"
  return ""


class Coordination(NamedTuple):
  """This process among those that `jax.distributed` has started: without it, one of one."""

  client: Any
  process: int
  processes: int


def coordination() -> Coordination:
  """Returns the client of the coordination service, `None` without one; touches no device.

  Private: waits for a public key-value store in `jax.distributed`. `jax.process_index` would touch devices.
  """
  state = distributed.global_state
  return Coordination(state.client, state.process_id, state.num_processes)


def cluster_kinds() -> list[type[clusters.ClusterEnv]]:
  """Returns the clusters that `jax.distributed.initialize` recognises by itself.

  Private: it starts what it finds; no public function says whether there is something to start.
  """
  return [kind for kind in clusters.ClusterEnv._cluster_types if not kind.opt_in_only_method]
