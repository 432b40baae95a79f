"""What is in a traced or lowered program: its equations at any depth, and the dtypes of its matrix products."""

from __future__ import annotations

import collections
import re
from collections.abc import Callable, Iterator
from typing import Any

import jax

from tests import _quick_compile as quick

OPTIONS = {
  # As accelerators round: the CPU compiler would keep float32 between two half-precision operations.
  "xla_allow_excess_precision": False,
  # A quarter of the time to compile.
  "xla_backend_optimization_level": 0,
  **(quick.OPTIONS if quick.understood() else {}),
}
PRODUCTS = ("dot_general", "conv_general_dilated", "ragged_dot_general")
Function = Callable[..., Any]
_SHORT = {"float32": "f32", "float64": "f64", "bfloat16": "bf16", "float16": "f16"}


def jit(fun: Callable[..., Any]) -> Callable[..., Any]:
  """`fun` compiled fast, and to round as accelerators do."""
  return jax.jit(fun, compiler_options=OPTIONS)


def trace_together(functions: dict[str, Function], *args: Any) -> tuple[jax.stages.Traced, dict[str, Any]]:
  """One program that calls all of the functions, since most of the time goes into compiling; the jaxpr of each."""

  def all_of_them(*args: Any) -> dict[str, Any]:
    out = {}
    for name, fun in functions.items():
      try:
        out[name] = jax.jit(fun)(*args)
      except Exception as error:
        error.add_note(f"raised under {name}")
        raise
    return out

  traced = jit(all_of_them).trace(*args)
  calls = [e for e in traced.jaxpr.eqns if e.primitive.name == "jit"]
  return traced, dict(zip(functions, (call.params["jaxpr"].jaxpr for call in calls), strict=True))


def run_together(functions: dict[str, Function], *args: Any) -> tuple[dict[str, Any], dict[str, set[str]]]:
  """What each function gives, and the pairs of dtypes that its matrix products multiply: `{"bf16 bf16"}`."""
  traced, jaxprs = trace_together(functions, *args)
  found = {name: operands(jaxpr) for name, jaxpr in jaxprs.items()}
  return traced.lower().compile()(*args), found


def operands(jaxpr: Any) -> set[str]:
  """The pairs of dtypes that the matrix products of a jaxpr multiply."""
  return {multiplied(e) for e in walk(jaxpr) if e.primitive.name in PRODUCTS}


def equations(fun: Callable[..., Any], *args: Any) -> list[Any]:
  """The equations of `fun(*args)`, those of bodies after the equation that they belong to."""
  return list(walk(jax.make_jaxpr(fun)(*args).jaxpr))


def bodies(equation: Any) -> list[Any]:
  """The jaxprs among an equation's parameters."""
  values = [x for v in equation.params.values() for x in (v if isinstance(v, (tuple, list)) else (v,))]
  return [j for v in values if hasattr(j := getattr(v, "jaxpr", v), "eqns")]


def named(name: str, fun: Callable[..., Any], *args: Any) -> list[Any]:
  """The equations of one primitive, or of those in a list separated by spaces."""
  return [e for e in equations(fun, *args) if e.primitive.name in name.split()]


def dtypes(atoms: Any) -> str:
  """Dtypes of an equation's variables: `f32 bf16`; `-` for what has none."""
  names = [str(getattr(a.aval, "dtype", "-")) for a in atoms]
  return " ".join(_SHORT.get(name, name) for name in names)


def multiplied(product: Any) -> str:
  """The dtypes in which a matrix product multiplies; mpjax's own round a float32 operand beside a half one."""
  both = dtypes(product.invars[:2]).split()
  if "originals" in product.params:
    both = [name if name != "f32" else min(both) for name in both]
  return " ".join(both)


def is_matrix_product(equation: Any) -> bool:
  """Returns whether an equation is one for a matrix unit: no outer product, and no sum of products of its own."""
  if equation.primitive.name == "dot_general":
    (contracted, _), (batch, _) = equation.params["dimension_numbers"]
    ranks = [operand.aval.ndim for operand in equation.invars[:2]]
    return len(contracted) > 0 and max(ranks) > len(contracted) + len(batch)
  return equation.primitive.name in PRODUCTS


def products(fun: Callable[..., Any], *args: Any) -> set[str]:
  """The dtypes of the operands of matrix products, as traced: `{"bf16"}` where all are bfloat16."""
  return {d for e in equations(fun, *args) if e.primitive.name in PRODUCTS for d in multiplied(e).split()}


def lowered_products(fun: Callable[..., Any], *args: Any) -> collections.Counter[str]:
  """How many matrix products StableHLO has, by the dtypes of their operands: `{"bf16 bf16": 3}`."""
  traced = jax.jit(fun).trace(*args)  # on a CPU products of bfloat16 multiply in float32
  text = traced.lower(lowering_platforms=("tpu",)).as_text()
  operands = re.findall(r"stablehlo\.dot_general .*: \(tensor<([^>]*)>, tensor<([^>]*)>\)", text)
  return collections.Counter(" ".join(t.rsplit("x")[-1] for t in pair) for pair in operands)


def walk(jaxpr: Any) -> Iterator[Any]:
  """Yields the equations of a jaxpr, those of bodies after the equation that they belong to."""
  for equation in jaxpr.eqns:
    yield equation
    for body in bodies(equation):
      yield from walk(body)
