"""Kernels: how those run in half precision that are registered, and which ones stay in float32."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive

from mpjax import _compat
from mpjax._types import Atom, JaxprEqn
from mpjax.casting._cast_plan import CastPlan, Node
from mpjax.casting._fp8_products import AT_THE_USER
from mpjax.casting._kinds import FLOAT32, Held, Kind, castable, initial
from mpjax.jaxpr import Trait, bodies_of, dtype_of, has, in_region, inside, marked_path, open_jaxpr, shape_of
from mpjax.policy import PrecisionWarning

Run = Callable[..., Any]
_runs: dict[str | Primitive, Run] = {}

# How the kernels begin that JAX ships, and the function that calls them, which is made for one dtype as well.
_SHIPPED = {
  "flash_attention": "flash_attention",
  "splash_mha": "splash_attention",
  "splash_mqa": "splash_attention",
  "mha": "mha",
  "paged_flash_attention": "paged_attention",
  "ragged_paged_attention": "ragged_paged_attention",
  "rms_norm": "rms_norm",
  "layer_norm": "layer_norm",
}


def register_kernel(kernel: str | Primitive, run: Run) -> None:
  """Says how `autocast` runs a kernel in half precision, wherever a program has it.

  A kernel stays in the dtypes that it was traced with; `run` makes it again from operands in the compute
  dtype. So it runs in half precision in `grad(autocast(f))` and in `autocast(grad(f))`, in code of others,
  too. Register the kernels of a derivative rule as well, each by its name:

  ```python
  def scale(x, w):  # float32 or half precision
    out = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return pl.pallas_call(scale_kernel, out, name="scale")(x, w)

  mpjax.casting.register_kernel("scale", scale)
  ```

  Where a kernel has static arguments that differ from call to call, wrap the function that calls it instead:
  `flash_attention = mpjax.half_precision(flash_attention)`. The kernels that JAX ships are of that kind.

  Args:
    kernel: the kernel's name in the program, which is the `name` of a `pallas_call` (by default that of its
      function), the target of an FFI call, or the name of a jitted function; or its primitive.
    run: takes the operands of the call in the program, and returns its results. Float32 operands come in
      the compute dtype, but for those that another registered kernel has returned in float32. A call that
      `run` refuses by an error, or whose results have other shapes, stays as it is.

  Raises:
    TypeError: if `kernel` is neither a name nor a primitive, or `run` is no function.
  """
  if not isinstance(kernel, (str, Primitive)) or not callable(run):
    raise TypeError(
      f"register_kernel of {kernel!r} and {run!r}: expected a name or a primitive, and a function"
    )
  _runs[kernel] = run


class InHalf(NamedTuple):
  """A call that runs in half precision in another way.

  Attributes:
    run: takes its operands, and returns its results.
    outs: how its results are held.
  """

  run: Run
  outs: tuple[Held, ...]


def in_half(equation: JaxprEqn, how: Callable[[Atom], Held], half: np.dtype | None) -> InHalf | None:
  """Returns how a call runs in half precision, if it is of a registered kernel.

  Args:
    equation: any.
    how: how an operand is held.
    half: the compute dtype; `None` for float32.
  """
  run = _registered(equation)
  if run is None or half is None or not any(castable(a.aval) for a in equation.invars):
    return None
  like = [
    jax.ShapeDtypeStruct(shape_of(a), read_dtype(how(a), half) if castable(a.aval) else dtype_of(a))
    for a in equation.invars
  ]
  try:
    results = jax.tree.leaves(jax.eval_shape(run, *like))
  except Exception:  # a function of this name that was differentiated has other operands
    return None
  if [x.shape for x in results] != [shape_of(v) for v in equation.outvars]:
    return None
  outs = [_held(x.dtype, v.aval, half) for x, v in zip(results, equation.outvars, strict=True)]
  return InHalf(run, tuple(outs))


def read_dtype(held: Held, half: np.dtype) -> np.dtype:
  """Returns the dtype in which a registered kernel reads an operand, such as its own float32 statistics."""
  return FLOAT32 if held.kind is Kind.PINNED else half


def _held(dtype: np.dtype, aval: jax.core.AbstractValue, half: np.dtype) -> Held:
  if not castable(aval):
    return initial(aval)
  return Held(Kind.HALF, half) if dtype == half else Held(Kind.PINNED, FLOAT32)


def has_registered(equation: JaxprEqn) -> bool:
  """Returns whether a call of a registered kernel is in an equation's bodies."""
  inner = (e for body in bodies_of(equation) for e in open_jaxpr(body).eqns) if _runs else ()
  return any(_registered(e) is not None or has_registered(e) for e in inner)


def _registered(equation: JaxprEqn) -> Run | None:
  if not _runs:
    return None
  return _runs.get(equation.primitive) or _runs.get(kernel_name(equation))


def kernel_name(equation: JaxprEqn) -> str:
  """Returns the name of a kernel or a jitted function; empty for what has none."""
  p = equation.params
  name = p.get("name") or p.get("target_name")
  if not name and has(equation, Trait.KERNEL) and "jaxpr" in p:
    name = _compat.function_name(p["jaxpr"])
  return name if isinstance(name, str) else ""


def way_out(equation: JaxprEqn) -> str:
  """Returns what to write for a kernel that runs in float32."""
  name = kernel_name(equation)
  shipped = next((of for start, of in _SHIPPED.items() if name.lstrip("_").startswith(start)), None)
  if shipped is not None:
    return f"write {shipped} = mpjax.half_precision({shipped})"
  return f"wrap its function in mpjax.half_precision, or mpjax.casting.register_kernel({name!r}, ...)"


def runs_in_float32(equation: JaxprEqn, path: str) -> bool:
  """Returns whether an equation at a path is a kernel of float32 alone, in no region, and not of codes."""
  dtypes = [dtype_of(a) for a in equation.invars if hasattr(a.aval, "dtype")]
  floats = {dtype for dtype in dtypes if jnp.issubdtype(dtype, jnp.floating)}
  wide = floats == {FLOAT32} and not any(dtype in (jnp.int8, jnp.uint8, jnp.int4) for dtype in dtypes)
  return wide and has(equation, Trait.KERNEL) and not in_region(path)


def warn_of_kernels(plan: CastPlan) -> None:
  """Warns of the kernels that a half-precision policy leaves in float32, once for each."""
  nodes = (node for node in plan.all_nodes() if node.half is not None and node.kernel is None)
  found = {kernel_name(e): e for node in nodes for e in _in_float32(node, node.equation, node.path)}
  for name, equation in sorted(found.items()):
    warnings.warn(
      f"the kernel {name or equation.primitive.name} runs in float32 under autocast: {way_out(equation)}; "
      "if it is meant to, put it into mpjax.full_precision",
      PrecisionWarning,
      **AT_THE_USER,
    )


def _in_float32(node: Node, equation: JaxprEqn, path: str) -> Iterator[JaxprEqn]:
  if runs_in_float32(equation, path):
    yield equation
  if node.call is None and not has(equation, Trait.KERNEL):
    for e in (e for body in bodies_of(equation) for e in open_jaxpr(body).eqns):
      yield from _in_float32(node, e, inside(path, marked_path(e)))
