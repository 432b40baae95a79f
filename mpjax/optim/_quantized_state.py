"""`quantized_state`: any optax transform with its moments in 8 bits, or in bfloat16."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, Never

import jax
import jax.numpy as jnp
import optax
import optax.contrib
from jax.tree_util import KeyPath

from mpjax._calls import refuse_keywords, require_transform
from mpjax._types import Array, PyTree
from mpjax.dtypes import STATE_DTYPES, one_of, widen_floating
from mpjax.jaxpr import outputs_of
from mpjax.loss_scale import keep_dtypes
from mpjax.optim._quantized import (
  SEED,
  Quantized,
  is_quantized,
  quantize,
  quantize_like,
  rebuild,
  scales_like,
  scales_of,
  unstored,
)
from mpjax.optim._stochastic import leaf_key
from mpjax.patterns import component_regex, named_leaves, parameter_of, path_text

# Names that other libraries give the arguments.
_ELSEWHERE = {
  "bits optim_bits": "name the format, as in mpjax.quantized_state(tx, 'int8')",
  "block_size blocksize": "pass group=128",
}

# Fields, by state, that are not moments, although `init` sets them to zeros.
_FIELDS: dict[type | None, tuple[str, ...]] = {
  optax.MultiStepsState: ("acc_grads",),  # gradients that are added up before use
  optax.ApplyEvery: ("grad_acc",),
  optax.ScaleByLBFGSState: ("params", "updates"),  # from the last step, for the difference to this step
  optax.contrib.DoGState: ("init_params",),  # in older versions set at the first update, not by `init`
}
# Sums (and maxima) without decay: soon a step adds less than half of a code of 8 bits.
_SUMS: dict[type | None, tuple[str, ...]] = {
  optax.ScaleByRssState: ("sum_of_squares",),
  optax.contrib.COCOBState: ("cumulative_gradients", "scale", "subgradients", "reward"),
  getattr(optax.contrib, "MadgradState", None): ("grad_sum_sq", "s"),  # not in older versions
}


class QuantizedState(NamedTuple):
  """State of `quantized_state`.

  Attributes:
    inner_state: the wrapped transform's, with a `Quantized` for each array that is stored in few bytes.
    steps: i32[]; updates so far, from which the noise of rounding to bfloat16 is generated.
  """

  inner_state: PyTree
  steps: Array


def quantized_state(
  inner: optax.GradientTransformation,
  dtype: str = "int8",
  *,
  group: int = 128,
  min_size: int = 4096,
  exclude: str | Sequence[str] | None = None,
  **unknown: Never,
) -> optax.GradientTransformationExtraArgs:
  """Wraps `inner` and stores its state in few bytes; `inner` still computes in float32.

  ```python
  tx = mpjax.quantized_state(optax.adamw(3e-4, b2=0.95), exclude=["embed"])
  ```

  The floating leaves of the state that have a parameter's path and shape (moments) are stored in `dtype`
  between steps: Adam's moments take 2.06 bytes per parameter instead of 8. Codes have the parameter's shape,
  are divided over devices as it is, and have the same bits on any mesh. No collective is added if a device's
  part of a row is a multiple of the group.

  `inner` sees float32 gradients, parameters and state, and its updates are float32. An entry that is not
  finite makes its group's scale non-finite, never a code. Put the guard that skips such steps outside
  (`mpjax.dynamic_loss_scale`, `mpjax.static_loss_scale(tx, 1)`). A skipped step changes no bit of the state.
  Steps do not change the dtypes that `init` gives the state.

  Sums without decay (of `adagrad`, `madgrad`, `cocob`) are in bfloat16, since 8 bits would lose what a step
  adds. For those of an optimiser that is not in optax use `exclude`, or `"bfloat16"` for the whole state.

  Other state stays as it is: state that holds parameters, which small updates would not move, and
  gradients that `optax.MultiSteps` and `optax.apply_every` add up. Parameters are leaves that `inner.init`
  computes from the values of parameters, such as `z` of `optax.contrib.schedule_free` and the first
  parameters that `mechanize`, `prodigy` and `dog` keep. Name other leaves to keep in `exclude`.

  Args:
    inner: any optax transform.
    dtype: `"int8"` (floating codes, eight per binade, all 255 of them for moments without a sign),
      `"float8_e4m3fn"`, or `"bfloat16"` by stochastic rounding. The first two have a float32 scale per group.
    group: the most entries along the last dimension that share a scale.
    min_size: leaves with fewer entries stay as they are.
    exclude: regular expressions on a leaf's path in `inner`'s state (`0/nu/embed/embedding`) that
      match whole components; leaves that match stay as they are.

  Returns:
    A transform with a `QuantizedState`.

  Raises:
    ValueError: names the wrong argument.
  """
  refuse_keywords(quantized_state, unknown, _ELSEWHERE)
  require_transform("quantized_state", inner, "mpjax.quantized_state(tx, 'int8')")
  if dtype not in STATE_DTYPES:
    raise ValueError(f"dtype={dtype!r}: {one_of(dtype, STATE_DTYPES)}")
  for name, value, least in (("group", group, 1), ("min_size", min_size, 0)):
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
      raise ValueError(f"{name}={value!r}: expected an integer of at least {least}")
  patterns = [component_regex(p) for p in ([exclude] if isinstance(exclude, str) else exclude or ())]
  code_dtype = STATE_DTYPES[dtype]
  inner = optax.with_extra_args_support(inner)

  def init(params: PyTree) -> QuantizedState:
    params = widen_floating(params)
    shapes = {name: leaf.shape for name, leaf in named_leaves(params) if hasattr(leaf, "shape")}

    def store(path: KeyPath, leaf: Array, exact: bool, grows: bool) -> Array | Quantized:
      name = path_text(path)
      stays = (
        exact
        or not jnp.issubdtype(jnp.result_type(leaf), jnp.floating)
        or leaf.size < min_size
        or parameter_of(name, leaf.shape, shapes) is None
        or any(p.search(name) for p in patterns)
      )
      if stays:
        return leaf
      leaf = leaf.astype(jnp.float32)
      key = leaf_key(SEED, jnp.zeros([], jnp.int32), path)
      kept_in = STATE_DTYPES["bfloat16"] if grows else code_dtype
      groups = math.ceil(leaf.shape[-1] / group) if leaf.ndim else 1
      scales = None if kept_in == STATE_DTYPES["bfloat16"] else scales_of(leaf, groups)
      return quantize(leaf, scales, kept_in, key)

    state = inner.init(params)
    exact = _is_exact(inner, params, state)
    state = jax.tree_util.tree_map_with_path(store, state, exact, _in_fields(state, _SUMS))
    return QuantizedState(state, jnp.zeros([], jnp.int32))

  def update(
    updates: PyTree, state: QuantizedState, params: PyTree = None, **extra_args: object
  ) -> tuple[PyTree, QuantizedState]:
    state = QuantizedState(rebuild(state.inner_state), state.steps)
    steps = state.steps + 1
    grads, masters = widen_floating(updates), widen_floating(params)

    def step(stored: PyTree) -> tuple[PyTree, PyTree]:
      plain = unstored(stored)
      updates, new = inner.update(grads, plain, masters, **extra_args)
      return updates, keep_dtypes(new, plain)

    # Computed twice, with only the scales kept from the first: otherwise a GPU's compiler would write the
    # whole new state in float32 between the maximum of a group and its codes. Other compilers merge the two.
    is_leaf, barrier = is_quantized, jax.lax.optimization_barrier
    _, new = step(state.inner_state)
    scales = jax.tree.map(scales_like, state.inner_state, new, is_leaf=is_leaf)
    stored, scales = jax.lax.platform_dependent(
      (state.inner_state, scales), cuda=barrier, rocm=barrier, default=lambda x: x
    )
    updates, new = step(stored)

    store = lambda path, old, x, scales: quantize_like(old, x, scales, path, steps)
    stored = jax.tree_util.tree_map_with_path(store, state.inner_state, new, scales, is_leaf=is_leaf)
    return updates, QuantizedState(stored, steps)

  return optax.GradientTransformationExtraArgs(init, update)


def _is_exact(inner: optax.GradientTransformation, params: PyTree, state: PyTree) -> PyTree:
  """Returns, for each leaf of `state`, which is `inner.init(params)`, whether it must stay as it is.

  So must parameters: `z` of `optax.contrib.schedule_free`, and the first parameters that `mechanize`,
  `prodigy` and `dog` keep. They depend on the parameters' values, where a moment depends on shapes alone.
  """
  jaxpr = jax.make_jaxpr(inner.init)(params).jaxpr
  of_values = outputs_of(jaxpr, [True] * len(jaxpr.invars))
  leaves, structure = jax.tree.flatten(_in_fields(state, _FIELDS))
  return jax.tree.unflatten(structure, [a or b for a, b in zip(leaves, of_values, strict=True)])


def _in_fields(state: PyTree, of: dict[type | None, tuple[str, ...]]) -> PyTree:
  """Returns, for each leaf of a state, whether it is in one of these fields."""

  def node(x: PyTree) -> PyTree:
    fields = of.get(type(x))
    if fields is None:
      return False
    parts = zip(x._fields, x, strict=True)
    whole = lambda part: jax.tree.map(lambda _: True, part)
    return type(x)(*(whole(part) if name in fields else _in_fields(part, of) for name, part in parts))

  return jax.tree.map(node, state, is_leaf=lambda x: type(x) in of)


def in_full_bytes(state: PyTree) -> PyTree:
  """Returns a state with that of the wrapped transform, in float32, for each `QuantizedState` in it."""
  is_state = lambda x: isinstance(x, QuantizedState)
  plain = lambda x: in_full_bytes(rebuild(x.inner_state)) if is_state(x) else x
  return unstored(jax.tree.map(plain, state, is_leaf=lambda x: is_state(x) or is_quantized(x)))


def store_like(stored: PyTree, plain: PyTree, steps: Array | int = 0) -> PyTree:
  """Returns a plain state stored like another: quantised in the same leaves, to the same codes and groups.

  `plain` is as from `in_full_bytes`; or what a step makes of `unstored(stored)`, with a `QuantizedState` in
  the same places, whose `steps` count. They are for the noise of rounding to bfloat16.
  """

  def leaf(path: KeyPath, old: Array | Quantized | QuantizedState, x: PyTree) -> PyTree:
    if isinstance(old, QuantizedState):
      inner, now = x if isinstance(x, QuantizedState) else (x, steps)
      return old._replace(inner_state=store_like(old.inner_state, inner, now))
    return quantize_like(old, x, scales_like(old, x), path, jnp.asarray(steps, jnp.int32))

  is_stored = lambda x: isinstance(x, (Quantized, QuantizedState))
  return jax.tree_util.tree_map_with_path(leaf, stored, plain, is_leaf=is_stored)
