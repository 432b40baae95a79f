"""What autocast promises of any function: `Case`, a function with its arguments, and what breaks a promise."""

from __future__ import annotations

import dataclasses
import re
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import mpjax
from tests.casting._jaxprs import (
  PRODUCTS,
  bodies,
  is_matrix_product,
  multiplied,
  walk,
)

Function = Callable[..., Any]
# Of optax.losses.
OF_SOME_RELEASES = {
  "binary_dice_loss", "dice_loss", "generalized_kl_divergence", "multiclass_generalized_dice_loss",
}  # fmt: skip
# An array of JAX: what a function makes itself, or closes over from NumPy, is a constant.
_WEIGHTS = jnp.ones((2, 1))
# About ten unit roundoffs.
TOLERANCE = {"bf16": 3e-2, "fp16": 5e-3}
HALF = {"bf16": ("bf16", "bfloat16"), "fp16": ("f16", "float16")}
LISTS = mpjax.OpLists.default()


@dataclasses.dataclass(frozen=True)
class Case:
  """One function under test.

  Attributes:
    build: given what to apply (autocast or nothing), the function to call.
    args: pytrees of float32 arrays and of anything else that `jax.jit` takes.
    alone: the function of a `case`, without the products before it.
    grad: whether it has gradients too; false for what float32 cannot differentiate.
    selects: whether its own products are selections or Gram matrices, which stay in float32.
  """

  build: Callable[[Callable[[Function], Function]], Function]
  args: tuple[Any, ...]
  alone: Function | None = None
  grad: bool = True
  selects: bool = False


def case(fun: Function, *args: Any, **options: Any) -> Case:
  """`fun` on values that a matrix product made, and, where it has products itself, on its arguments as they are."""
  return Case(lambda cast: cast(behind_products(fun)), args, fun, **options)


def each(module: Any, names: str, *args: Any, **options: Any) -> dict[str, Case]:
  """A case for each function of a module, of those that only some releases have where this one has it."""
  call = lambda name: lambda *args: getattr(module, name)(*args)
  there = [name for name in names.split() if hasattr(module, name) or name not in OF_SOME_RELEASES]
  return {name: case(call(name), *args, **options) for name in there}


def behind_products(fun: Function) -> Function:
  return lambda *args: fun(*jax.tree.map(product, args))


def product(x: Any) -> Any:
  """`x`, as far as float32 is concerned, from a matrix product; what is not float32 stays."""
  if getattr(x, "dtype", None) != np.float32:
    return x
  return (jnp.pad(x.reshape(-1, 1), ((0, 0), (0, 1))) @ _WEIGHTS).reshape(x.shape)


def normal(*shape: int, seed: int = 0, scale: float = 1.0) -> jax.Array:
  """Standard normal float32 values that bfloat16 and float16 hold exactly.

  They are arrays of JAX: closed over, they may be weights, and those of NumPy are constants.
  """
  return jnp.asarray(exact(scale * np.random.default_rng(seed).standard_normal(shape)))


def uniform(low: float, high: float, *shape: int, seed: int = 0) -> np.ndarray:
  """Uniform float32 values that bfloat16 and float16 hold exactly."""
  return exact(np.random.default_rng(seed).uniform(low, high, shape))


def exact(values: Any) -> np.ndarray:
  return np.asarray(values, np.float32).astype(jnp.bfloat16).astype(np.float32)


def filled(shapes: Any) -> Any:
  """Values for a tree of `jax.eval_shape`: random but exact, about 1 for scales and variances, zero integers."""

  def fill(path: Any, leaf: Any) -> Any:
    name = jax.tree_util.keystr(path)
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
      return jax.random.key(0)
    if leaf.dtype != np.float32:
      return np.zeros(leaf.shape, leaf.dtype)
    positive = re.search("scale|var|amax", name) is not None
    return exact(
      normal(*leaf.shape, seed=zlib.crc32(name.encode()), scale=0.1 if positive else 0.4) + positive
    )

  return jax.tree_util.tree_map_with_path(fill, shapes)


def check_traced(cases: dict[str, Any]) -> None:
  """Fails with a line for each case whose program under bf16 has other results, lists or products than promised.

  Args:
    cases: by name, cases or functions that make them.
  """
  lines = []
  for name, made in cases.items():
    one = made if isinstance(made, Case) else made()
    _, results = traced(one.build(lambda fun: fun), one.args)
    jaxpr, got = traced(one.build(mpjax.autocast(policy="bf16")), one.args)
    lines += [f"{name}: {line}" for line in listed_failures(jaxpr, "bf16", one.selects)]
    if got != results:
      lines.append(f"{name}: results {got} instead of {results}")
    if one.alone is not None and has_products(jax.make_jaxpr(one.alone)(*one.args).jaxpr):
      jaxpr, _ = traced(mpjax.autocast(one.alone, "bf16"), one.args)
      lines += [f"{name} alone: {line}" for line in listed_failures(jaxpr, "bf16", one.selects)]
  assert not lines, "\n" + "\n".join(lines)


def traced(fun: Function, args: tuple[Any, ...]) -> tuple[Any, Any]:
  """The jaxpr, and the shapes and dtypes of the results."""
  jaxpr, out = jax.make_jaxpr(fun, return_shape=True)(*args)
  return jaxpr.jaxpr, [(x.shape, x.dtype.name) for x in jax.tree.leaves(out)]


def listed_failures(jaxpr: Any, policy: str, selects: bool = False) -> Iterator[str]:
  """Lines for equations that are not in the dtype of their list, products of float32 among them unless it selects."""
  half, dtype = HALF[policy]
  for equation in outside_of_solvers(jaxpr):
    name, params = equation.primitive.name, equation.params
    if is_matrix_product(equation):
      # Not whether float32 is preferred: jax.numpy asks for it wherever it multiplies float32.
      asks = "HIGHEST" in str(params.get("precision"))
      wide = {dtype for dtype in multiplied(equation).split() if dtype != half and "float8" not in dtype}
      if wide and not asks and not selects:
        yield f"{policy}: {name} multiplies {multiplied(equation)}"
    elif LISTS.of(name, dtype) == "deny":
      found = [v.aval.dtype.name for v in (*equation.invars, *equation.outvars) if hasattr(v.aval, "dtype")]
      if dtype in found:
        yield f"{policy}: {name} has {found}"


def outside_of_solvers(jaxpr: Any) -> Iterator[Any]:
  """Yields what `walk` does, without the bodies of `custom_linear_solve`, which keep the dtypes of the program."""
  for equation in jaxpr.eqns:
    yield equation
    for body in bodies(equation) if equation.primitive.name != "custom_linear_solve" else ():
      yield from outside_of_solvers(body)


def has_products(jaxpr: Any) -> bool:
  return any(e.primitive.name in PRODUCTS for e in walk(jaxpr))


def gradients(case: Case, fun: Function) -> Function:
  """The outputs, and the gradients of their random projection, as one function of the floating args."""

  def value(floating: dict[str, Any], args: tuple[Any, ...]) -> tuple[jax.Array, Any]:
    out = fun(*combine(floating, args))
    return sum((jnp.sum(leaf * along) for leaf, along in projections(out)), np.float32(0)), out

  if not case.grad:
    return lambda floating, args: (value(floating, args)[1], {})

  def both(floating: dict[str, Any], args: tuple[Any, ...]) -> tuple[Any, Any]:
    (_, out), grads = jax.value_and_grad(value, has_aux=True)(floating, args)
    return out, grads

  return both


def floating(args: Any) -> dict[str, Any]:
  leaves = jax.tree_util.tree_leaves_with_path(args)
  return {jax.tree_util.keystr(path): x for path, x in leaves if is_floating(x)}


def combine(floating: dict[str, Any], args: Any) -> Any:
  return jax.tree_util.tree_map_with_path(lambda path, x: floating.get(jax.tree_util.keystr(path), x), args)


def is_floating(x: Any) -> bool:
  # False also for keys and for the scales of FP8, whose gradients are new values.
  return getattr(x, "dtype", None) == np.float32


def projections(out: Any) -> Iterator[tuple[jax.Array, np.ndarray]]:
  for path, leaf in jax.tree_util.tree_leaves_with_path(out):
    seed = zlib.crc32(jax.tree_util.keystr(path).encode())
    parts = [leaf.real, leaf.imag] if jnp.iscomplexobj(leaf) else [leaf] if is_floating(leaf) else []
    for i, part in enumerate(parts):
      yield part, np.random.default_rng(seed + i).standard_normal(part.shape).astype(np.float32)


def leaf_failures(kind: str, got: Any, want: Any, tolerance: float, least: float = 1e-2) -> Iterator[str]:
  for name, a, b in pairs(got, want):
    where = f"{kind} {name}"
    if (a.shape, a.dtype) != (b.shape, b.dtype):
      yield f"{where}: {a.dtype}{list(a.shape)} instead of {b.dtype}{list(b.shape)}"
    elif not jnp.issubdtype(b.dtype, np.inexact):
      if not np.array_equal(a, b):
        yield f"{where}: {first(a, b, a != b)}"
    else:
      a, b = parts(a), parts(b)
      finite = np.isfinite(b)
      changed = ~finite & ~((a == b) | (np.isnan(a) & np.isnan(b)))
      allowed = tolerance * max(magnitude(b), least)
      error = np.abs(np.where(finite, a, 0) - np.where(finite, b, 0))
      if kind == "output" and changed.any():
        yield f"{where}: {first(a, b, changed)}"
      elif not np.isfinite(a[finite]).all():
        yield f"{where}: {first(a, b, finite & ~np.isfinite(a))}"
      elif (error > allowed).any():
        yield f"{where}: off by {error.max():.3g}, allowed {allowed:.3g}: {first(a, b, error == error.max())}"


def first(a: np.ndarray, b: np.ndarray, at: np.ndarray) -> str:
  index = tuple(int(i) for i in np.argwhere(at)[0])
  return f"{a[index]} instead of {b[index]} at {list(index)}"


def pairs(got: Any, want: Any) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
  for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True):
    if jnp.issubdtype(b.dtype, jax.dtypes.prng_key):
      a, b = jax.random.key_data(a), jax.random.key_data(b)
    yield "/".join(str(getattr(key, "key", key)) for key in path), np.asarray(a), np.asarray(b)


def parts(x: np.ndarray) -> np.ndarray:
  """Float64 values, with the real and the imaginary part as a last axis of what is complex."""
  return np.stack([x.real, x.imag], -1) if np.iscomplexobj(x) else x.astype(np.float64)


def magnitude(x: Any) -> float:
  x = parts(np.asarray(x))
  return float(np.abs(x[np.isfinite(x)]).max(initial=0.0))
