"""`half_precision`: a region of a function that autocast traces in the compute dtype as it stands.

Autocast decides about a program after it was traced; but a kernel, and a custom derivative rule, is made for
the dtypes that it is traced with. So autocast says while it traces, by a context that is part of the key of
JAX's caches, in which dtype regions run, and a region casts what it is given. The scopes of `mpjax.jaxpr`
mark what is inside, which is left alone, and the casts at its edges, whose values are half precision to all.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mpjax import _compat
from mpjax._types import AnyJaxpr, ClosedJaxpr, PyTree
from mpjax.casting._kinds import FLOAT32
from mpjax.casting._nnx_modules import Modules, with_module_argument
from mpjax.casting._overrides import Overrides
from mpjax.jaxpr import REGION_EDGE, bodies_of, inside, marked_path, open_jaxpr, region_number, region_scope


class Regions:
  """The dtype of each region of one trace.

  Where all modules compute in one dtype, all traces share it, and so JAX's caches. Elsewhere the module of a
  region is known only after the trace: regions are numbered in the order in which they are come to, which is
  the same at the next trace.

  Args:
    usual: the half dtype of regions; `None` for float32.
    others: by number, those of regions in modules that compute in another dtype; `None`: not numbered.
    instead: for regions that take no float32 where `usual` is float32, the dtype in which they run instead of
      raising their error.
  """

  def __init__(
    self,
    usual: np.dtype | None,
    others: Mapping[int, np.dtype | None] | None = None,
    instead: np.dtype | None = None,
  ):
    self.usual = usual
    self.others = others
    self.instead = instead
    self._numbers = itertools.count()

  def __hash__(self) -> int:
    return hash((self.usual, self.instead)) if self.others is None else id(self)

  def __eq__(self, other: object) -> bool:
    if self is other or not isinstance(other, Regions):
      return self is other
    numbered = self.others is not None or other.others is not None
    return not numbered and (self.usual, self.instead) == (other.usual, other.instead)

  def enter(self) -> tuple[np.dtype | None, str]:
    """Returns the dtype of the region that is come to, and its scope."""
    number = None if self.others is None else next(self._numbers)
    dtype = self.usual if number is None or self.others is None else self.others.get(number, self.usual)
    return dtype, region_scope(number)


NO_REGIONS = Regions(None)
# While autocast traces, the dtypes of regions.
tracing = jax.make_user_context(default_value=NO_REGIONS)


def float32_where_there_is_one() -> contextlib.AbstractContextManager[object]:
  """Has regions run in float32 inside, and in bfloat16 those that raise an error for it."""
  return tracing(Regions(None, instead=np.dtype(jnp.bfloat16)))


def half_precision(fun: Callable[..., Any]) -> Callable[..., Any]:
  """Returns `fun` as a region that `autocast` runs wholly in the compute dtype, as it stands.

  For kernels, which autocast leaves in the dtypes that they are given, and for what takes no float32:

  ```python
  attention = mpjax.half_precision(flash_attention)  # bfloat16 under "bf16", with its own derivative rule
  loss = mpjax.autocast(lambda params, x: loss_of(attention(*heads(params, x))), "bf16")
  ```

  Its float32 arguments are cast to the compute dtype (values outside float16's range to its largest ones);
  nothing inside is decided by autocast, and what it returns is half precision, to be read as the result of a
  matrix product is. Arrays that `fun` holds itself, and does not get as arguments, keep their dtype. It does
  nothing without an autocast outside, in a module that computes in float32, in `mpjax.full_precision`, or
  where no argument is float32. Under an FP8 policy it runs in the compute dtype. Also a decorator.

  Args:
    fun: any function of pytrees.

  Returns:
    A function with `fun`'s signature, float32 outside where `fun` is.
  """

  @functools.wraps(fun)
  def region(*args: Any, **kwargs: Any) -> Any:
    regions = tracing.value
    if regions.usual is None and regions.instead is None:
      return fun(*args, **kwargs)
    inner, given = with_module_argument(fun, args)
    modules = Modules(given, kwargs)
    if not any(map(_is_float32, modules.leaves)):
      return fun(*args, **kwargs)
    half, scope = regions.enter()
    if half is None:
      try:
        return fun(*args, **kwargs)
      except (TypeError, ValueError):
        if regions.instead is None:
          raise
        half = regions.instead
    with jax.named_scope(scope), tracing(NO_REGIONS):
      out, changed = modules.call(inner, _cast(modules.leaves, FLOAT32, half))
      out, changed = _cast((out, changed), half, FLOAT32)
    modules.update(changed)
    return out

  return region


def trace(make: Callable[[], ClosedJaxpr], overrides: Overrides | None) -> ClosedJaxpr:
  """Returns what `make` traces, each region in the dtype of its module; in float32 without overrides."""
  halves = overrides.halves if overrides is not None else {None}
  if halves == {None}:
    with tracing(NO_REGIONS if tracing.value.instead is None else tracing.value):
      return make()
  replace_shipped_kernels()
  usual = next(half for half in halves if half is not None)
  with tracing(Regions(usual, None if len(halves) == 1 else {})):
    closed = make()
  if overrides is None or len(halves) == 1:
    return closed
  others = {n: half for n, half in _regions(closed, overrides, "") if half != usual}
  if not others:
    return closed
  with tracing(Regions(usual, others)):
    return make()


class _KernelOfJax(jax.custom_vjp):
  """A kernel with a derivative rule that JAX ships, as a region; the object stays the one that users hold."""

  def __call__(self, *args: Any, **kwargs: Any) -> Any:
    return half_precision(super().__call__)(*args, **kwargs)


def replace_shipped_kernels() -> None:
  """Makes half-precision regions of the kernels that JAX ships, where their modules have been imported."""
  for module, name in _compat.shipped_kernels():
    kernel = getattr(module, name)
    if type(kernel) is jax.custom_vjp:
      kernel.__class__ = _KernelOfJax
    elif not isinstance(kernel, _KernelOfJax) and not hasattr(kernel, "_mpjax_region_of"):
      region = _unless_quantised(kernel)
      region._mpjax_region_of = kernel  # type: ignore[attr-defined]
      setattr(module, name, region)


def _unless_quantised(kernel: Callable[..., Any]) -> Callable[..., Any]:
  """Returns a kernel as a region, but where an argument is quantised: its scales stay float32."""
  region = half_precision(kernel)

  @functools.wraps(kernel)
  def call(*args: Any, **kwargs: Any) -> Any:
    quantised = any(getattr(x, "dtype", None) == np.int8 for x in jax.tree.leaves((args, kwargs)))
    return (kernel if quantised else region)(*args, **kwargs)

  return call


def _regions(jaxpr: AnyJaxpr, overrides: Overrides, path: str) -> Iterator[tuple[int, np.dtype | None]]:
  for equation in open_jaxpr(jaxpr).eqns:
    own = inside(path, marked_path(equation))
    number = region_number(own)
    if number is not None:
      yield number, overrides.half_at(own)
      continue
    for body in bodies_of(equation):
      yield from _regions(body, overrides, own)


def _is_float32(x: object) -> bool:
  return getattr(x, "dtype", None) == FLOAT32


def _cast(tree: PyTree, dtype: np.dtype, to: np.dtype) -> PyTree:
  with jax.named_scope(REGION_EDGE):
    return jax.tree.map(
      lambda x: jax.lax.convert_element_type(x, to) if getattr(x, "dtype", None) == dtype else x, tree
    )
