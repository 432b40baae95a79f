"""`half_precision`: a region of a function that autocast traces in the compute dtype and leaves as it is.

Autocast decides about a program after its trace; but a kernel, and a custom derivative rule, is made for
the dtypes that it is traced with. So, during the trace, autocast sets the dtype of regions in a
context that is part of the key of JAX's caches, and a region casts its arguments. Scopes of `mpjax.jaxpr`
mark the inside, which autocast leaves alone, and the casts at the edges, whose values are half precision.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mpjax._types import AnyJaxpr, Array, ClosedJaxpr, PyTree
from mpjax.casting._casting_rules import Overrides
from mpjax.casting._kinds import castable
from mpjax.casting._nnx_modules import Modules, with_module_argument
from mpjax.jaxpr import (
  HALF_PRECISION,
  REGION_EDGE,
  bodies_of,
  in_region,
  inside,
  marked_path,
  open_jaxpr,
  region_mark,
  without_marks,
)

_MOST_TRACES = 4
_traces = itertools.count()


@dataclasses.dataclass(frozen=True)
class Regions:
  """The dtype of each region of one trace.

  If all regions are in modules of one policy, these are equal for all traces, which share JAX's caches.
  Otherwise the module of a region is known only after the trace: regions are numbered in the order of the
  trace, which is the same at the next trace.

  Attributes:
    usual: the usual half dtype of regions; `None` for float32.
    instead: for regions that do not take float32 where `usual` is float32, the dtype in which they run
      instead of raising their error.
    trace: the number of this trace; `None`: its regions are not numbered.
    others: by number, the dtype of regions in other modules.
    entered: whether each region so far runs in `usual` alone.
  """

  usual: np.dtype | None
  instead: np.dtype | None = None
  trace: int | None = None
  others: Mapping[int, np.dtype | None] = dataclasses.field(default_factory=dict, compare=False)
  entered: list[bool] = dataclasses.field(default_factory=list, compare=False)

  def enter(self, strict: bool) -> tuple[np.dtype | None, str]:
    """Returns the dtype and the scope of the next region."""
    if self.trace is None:
      return self.usual, HALF_PRECISION
    number = len(self.entered)
    self.entered.append(strict)
    return self.others.get(number, self.usual), f"{HALF_PRECISION}#{self.trace}.{number}"


NO_REGIONS = Regions(None)
# The dtypes of regions, while autocast traces.
tracing = jax.make_user_context(default_value=NO_REGIONS)
# Whether `explain` traces: an autocast inside then marks what it has decided.
explaining = jax.make_user_context(default_value=False)


def float32_where_there_is_one() -> contextlib.AbstractContextManager[object]:
  """Makes regions inside run in float32, and those that raise an error for it in bfloat16."""
  return tracing(Regions(None, instead=np.dtype(jnp.bfloat16)))


def half_precision(fun: Callable[..., Any]) -> Callable[..., Any]:
  """Returns `fun` as a region that `autocast` runs wholly in the compute dtype and leaves as it is.

  For kernels, which autocast leaves in their dtypes, and for code that does not take float32:

  ```python
  attention = mpjax.half_precision(jax.nn.dot_product_attention)  # bfloat16 under "bf16"
  loss = mpjax.autocast(lambda q, k, v: jnp.mean(attention(q, k, v) ** 2), "bf16")
  ```

  Its float32 arguments are cast to the compute dtype (values outside float16's range to its largest ones);
  in an `nnx.Module` the parameters are. Autocast decides nothing inside, and the results are half
  precision, like the results of a matrix product. Arrays that `fun` closes over keep their dtype. The region
  does nothing without an outer autocast, under a policy that computes in float32, in `mpjax.full_precision`,
  or if no argument is float32. Under an FP8 policy it runs in the compute dtype. Autocast raises a
  `ValueError` for an override that puts the module of a region into another dtype. Also a decorator. Wrap a
  module at the call, as in `half_precision(self.attention)(x)`: the result is a plain function, so a module
  that stores it does not have the weights as parameters.

  Args:
    fun: any function of pytrees.

  Returns:
    A function with `fun`'s signature, whose results are float32 outside if `fun`'s are.

  Raises:
    TypeError: if `fun` is not a function.
  """
  if not callable(fun):
    raise TypeError(f"half_precision of {fun!r}: expected a function")
  return _region(fun, strict=True)


def as_its_module(fun: Callable[..., Any]) -> Callable[..., Any]:
  """Returns `fun`, which takes any dtype, as a region that runs in the dtype of its module."""
  return _region(fun, strict=False)


def _region(fun: Callable[..., Any], strict: bool) -> Callable[..., Any]:
  @functools.wraps(fun)
  def region(*args: Any, **kwargs: Any) -> Any:
    regions = tracing.value
    if regions.usual is None and regions.instead is None:
      return fun(*args, **kwargs)
    inner, given = with_module_argument(fun, args)
    modules = Modules(given, kwargs)
    wide = [
      _is(leaf, np.float32) and may for leaf, may in zip(modules.leaves, modules.parameters, strict=True)
    ]
    if not any(wide):
      return fun(*args, **kwargs)
    half, scope = regions.enter(strict)
    if half is None:
      try:
        with jax.named_scope(scope), tracing(NO_REGIONS):
          return fun(*args, **kwargs)
      except Exception:
        if regions.instead is None:
          raise
        half = regions.instead
    call = lambda leaves: modules.call(inner, leaves, scopes=False)
    own = _halves_of_its_own(call, modules.leaves, half)
    with jax.named_scope(scope), tracing(NO_REGIONS):
      leaves = [_cast(leaf, half) if cast else leaf for leaf, cast in zip(modules.leaves, wide, strict=True)]
      results, structure = jax.tree.flatten(call(leaves))
      out, changed = jax.tree.unflatten(
        structure,
        [_cast(x, np.float32) if _is(x, half) and i not in own else x for i, x in enumerate(results)],
      )
    modules.update(changed)
    return out

  return region


def _halves_of_its_own(call: Callable[[list[Any]], PyTree], leaves: list[Any], half: np.dtype) -> set[int]:
  """Returns the results that are half precision also without autocast, such as a cache in the arguments."""
  if not any(_is(leaf, half) for leaf in leaves):
    return set()
  # A type such as `jnp.float32` has a dtype, too.
  arrays = {i: leaf for i, leaf in enumerate(leaves) if isinstance(leaf, (jax.Array, np.ndarray, np.generic))}

  def results(arrays: dict[int, Array]) -> list[Array]:
    return jax.tree.leaves(call([arrays.get(i, leaf) for i, leaf in enumerate(leaves)]))

  try:
    with tracing(NO_REGIONS):
      return {i for i, x in enumerate(jax.eval_shape(results, arrays)) if x.dtype == half}
  except Exception:  # it does not take float32
    return set()


def _is(x: object, dtype: Any) -> bool:
  """Returns whether `x` is an array of a floating dtype, and not a reference to one."""
  is_array = isinstance(x, (jax.Array, np.ndarray)) and x.dtype == dtype
  return is_array and (dtype != np.float32 or castable(jax.typeof(x)))


def _cast(x: Array, dtype: Any) -> Array:
  with jax.named_scope(REGION_EDGE):
    return jax.lax.convert_element_type(x, dtype)


def trace(make: Callable[[], ClosedJaxpr], overrides: Overrides) -> ClosedJaxpr:
  """Returns the trace from `make`, with each region in the dtype of its module.

  If JAX traces a function once for modules of several dtypes, its regions have the widest.

  Raises:
    ValueError: for a strict region in a module of another dtype than the policy's.
  """
  if overrides.halves == [None]:
    with tracing(NO_REGIONS if tracing.value.instead is None else tracing.value):
      return make()
  usual = overrides.any_half
  with tracing(Regions(usual)):
    closed = make()
  if overrides.halves == [usual] or all(own == usual for _, own in _regions(closed, overrides, "")):
    return closed
  others: dict[int, np.dtype | None] = {}
  for _ in range(_MOST_TRACES):  # a derivative rule may have other regions in another dtype
    regions = Regions(usual, trace=next(_traces), others=others)
    with tracing(regions):
      closed = make()
    found: dict[int, np.dtype | None] = {}
    for path, own in _regions(closed, overrides, ""):
      of_trace, _, number = region_mark(path).partition(".")
      if of_trace == str(regions.trace):  # not of an inner autocast
        if regions.entered[int(number)] and own != usual and overrides.is_set(path):
          raise ValueError(
            f"a half_precision region in {without_marks(path)!r}, which an override computes in "
            f"{own or 'float32'}, and regions in {usual}: write mpjax.full_precision in its place, or leave "
            "the module out of the override"
          )
        found[int(number)] = None if found.get(int(number), own) is None else own  # float32 is the widest
    if all(others.get(i, usual) == own for i, own in found.items()):
      break
    others = others | found
  return closed


def _regions(jaxpr: AnyJaxpr, overrides: Overrides, path: str) -> Iterator[tuple[str, np.dtype | None]]:
  """Yields (marked path, dtype of its module) for the equations in regions."""
  for equation in open_jaxpr(jaxpr).eqns:
    own = inside(path, marked_path(equation))
    if in_region(own):
      yield own, overrides.half_at(own)
      continue
    for body in bodies_of(equation):
      yield from _regions(body, overrides, own)
