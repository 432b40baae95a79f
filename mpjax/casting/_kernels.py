"""Kernels: how registered ones run in half precision, and which ones stay in float32."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator, Mapping
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
from mpjax.jaxpr import (
  CallKind,
  Trait,
  bodies_of,
  call_kind,
  dtype_of,
  has,
  in_region,
  inside,
  marked_path,
  open_jaxpr,
  shape_of,
)
from mpjax.policy import PrecisionWarning

Run = Callable[..., Any]
_runs: dict[str | Primitive, Run] = {}

# The beginnings of the names of JAX's own kernels, and the functions that call them, made for one dtype too.
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
  """Registers how `autocast` runs a kernel in half precision, everywhere in a program.

  A kernel stays in the dtypes that it was traced with; `run` calls it again with operands in the compute
  dtype. So it runs in half precision in `grad(autocast(f))` and in `autocast(grad(f))`, also in other
  people's code. Register the kernels of a derivative rule as well, each by its name:

  ```python
  def scale(x, w):  # float32 or half precision
    out = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return pl.pallas_call(scale_kernel, out, name="scale")(x, w)

  mpjax.casting.register_kernel("scale", scale)
  ```

  If a kernel's static arguments differ from call to call, wrap the function that calls it instead:
  `flash_attention = mpjax.half_precision(flash_attention)`. JAX's own kernels are of that kind.

  Args:
    kernel: the kernel's name in the program, which is the `name` of a `pallas_call` (by default that of its
      function), the target of an FFI call, or the name of a jitted function; or its primitive.
    run: takes the operands of the call in the program, and returns its results as an array, a tuple or a
      list. Float32 operands come in the compute dtype, except those that another registered kernel
      returned in float32. If the kernel is given by name, `run` with the program's dtypes must make the same
      call. A call that it does not make (a batch or a derivative of the kernel, another function of the
      name), and one for which it raises an error, stay unchanged.

  Raises:
    TypeError: if `kernel` is neither a name nor a primitive, or `run` is not a function.
  """
  if not isinstance(kernel, (str, Primitive)) or not callable(run):
    raise TypeError(
      f"register_kernel of {kernel!r} and {run!r}: expected a name or a primitive, and a function"
    )
  _runs[kernel] = run


def registered_kernels() -> tuple[tuple[str | Primitive, Run], ...]:
  """Returns the registered kernels, with their functions."""
  return tuple(_runs.items())


class InHalf(NamedTuple):
  """A call that runs in half precision in another way.

  Attributes:
    run: takes its operands, and returns its results.
    outs: how its results are held.
  """

  run: Run
  outs: tuple[Held, ...]


def in_half(equation: JaxprEqn, how: Callable[[Atom], Held], half: np.dtype | None) -> InHalf | None:
  """Returns how a call runs in half precision, if it calls a registered kernel.

  Args:
    equation: any equation.
    how: returns how an operand is held.
    half: the compute dtype; `None` for float32.
  """
  run = _registered(equation)
  if run is None or half is None or not any(castable(a.aval) for a in equation.invars):
    return None
  like = [
    jax.ShapeDtypeStruct(shape_of(a), read_dtype(how(a), half) if castable(a.aval) else dtype_of(a))
    for a in equation.invars
  ]
  if _registered(equation, by_name=False) is None and _why_not(run, equation):
    return None
  try:
    results = _flat(jax.eval_shape(run, *like))
  except Exception:  # made only for float32
    return None
  if len(results) != len(equation.outvars) or not all(hasattr(x, "shape") for x in results):
    return None
  pairs = list(zip(results, equation.outvars, strict=True))
  if any(x.shape != shape_of(v) or (x.dtype != dtype_of(v) and not castable(v.aval)) for x, v in pairs):
    return None
  outs = [_held(x.dtype, v.aval, half) for x, v in pairs]
  return InHalf(run, tuple(outs))


def _flat(results: Any) -> list[Any]:
  return list(results) if isinstance(results, (tuple, list)) else [results]


def _why_not(run: Run, equation: JaxprEqn) -> str:
  """Returns why a call does not call a registered kernel, although it has the name; empty if it does.

  With the dtypes of the program `run` must make the same call. So a derivative or a batch of it, which JAX
  gives the same name, stays unchanged, as does another library's function of that name.
  """
  own = [jax.ShapeDtypeStruct(shape_of(a), dtype_of(a)) for a in equation.invars]
  try:
    made = jax.make_jaxpr(run)(*own).jaxpr
  except Exception as error:
    return f"the registered function raises {type(error).__name__}: {error}"
  bodies = [open_jaxpr(body) for body in bodies_of(equation)]
  while not made.constvars:
    if call_kind(equation) is CallKind.JIT and str(made) == str(bodies[0]):
      return ""
    if len(made.eqns) != 1 or made.eqns[0].invars != made.invars or made.eqns[0].outvars != made.outvars:
      break
    (call,) = made.eqns
    if call.primitive is equation.primitive and _text(call) == _text(equation):
      return ""
    if call_kind(call) is not CallKind.JIT:
      break
    made = open_jaxpr(bodies_of(call)[0])
  return "the registered function makes another call"


def _text(equation: JaxprEqn) -> str:
  return re.sub(r"\b0x[0-9a-f]+", "", str(sorted((k, str(v)) for k, v in equation.params.items())))


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


def _registered(equation: JaxprEqn, by_name: bool = True) -> Run | None:
  if not _runs:
    return None
  return _runs.get(equation.primitive) or (_runs.get(kernel_name(equation)) if by_name else None)


def kernel_name(equation: JaxprEqn) -> str:
  """Returns the name of a kernel or a jitted function; empty without one."""
  p = equation.params
  name = p.get("name") or p.get("target_name")
  if not name and has(equation, Trait.KERNEL) and "jaxpr" in p:
    name = _compat.function_name(p["jaxpr"])
  return name if isinstance(name, str) else ""


def way_out(equation: JaxprEqn) -> str:
  """Returns what to write for a kernel that runs in float32."""
  name, run = kernel_name(equation), _registered(equation)
  if run is not None:
    why = _why_not(run, equation) or "the registered function does not take half precision"
    return f"{why}; register a function that makes this call, or wrap it in mpjax.half_precision"
  shipped = next((of for start, of in _SHIPPED.items() if name.lstrip("_").startswith(start)), None)
  if shipped is not None:
    return f"write {shipped} = mpjax.half_precision({shipped})"
  return f"wrap its function in mpjax.half_precision, or mpjax.casting.register_kernel({name!r}, ...)"


def runs_in_float32(equation: JaxprEqn, path: str) -> bool:
  """Returns whether an equation at a path is a kernel only for float32, in no region, and not for codes."""
  dtypes = [dtype_of(a) for a in equation.invars if hasattr(a.aval, "dtype")]
  floats = {dtype for dtype in dtypes if jnp.issubdtype(dtype, jnp.floating)}
  wide = floats == {FLOAT32} and not any(dtype in (jnp.int8, jnp.uint8, jnp.int4) for dtype in dtypes)
  return wide and has(equation, Trait.KERNEL) and not in_region(path)


def kernels_in_float32(plan: CastPlan) -> dict[str, JaxprEqn]:
  """Returns the kernels that a half-precision policy leaves in float32, one for each name."""
  nodes = (node for node in plan.all_nodes() if node.half is not None and node.kernel is None)
  return {kernel_name(e): e for node in nodes for e in _in_float32(node, node.equation, node.path)}


def warn_of_kernels(kernels: Mapping[str, JaxprEqn]) -> None:
  """Warns of kernels that a half-precision policy leaves in float32, once for each."""
  for name, equation in sorted(kernels.items()):
    warnings.warn(
      f"the kernel {name or equation.primitive.name} runs in float32 under autocast: {way_out(equation)}; "
      "if that is intended, put it into mpjax.full_precision",
      PrecisionWarning,
      **AT_THE_USER,
    )


def _in_float32(node: Node, equation: JaxprEqn, path: str) -> Iterator[JaxprEqn]:
  if runs_in_float32(equation, path):
    yield equation
  if node.call is None and not has(equation, Trait.KERNEL):
    for e in (e for body in bodies_of(equation) for e in open_jaxpr(body).eqns):
      yield from _in_float32(node, e, inside(path, marked_path(e)))
