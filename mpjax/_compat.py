"""The only place for JAX's private parts and differences by release; functions name what they wait for."""

from __future__ import annotations

import contextlib
import functools
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import jax
import jax.extend.core
import numpy as np
from jax._src import clusters, distributed, sharding_impls, source_info_util
from jax._src.interpreters import partial_eval
from jax._src.lax import lax
from jax.core import AbstractValue, ShapedArray
from jax.interpreters import ad
from jax.sharding import NamedSharding

from mpjax._types import AnyJaxpr, Array, ClosedJaxpr, Jaxpr, JaxprEqn, PyTree

# Waits for a public name of the primitive.
ragged_dot_general_p: jax.extend.core.Primitive = lax.ragged_dot_general_p


def newer(name: str) -> jax.extend.core.Primitive | str:
  """`jax.lax`'s primitive of a name, such as `log2_p`; in an older JAX its future name, `log2`.

  Waits for the release that has it to be the oldest supported one.
  """
  return getattr(jax.lax, name, name.removesuffix("_p"))


def has_newer_xla() -> bool:
  """Returns whether compilers are those of JAX 0.12 or later, which store less than earlier ones.

  Waits for JAX 0.12 to be the oldest supported release.
  """
  return jax.__version_info__ >= (0, 12)


@functools.cache
def defined_by_jax(primitive: jax.extend.core.Primitive) -> bool:
  """Returns whether a primitive is one of JAX's own: whether a module of JAX holds it.

  Waits for public names of the primitives that mpjax knows by a string.
  """
  modules = [module for name, module in sys.modules.items() if name.partition(".")[0] == "jax"]
  return any(value is primitive for module in modules for value in list(vars(module).values()))


def custom_jvp_rule(equation: JaxprEqn) -> Callable[..., list[Any]]:
  """Returns the rule of a `custom_jvp_call`: (*primals, *tangents) to [*primals, *tangents].

  Waits for a public way to read an equation's derivative rule.
  """
  return _functions_of(equation)[1]


def custom_vjp_rules(equation: JaxprEqn) -> tuple[Callable[..., Any], Callable[..., Any]]:
  """Returns the rules of a `custom_vjp_call`.

  Waits for the same as `custom_jvp_rule`.

  Returns:
    forward: (operands, which operands are differentiated) to (residuals, outputs), two lists.
    backward: (residuals, cotangents of the outputs) to the cotangents of the operands, `None` for zero.
  """
  _, forward, backward = _functions_of(equation)

  def run_forward(operands: list[Any], perturbed: list[bool]) -> tuple[list[Any], list[Any]]:
    out = forward(*(x for pair in zip(operands, perturbed, strict=True) for x in pair))
    # Residuals that are operands are not returned again.
    returned, forwarded = iter(out), equation.params["out_trees"]()[2]
    residuals = [next(returned) if i is None else operands[i] for i in forwarded]
    return residuals, list(returned)

  def run_backward(residuals: list[Any], cotangents: list[Any]) -> list[Any]:
    out = backward(*residuals, *cotangents)
    out = out[0] if isinstance(out, tuple) else out  # from JAX 0.12 on with logs
    return [None if isinstance(x, (ad.Zero, jax.custom_derivatives.SymbolicZero)) else x for x in out]

  return run_forward, run_backward


def _functions_of(equation: JaxprEqn) -> list[Callable[..., Any]]:
  return [fun.call_wrapped for fun in equation.primitive.get_bind_params(equation.params)["subfuns"]]


def takes_symbolic_zeros(equation: JaxprEqn) -> bool:
  """Returns whether the backward rule of a `custom_vjp_call` takes a cotangent that is a symbolic zero.

  Waits for JAX 0.12 to be the oldest supported release: there all of them do.
  """
  return bool(equation.params["symbolic_zeros"]) or jax.__version_info__ >= (0, 12)


def product_type(
  product: jax.extend.core.Primitive, dtype: np.dtype, *operands: ShapedArray, **parameters: Any
) -> ShapedArray:
  """Returns the type of a product of lhs and rhs in a dtype, with sharding and the axes that it varies over.

  Waits for a public function from operands' types to a result's type, usable in a primitive's own rule.
  """
  pair = (x.update(dtype=dtype, weak_type=False) for x in operands[:2])
  return product.abstract_eval(*pair, *operands[2:], **parameters)[0]


def function_name(jaxpr: AnyJaxpr) -> str:
  """Returns the name of the function that a jaxpr was traced from; empty without a name.

  Waits for a documented `jax.extend.core.DebugInfo`.
  """
  info = getattr(getattr(jaxpr, "jaxpr", jaxpr), "debug_info", None)
  return str(getattr(info, "func_src_info", "")).partition(" at ")[0]


def context_of(equation: JaxprEqn) -> contextlib.AbstractContextManager[Any]:
  """Returns the settings that an equation was traced under.

  Waits for a public evaluator of single equations: `jax.core.eval_jaxpr` enters the settings by itself.
  """
  return equation.ctx.manager


def user_frames(traceback: Any) -> Iterator[tuple[str, int, str]]:
  """Yields file, line and function of each call that led to an equation, without JAX's, innermost first.

  Waits for more than the one frame that `jax.extend.source_info_util.summarize` gives.

  Args:
    traceback: the traceback of the equation's `source_info`.
  """
  for frame in source_info_util.user_frames(traceback):
    yield frame.file_name, frame.start_line, frame.function_name


def scan_counts(equation: JaxprEqn) -> tuple[int, int]:
  """Returns how many operands of a `scan` are constants, and how many carries.

  Waits for JAX 0.12 to be the oldest supported release; earlier ones have `num_consts` and `num_carry`.
  """
  p = equation.params
  if "num_consts" in p:
    return p["num_consts"], p["num_carry"]
  consts, carry = (len(part) for part in p["ft_in"].unpack()[:2])
  return consts, carry


def bind(equation: JaxprEqn, operands: list[Any], **changes: Any) -> list[Any]:
  """Applies an equation's primitive to other operands, in its context, with some parameters changed.

  Waits for a public `get_bind_params`, as `jax.extend.core.jaxpr_as_fun` is for whole jaxprs.
  """
  parameters = equation.primitive.get_bind_params({**equation.params, **changes})
  with context_of(equation):
    out = equation.primitive.bind(*operands, **parameters)
  return list(out) if equation.primitive.multiple_results else [out]


def bind_jit(equation: JaxprEqn, operands: list[Any], extra: list[Any], closed: ClosedJaxpr) -> list[Any]:
  """Applies a `jit` of another body, whose inputs are `operands` and then `extra`, of any sharding.

  Waits for a public name of the unspecified sharding, which `jax.jit` takes as `None`.
  """
  n = len(extra)
  p = equation.params
  more = {
    "in_shardings": (*p["in_shardings"], *(sharding_impls.UNSPECIFIED,) * n),
    "in_layouts": (*p["in_layouts"], *(None,) * n),
    "donated_invars": (*p["donated_invars"], *(False,) * n),
  }
  return bind(equation, [*operands, *extra], jaxpr=closed, **(more if n else {}))


def trace_open(fun: Callable[..., Any], operands: list[Any]) -> tuple[Jaxpr, list[Array]]:
  """Traces a function; returns a jaxpr without constants, and arrays to pass before `operands` instead.

  Waits for JAX 0.12 to be the oldest supported release: it has this in `jax.interpreters.partial_eval`.
  """
  closed = jax.make_jaxpr(fun)(*operands)
  return partial_eval.convert_constvars_jaxpr(closed.jaxpr), list(closed.consts)


def manual_axes(equation: JaxprEqn) -> tuple[str, ...]:
  """Returns the axes over which a `shard_map` divides its operands; the compiler divides over the others.

  Waits for documented parameters of the primitive; JAX 0.10.0 has `manual_axes`.
  """
  p = equation.params
  return tuple(sorted(p["newly_manual_axes"] if "newly_manual_axes" in p else p["manual_axes"]))


def shard_map_like(equation: JaxprEqn, fun: Callable[..., Any], split: int) -> tuple[Callable[..., Any], int]:
  """Returns `fun` under the `shard_map` of an equation, with more operands, and the number of devices.

  Args:
    equation: the equation.
    fun: takes the equation's operands and then the additional ones.
    split: how many additional operands have a row for each device.
  """
  p = equation.params
  axes = manual_axes(equation)
  more = (jax.sharding.PartitionSpec(axes),) * split
  mapped = jax.shard_map(
    fun,
    mesh=p["mesh"],
    in_specs=(*p["in_specs"], *more),
    out_specs=tuple(p["out_specs"]),
    axis_names=set(axes),
    check_vma=p["check_vma"],
  )
  return mapped, math.prod(p["mesh"].shape[axis] for axis in axes)


def vary_like(tree: PyTree, like: PyTree) -> PyTree:
  """Marks a tree as varying over the `shard_map` axes that `like` varies over, if any.

  Waits for the same as `varying_axes_of_type`.
  """
  axes = varying_axes(like)

  def leaf(x: Array) -> Array:
    missing = axes - varying_axes(x)
    return jax.lax.pcast(x, tuple(sorted(missing)), to="varying") if missing else x

  return jax.tree.map(leaf, tree) if axes else tree


def permuted_sharding(aval: ShapedArray, permutation: Sequence[int]) -> NamedSharding | None:
  """Returns the sharding of a value of this type after this transpose; `None` without explicit axes.

  Waits for the same as `is_explicit`; `jax.lax.transpose` gives it for arrays alone.
  """
  if not is_explicit(aval):
    return None
  return aval.sharding.update(spec=jax.sharding.PartitionSpec(*(aval.sharding.spec[i] for i in permutation)))


def is_explicit(aval: AbstractValue) -> bool:
  """Returns whether a value's type includes its sharding over a mesh.

  Waits for a documented `sharding` of `jax.core.ShapedArray`.
  """
  sharding = getattr(aval, "sharding", None)
  return bool(sharding is not None and getattr(sharding.mesh, "explicit_axes", ()))


def with_auto_axes(fun: Callable[..., Array], out: AbstractValue) -> Callable[..., Array]:
  """Returns a function within which all axes are automatic; `out` is the type of its result.

  Without explicit axes it is `fun` itself. The lowering of a primitive does not set the mesh of its operands.
  """
  if not is_explicit(out):
    return fun
  sharding = cast(NamedSharding, cast(ShapedArray, out).sharding)
  within = jax.sharding.auto_axes(fun, axes=sharding.mesh.explicit_axes, out_sharding=sharding)

  def run(*operands: Array) -> Array:
    with jax.sharding.use_abstract_mesh(sharding.mesh.abstract_mesh):
      return within(*operands)

  return run


def varying_axes(tree: PyTree) -> frozenset[str]:
  """Returns the `shard_map` axes that a leaf of `tree` is known to vary over.

  Waits for the same as `varying_axes_of_type`.
  """
  return frozenset().union(*(varying_axes_of_type(jax.typeof(leaf)) for leaf in jax.tree.leaves(tree)))


def varying_axes_of_type(kind: AbstractValue) -> frozenset[str]:
  """Returns the `shard_map` axes that values of a type vary over.

  Waits for a documented `manual_axis_type` of `jax.core.ShapedArray`.
  """
  axes = getattr(kind, "manual_axis_type", None)
  return axes.varying if axes is not None else frozenset()


def coordination() -> tuple[Any, int, int]:
  """Returns the client of the coordination service, this process and the number of processes; uses no device.

  Without `jax.distributed` the client is `None`, of one process. Private: waits for a public key-value store
  in `jax.distributed`. `jax.process_index` would use devices.
  """
  state = distributed.global_state
  return state.client, state.process_id, state.num_processes


def cluster_kinds() -> list[type[clusters.ClusterEnv]]:
  """Returns the clusters that `jax.distributed.initialize` recognises by itself.

  Private: it starts what it finds; no public function says whether there is a cluster.
  """
  return [kind for kind in clusters.ClusterEnv._cluster_types if not kind.opt_in_only_method]
