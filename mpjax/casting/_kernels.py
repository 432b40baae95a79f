"""Kernels that stay in float32 under autocast, and what to write for each."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping

import jax.numpy as jnp

from mpjax import _compat
from mpjax._types import JaxprEqn
from mpjax.casting._cast_plan import CastPlan, Node
from mpjax.casting._fp8_products import AT_THE_USER
from mpjax.casting._kinds import FLOAT32
from mpjax.jaxpr import (
  Trait,
  bodies_of,
  dtype_of,
  has,
  in_region,
  inside,
  marked_path,
  open_jaxpr,
)
from mpjax.policy import PrecisionWarning

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


def kernel_name(equation: JaxprEqn) -> str:
  """Returns the name of a kernel or a jitted function; empty without one."""
  p = equation.params
  name = p.get("name") or p.get("target_name")
  if not name and has(equation, Trait.KERNEL) and "jaxpr" in p:
    name = _compat.function_name(p["jaxpr"])
  return name if isinstance(name, str) else ""


def way_out(equation: JaxprEqn) -> str:
  """Returns what to write for a kernel that runs in float32."""
  name = kernel_name(equation).lstrip("_")
  shipped = next((of for start, of in _SHIPPED.items() if name.startswith(start)), "")
  function = shipped or "module.function"
  what = "" if shipped else "wrap the function that calls it, also one of another's module: "
  return f"{what}write {function} = mpjax.half_precision({function})"


def runs_in_float32(equation: JaxprEqn, path: str) -> bool:
  """Returns whether an equation at a path is a kernel only for float32, in no region, and not for codes."""
  dtypes = [dtype_of(a) for a in equation.invars if hasattr(a.aval, "dtype")]
  floats = {dtype for dtype in dtypes if jnp.issubdtype(dtype, jnp.floating)}
  wide = floats == {FLOAT32} and not any(dtype in (jnp.int8, jnp.uint8, jnp.int4) for dtype in dtypes)
  return wide and has(equation, Trait.KERNEL) and not in_region(path)


def kernels_in_float32(plan: CastPlan) -> dict[str, JaxprEqn]:
  """Returns the kernels that a half-precision policy leaves in float32, one for each name."""
  nodes = (node for node in plan.all_nodes() if node.half is not None)
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
