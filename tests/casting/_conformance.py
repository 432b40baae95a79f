"""What autocast promises of any function: `Case`, a function with its arguments, and `failures` of a case."""

from __future__ import annotations

import dataclasses
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import mpjax
from tests.casting._jaxprs import trace_together, walk

Function = Callable[..., Any]
# Of jax.scipy.special and optax.losses.
OF_SOME_RELEASES = frozenset(
  [
    "binary_dice_loss",
    "boxcox",
    "boxcox1p",
    "dawsn",
    "dice_loss",
    "erfcx",
    "generalized_kl_divergence",
    "multiclass_generalized_dice_loss",
  ]
)
# About ten unit roundoffs.
TOLERANCE = {"bf16": 3e-2, "fp16": 5e-3}


@dataclasses.dataclass(frozen=True)
class Case:
  """One function under test.

  Attributes:
    build: given what to apply (autocast or nothing), the function to call.
    args: pytrees of float32 arrays and of anything else that `jax.jit` takes.
    grad: whether to compare gradients too; false for what float32 cannot differentiate.
    slack: multiplies the tolerance of outputs, where the function amplifies the rounding of its inputs.
    grad_slack: the same for gradients.
  """

  build: Callable[[Callable[[Function], Function]], Function]
  args: tuple[Any, ...]
  grad: bool = True
  slack: float = 1.0
  grad_slack: float = 1.0


def case(fun: Function, *args: Any, **options: Any) -> Case:
  """`fun(*args)` as it is, and once more on values that a matrix product made."""

  def build(cast: Callable[[Function], Function]) -> Function:
    return cast(lambda *args: {"direct": fun(*args), "after_product": fun(*jax.tree.map(product, args))})

  return Case(build, args, **options)


def each(module: Any, names: str, *args: Any, **options: Any) -> dict[str, Case]:
  """A case for each function of a module, of those that only some releases have where this one has it."""
  call = lambda name: lambda *args: getattr(module, name)(*args)
  there = [name for name in names.split() if hasattr(module, name) or name not in OF_SOME_RELEASES]
  return {name: case(call(name), *args, **options) for name in there}


def check(case: Case, policies: Sequence[str] = ("bf16", "fp16")) -> None:
  """Fails with a line for each leaf and policy that breaks a promise."""
  functions = {"plain": program(case, lambda fun: fun)}
  for policy in policies:
    functions[policy] = program(case, lambda fun, policy=policy: mpjax.autocast(fun, policy))
  traced, jaxprs = trace_together(functions, floating(case.args), case.args)
  results = run(traced, case.args)
  want = results["plain"]
  lines = [*identity_failures(case, jaxprs["plain"], want)]
  for policy in policies:
    lines += [f"{policy}: {line}" for line in failures(case, TOLERANCE[policy], results[policy], want)]
    half = {"bf16": jnp.bfloat16, "fp16": np.float16}[policy]
    if any(getattr(v.aval, "dtype", None) == half for e in walk(jaxprs[policy]) for v in e.outvars):
      continue
    if has_products(jax.jit(functions["plain"]).lower(floating(case.args), case.args).as_text()):
      lines.append(f"{policy}: nothing runs in half precision")
  assert not lines, "\n" + "\n".join(lines)


def normal(*shape: int, seed: int = 0, scale: float = 1.0) -> np.ndarray:
  """Standard normal float32 values that bfloat16 and float16 hold exactly."""
  return exact(scale * np.random.default_rng(seed).standard_normal(shape))


def uniform(low: float, high: float, *shape: int, seed: int = 0) -> np.ndarray:
  """Uniform float32 values that bfloat16 and float16 hold exactly."""
  return exact(np.random.default_rng(seed).uniform(low, high, shape))


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


def exact(values: Any) -> np.ndarray:
  return np.asarray(values, np.float32).astype(jnp.bfloat16).astype(np.float32)


def product(x: Any) -> Any:
  """`x`, as far as float32 is concerned, from a matrix product; what is not float32 stays."""
  if getattr(x, "dtype", None) != np.float32:
    return x
  return (x.reshape(-1, 1) @ jnp.ones((1, 1))).reshape(x.shape)


def program(case: Case, cast: Callable[[Function], Function]) -> Function:
  """The outputs, and the gradients of their random projection, as one function of the floating args."""
  fun = case.build(cast)

  def value(floating: dict[str, Any], args: tuple[Any, ...]) -> tuple[jax.Array, Any]:
    out = fun(*combine(floating, args))
    return sum((jnp.sum(leaf * along) for leaf, along in projections(out)), jnp.float32(0)), out

  if not case.grad:
    return lambda floating, args: (value(floating, args)[1], {})

  def both(floating: dict[str, Any], args: tuple[Any, ...]) -> tuple[Any, Any]:
    (_, out), grads = jax.value_and_grad(value, has_aux=True)(floating, args)
    return out, grads

  return both


def run(traced: jax.stages.Traced, args: tuple[Any, ...]) -> Any:
  return traced.lower().compile()(floating(args), args)


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


def has_products(text: str) -> bool:
  """Whether there are products whose precision is left to the policy."""
  products = [line for line in text.splitlines() if re.search(r"stablehlo\.(dot_general|convolution)", line)]
  return any("HIGHEST" not in line for line in products)


def identity_failures(case: Case, plain: Any, want: Any) -> Iterator[str]:
  """Where the fp32 policy changes a bit; nowhere, if the program is the same text."""
  fp32 = program(case, lambda fun: mpjax.autocast(fun, "fp32"))
  traced, jaxprs = trace_together({"fp32": fp32}, floating(case.args), case.args)
  if str(jaxprs["fp32"]) == str(plain):
    return
  got = run(traced, case.args)["fp32"]
  if jax.tree.structure(got) != jax.tree.structure(want):
    yield f"fp32: tree {jax.tree.structure(got)} instead of {jax.tree.structure(want)}"
    return
  for name, a, b in pairs(got, want):
    if a.dtype != b.dtype or a.tobytes() != b.tobytes():
      yield f"fp32: {name}: {a} is not bitwise {b}"


def failures(case: Case, tolerance: float, got: tuple[Any, Any], want: tuple[Any, Any]) -> Iterator[str]:
  """Lines for the leaves that are not as promised: tree, shapes, dtypes, finiteness, values."""
  if jax.tree.structure(got) != jax.tree.structure(want):
    yield f"tree {jax.tree.structure(got)} instead of {jax.tree.structure(want)}"
    return
  yield from leaf_failures("output", got[0], want[0], tolerance * case.slack)
  # A gradient that is zero but for rounding (the bias of keys) is measured against the others.
  largest = max((magnitude(g) for g in jax.tree.leaves(want[1])), default=0.0)
  yield from leaf_failures("gradient", got[1], want[1], tolerance * case.grad_slack, 0.1 * largest)


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
