"""`half_precision`: a region of a function that autocast traces in the compute dtype and leaves as it is.

Autocast decides about a program after its trace; but a kernel, and a custom derivative rule, is made for
the dtypes that it is traced with. So, during the trace, autocast sets the dtype of regions in a
context that is part of the key of JAX's caches, and a region casts its arguments. Scopes of `mpjax.jaxpr`
mark the inside, which autocast leaves alone, and the casts at the edges, whose values are half precision.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mpjax._types import AnyJaxpr, Array, ClosedJaxpr
from mpjax.casting._kinds import castable, own_types
from mpjax.casting._nnx_modules import Modules, with_module_argument
from mpjax.casting._overrides import Overrides
from mpjax.jaxpr import (
  HALF_PRECISION,
  REGION_EDGE,
  bodies_of,
  in_region,
  inside,
  marked_path,
  open_jaxpr,
  without_marks,
)


class Regions(NamedTuple):
  """The dtype of the regions of a trace.

  Attributes:
    half: their half dtype; `None` for float32.
    instead: where `half` is `None`, the dtype of regions that raise an error for float32.
  """

  half: np.dtype | None
  instead: np.dtype | None = None


NO_REGIONS = Regions(None)
# The dtype of regions, while autocast traces.
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
  precision, like the results of a matrix product. A result of the shape and half dtype of an argument, such
  as a cache, stays half precision. Arrays that `fun` closes over keep their dtype. The region does nothing
  without an outer autocast, under a policy that computes in float32, in `mpjax.full_precision`, or if no
  argument is float32. All regions of a program run in one dtype: autocast raises a `ValueError` for an
  override that puts the module of one into another. Under an FP8 policy it runs in the compute dtype. Also
  a decorator. Wrap a module at the call, as in `half_precision(self.attention)(x)`: the result is a plain
  function, so a module that stores it does not have the weights as parameters.

  Args:
    fun: any function of pytrees.

  Returns:
    A function with `fun`'s signature, whose results are float32 outside if `fun`'s are.

  Raises:
    TypeError: if `fun` is not a function.
  """
  if not callable(fun):
    raise TypeError(f"half_precision of {fun!r}: expected a function")

  @functools.wraps(fun)
  def region(*args: Any, **kwargs: Any) -> Any:
    regions = tracing.value
    if regions == NO_REGIONS:
      return fun(*args, **kwargs)
    inner, given = with_module_argument(fun, args)
    modules = Modules(given, kwargs)
    wide = [
      _is(leaf, np.float32) and may for leaf, may in zip(modules.leaves, modules.parameters, strict=True)
    ]
    if not any(wide):
      return fun(*args, **kwargs)
    half = regions.half
    if half is None:
      try:
        with jax.named_scope(HALF_PRECISION), tracing(NO_REGIONS):
          return fun(*args, **kwargs)
      except Exception:
        if regions.instead is None:
          raise
        half = regions.instead
    own = own_types(modules.leaves)  # such as a cache
    widened = lambda x: _cast(x, np.float32) if _is(x, half) and (x.shape, x.dtype) not in own else x
    with jax.named_scope(HALF_PRECISION), tracing(NO_REGIONS):
      leaves = [_cast(leaf, half) if cast else leaf for leaf, cast in zip(modules.leaves, wide, strict=True)]
      out, changed = jax.tree.map(widened, modules.call(inner, leaves, scopes=False))
    modules.update(changed)
    return out

  return region


def _is(x: object, dtype: Any) -> bool:
  """Returns whether `x` is an array of a floating dtype, and not a reference to one."""
  is_array = isinstance(x, (jax.Array, np.ndarray)) and x.dtype == dtype
  return is_array and (dtype != np.float32 or castable(jax.typeof(x)))


def _cast(x: Array, dtype: Any) -> Array:
  with jax.named_scope(REGION_EDGE):
    return jax.lax.convert_element_type(x, dtype)


def trace(make: Callable[[], ClosedJaxpr], overrides: Overrides | None) -> ClosedJaxpr:
  """Returns the trace from `make`, with its regions in the half dtype in use; float32 without overrides.

  Raises:
    ValueError: for a region in a module that an override puts into another dtype. A region has to know its
      dtype before its module is known.
  """
  known = overrides.halves if overrides is not None else [None]
  if overrides is None or known == [None]:
    with tracing(NO_REGIONS if tracing.value.instead is None else tracing.value):
      return make()
  half = overrides.any_half
  with tracing(Regions(half)):
    closed = make()
  for path in _regions(closed, "") if known != [half] else ():
    own = overrides.half_at(path)
    if own != half:
      raise ValueError(
        f"the region of mpjax.half_precision at {without_marks(path)!r} runs in {half}, and its module in "
        f"{own or 'float32'}: call its function inside mpjax.full_precision there, or leave its module out "
        "of the overrides"
      )
  return closed


def _regions(jaxpr: AnyJaxpr, path: str) -> Iterator[str]:
  """Yields the marked paths of the equations in regions."""
  for equation in open_jaxpr(jaxpr).eqns:
    own = inside(path, marked_path(equation))
    if in_region(own):
      yield own
      continue
    for body in bodies_of(equation):
      yield from _regions(body, own)
