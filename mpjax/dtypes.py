"""Dtypes by name, casts and shapes of a tree, and the hints in error messages."""

from __future__ import annotations

import contextlib
import difflib
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from mpjax._types import Array, DTypeLike, PyTree

T = TypeVar("T")

# Only these are cast: narrower floats (float8, float4, e8m0) are quantised data with separate scales;
# a cast would destroy them.
_CASTABLE = tuple(np.dtype(d) for d in (jnp.float16, jnp.bfloat16, jnp.float32, jnp.float64))
DTYPE_NAMES = {
  "bf16": "bfloat16",
  "bfloat16": "bfloat16",
  "f16": "float16",
  "float16": "float16",
  "full": "float32",
  "f32": "float32",
  "float32": "float32",
  "f64": "float64",
  "float64": "float64",
}
# The storage formats of `quantized_state`, by name.
STATE_DTYPES = {name: np.dtype(name) for name in ("int8", "float8_e4m3fn", "bfloat16")}
# The corrections of `master_weights`, for half-precision parameters.
MASTER_WEIGHTS = ("float32", "int16", "int8", "stochastic")
_PLATFORMS = {"cpu": "cpu", "tpu": "tpu", "gpu": "gpu", "cuda": "gpu", "rocm": "gpu"}


def cast_floating(tree: T, dtype: DTypeLike) -> T:
  """Casts the float16, bfloat16, float32 and float64 leaves of `tree` to `dtype`.

  ```python
  half = mpjax.cast_floating(params, jnp.bfloat16)
  ```

  Everything else stays unchanged: integers, booleans, PRNG keys, `None`, `float0`, complex,
  Python scalars, and floats narrower than 16 bits (quantised data).

  Args:
    tree: any pytree, `nnx.State` or `nnx.Module` of JAX arrays, tracers, NumPy arrays or
      `jax.ShapeDtypeStruct`; it is not changed.
    dtype: the dtype to cast to.

  Returns:
    A tree of the same structure; leaves that have `dtype` already are the same objects.
  """
  return _cast(tree, lambda leaf: dtype)


def cast_by_rank(tree: T, vectors: DTypeLike, others: DTypeLike) -> T:
  """Casts a tree as `cast_floating` does, with another dtype for leaves of fewer than two dimensions."""
  return _cast(tree, lambda leaf: vectors if getattr(leaf, "ndim", 2) < 2 else others)


def widen_floating(tree: T) -> T:
  """Casts the float16 and bfloat16 leaves of a tree to float32; everything else stays unchanged."""
  return _cast(tree, lambda leaf: leaf.dtype if leaf.dtype.itemsize > 2 else jnp.float32)


def _cast(tree: T, dtype_of: Callable[[Any], DTypeLike]) -> T:
  nnx = sys.modules.get("flax.nnx")  # slow to import, and not imported unless the user has an nnx module
  if nnx is not None and isinstance(tree, nnx.Module):
    # Goes through the graph, not a pytree, so that shared variables remain shared.
    graphdef, state = nnx.split(tree)
    return nnx.merge(graphdef, _cast(state, dtype_of))

  def cast(leaf: Any) -> Any:
    # `None == np.dtype("float64")` holds in NumPy, so this first checks for a leaf without a dtype.
    if not hasattr(leaf, "dtype") or leaf.dtype not in _CASTABLE:
      return leaf
    dtype = np.dtype(dtype_of(leaf))
    if leaf.dtype == dtype:
      return leaf
    if isinstance(leaf, jax.ShapeDtypeStruct):
      return leaf.update(dtype=dtype)
    return leaf.astype(dtype) if isinstance(leaf, (jax.Array, np.ndarray, np.generic)) else leaf

  return jax.tree.map(cast, tree)


def cast_like(tree: PyTree, like: PyTree) -> PyTree:
  """Casts each leaf of a tree to the dtype of its counterpart; a leaf in that dtype stays unchanged.

  Args:
    tree: tree of arrays or numbers.
    like: a tree of the same structure; if its leaf has no dtype, the leaf of `tree` stays unchanged.
  """

  def cast(leaf: Array, other: Array) -> Array:
    same = not hasattr(other, "dtype") or jnp.asarray(leaf).dtype == other.dtype
    return leaf if same else jnp.asarray(leaf).astype(other.dtype)

  return jax.tree.map(cast, tree, like)


def as_shapes(tree: PyTree) -> PyTree:
  """Returns the shape and dtype of each leaf of a tree, also of numbers, without shardings."""
  return jax.tree.map(lambda x: jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)), tree)


def at_least_float32(dtype: DTypeLike) -> np.dtype:
  """Returns `dtype` if it is floating or complex and no narrower than float32, else float32.

  Unlike `jnp.promote_types`, it gives the same under `jax_numpy_dtype_promotion=strict`.
  """
  wide = jnp.issubdtype(dtype, jnp.inexact) and jnp.finfo(dtype).bits >= 32
  return np.dtype(dtype if wide else jnp.float32)


def parse_dtype(
  value: DTypeLike, where: str, backend: str | None, also: Mapping[str, np.dtype] | None = None
) -> np.dtype:
  """Returns the dtype for a name of `DTYPE_NAMES`, `half` or a dtype.

  Args:
    value: a name or a dtype.
    where: the policy that the error names.
    backend: see `platform`.
    also: more names.
  """
  names: dict[str, DTypeLike] = {**DTYPE_NAMES, **(also or {})}
  if value == "half":
    return np.dtype(jnp.bfloat16 if platform(backend) == "tpu" else jnp.float16)
  if isinstance(value, str):
    if value not in names:
      raise ValueError(f"Unknown dtype {value!r} in policy {where!r}: {one_of(value, ['half', *names])}")
    value = names[value]
  return check_dtype(where, value, (also or {}).values())


def check_dtype(field: str, value: DTypeLike | None, also: Iterable[np.dtype] = ()) -> np.dtype:
  """Returns `value` as one of the dtypes that can be cast to; `ValueError` naming `field` for any other.

  Args:
    field: the name of the field.
    value: a dtype or its name.
    also: other dtypes to allow.
  """
  choices = dict.fromkeys([*_CASTABLE, *also])
  dtype: np.dtype | None = None
  with contextlib.suppress(TypeError):
    dtype = None if value is None else np.dtype(value)
  if dtype is None or dtype not in choices:
    hint = "; for FP8, use the fp8 key or preset" if "float8" in str(value) else ""
    raise ValueError(
      f"{field}={value!r}: expected a floating dtype among {', '.join(d.name for d in choices)}{hint}"
    )
  return dtype


def platform(backend: str | None) -> str:
  """Returns `cpu`, `gpu` or `tpu` for a backend name; for `None`, the platform of JAX's default backend."""
  name = jax.default_backend() if backend is None else backend
  if name not in _PLATFORMS:
    raise ValueError(f"backend {name!r}: expected one of {', '.join(_PLATFORMS)}")
  return _PLATFORMS[name]


def one_of(word: object, choices: Iterable[str]) -> str:
  """Returns the end of an error message about a word: what is expected, and the nearest of that."""
  choices = list(choices)
  return f"expected one of {', '.join(choices)}{did_you_mean(str(word), choices)}"


def did_you_mean(word: str, choices: Iterable[str]) -> str:
  """Returns the end of an error message: the nearest of `choices`, or nothing."""
  close = difflib.get_close_matches(word, list(choices), n=1, cutoff=0.5)
  return f"; did you mean {close[0]!r}?" if close else ""
