"""`master_weights`: bfloat16 parameters with a float32 master weight, in two more bytes or fewer.

A float32 number is its bfloat16 rounding and the 16 bits by which it differs from that. Ties round away from
zero, so the differences are the 2^16 numbers from -32768 to 32767. (With ties to even there would be
2^16 + 1 differences, too many for sixteen bits.) The arithmetic is all on integers, which no compiler
may round differently or leave out.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.tree_util import KeyPath
from jaxtyping import Float32, UInt16

from mpjax._calls import require_transform
from mpjax._types import Array, PyTree
from mpjax.dtypes import MASTER_WEIGHTS, one_of, widen_floating
from mpjax.optim._stochastic import cheap_noise, leaf_key, stochastic_round
from mpjax.patterns import path_text

_INFINITY, _NAN = np.uint32(0x7F800000), np.uint32(0x7FC00000)  # as bits
_MAGNITUDE = np.uint32(0x7FFFFFFF)
_HIGH_24 = np.uint32(0xFFFFFF00)
_HALF = tuple(np.dtype(d) for d in (jnp.bfloat16, jnp.float16))


class MasterWeightsState(NamedTuple):
  """State of `master_weights`.

  Attributes:
    inner_state: the wrapped transform's.
    correction: for each half-precision parameter the bits that its master weight has in addition (int16 or
      int8), or the master weight itself in float32; `optax.MaskedNode()` for other parameters, and for all if
      rounding is stochastic.
    steps: i32[]; updates so far, from which the noise of stochastic rounding is generated.
  """

  inner_state: PyTree
  correction: PyTree
  steps: Array


def master_weights(
  inner: optax.GradientTransformation, correction: str = "int16", *, seed: int = 0
) -> optax.GradientTransformationExtraArgs:
  """Wraps `inner` for bfloat16 parameters, so that small updates are not lost.

  ```python
  tx = mpjax.master_weights(mpjax.quantized_state(optax.adamw(3e-4, b2=0.95)), "int8")
  opt_state = tx.init(mpjax.cast_floating(params, jnp.bfloat16))
  ```

  `inner` sees the master weights instead of the parameters (so weight decay is right), and gradients in
  float32. With these updates, `optax.apply_updates` makes each parameter the rounding of its new
  master weight. There is no such update if a parameter shrinks by more than 2^16 in one step, or is
  subnormal: then the master weight becomes equal to the new parameter.

  Parameters in float32 pass through unchanged, and need no correction. Put this around the whole chain that
  makes updates (a transform after it would change them), and inside `mpjax.dynamic_loss_scale` and
  `optax.MultiSteps`.

  Args:
    inner: any optax transform.
    correction: one of these. `"int16"`: parameter and correction are a float32 master weight bit for bit, 4
      bytes in all. `"int8"`: a master weight of 24 bits, rounded stochastically, 3 bytes. `"stochastic"`: no
      correction, the new parameter is rounded stochastically, 2 bytes. `"float32"`: a separate master
      weight, 6 bytes. The first two take only bfloat16.
    seed: seed of stochastic rounding; the same seed gives the same bits, on any mesh.

  Returns:
    A transform with a `MasterWeightsState`. Its `update` needs `params`.

  Raises:
    ValueError: for an unknown correction; by `init`, for a float16 parameter with `"int16"` or `"int8"`;
      by `update`, without `params`.
  """
  require_transform("master_weights", inner, "mpjax.master_weights(tx)")
  return make_master_weights(inner, correction, seed, give_new=False)


def make_master_weights(
  inner: optax.GradientTransformation, correction: str, seed: int, give_new: bool
) -> optax.GradientTransformationExtraArgs:
  """Makes `master_weights`, or with `give_new` a form of it without exceptions, for `apply_bits`.

  That gives, as updates of half-precision parameters, the number of steps from the bits of the old parameter
  to those of the new one, in float32. 0 changes nothing, as in any update.
  """
  if correction not in MASTER_WEIGHTS:
    raise ValueError(f"correction={correction!r}: {one_of(correction, MASTER_WEIGHTS)}")
  inner = optax.with_extra_args_support(inner)

  def init(params: PyTree) -> MasterWeightsState:
    first = jax.tree_util.tree_map_with_path(lambda path, p: _first(path, p, correction), params)
    return MasterWeightsState(inner.init(widen_floating(params)), first, jnp.zeros([], jnp.int32))

  def update(
    updates: PyTree, state: MasterWeightsState, params: PyTree = None, **extra_args: object
  ) -> tuple[PyTree, MasterWeightsState]:
    if params is None:
      raise ValueError("update(grads, state) without params: master weights are computed from parameters")
    steps = state.steps + 1
    masters = join(params, state.correction)
    updates, inner_state = inner.update(widen_floating(updates), state.inner_state, masters, **extra_args)

    def leaf(path: KeyPath, p: Array, master: Array, u: Array) -> _Pair:
      if not is_half_array(p):
        return _Pair(u, optax.MaskedNode())
      key = leaf_key(seed, steps, path)
      new, extra = split(master + u.astype(jnp.float32), correction, p.dtype, key)
      if give_new:
        return _Pair((_bits(new).astype(jnp.int32) - _bits(p).astype(jnp.int32)).astype(jnp.float32), extra)
      difference = new.astype(jnp.float32) - p.astype(jnp.float32)
      given = (p.astype(jnp.float32) + difference).astype(p.dtype)
      none = given.astype(jnp.float32) if correction == "float32" else 0
      return _Pair(difference, jax.tree.map(lambda c: jnp.where(_bits(given) == _bits(new), c, none), extra))

    updates, corrections = _apart(jax.tree_util.tree_map_with_path(leaf, params, masters, updates))
    return updates, MasterWeightsState(inner_state, corrections, steps)

  return optax.GradientTransformationExtraArgs(init, update)


def join(params: PyTree, correction: PyTree) -> PyTree:
  """Returns the master weights (float32) of half-precision parameters by a `correction`; others as given."""
  return jax.tree.map(_join, params, correction)


def split_like(masters: PyTree, params: PyTree, correction: str) -> tuple[PyTree, PyTree]:
  """Returns parameters and corrections for master weights (float32), in the dtypes of some parameters.

  Parameters that are not half precision stay as they are.
  """

  def leaf(path: KeyPath, master: Array, p: Array) -> _Pair:
    if not is_half_array(p):
      return _Pair(p, optax.MaskedNode())
    key = leaf_key(0, jnp.zeros([], jnp.int32), path)
    return _Pair(*split(master.astype(jnp.float32), correction, p.dtype, key, nearest=True))

  return _apart(jax.tree_util.tree_map_with_path(leaf, masters, params))


def apply_bits(params: PyTree, updates: PyTree) -> PyTree:
  """Applies updates of `make_master_weights(..., give_new=True)` to half-precision parameters.

  Other parameters are updated as `optax.apply_updates` does.
  """

  def leaf(p: Array, u: Array) -> Array:
    if not is_half_array(p):
      return optax.apply_updates(p, u)
    bits = _bits(p).astype(jnp.int32) + u.astype(jnp.int32)
    return jax.lax.bitcast_convert_type(bits.astype(jnp.uint16), p.dtype)

  return jax.tree.map(leaf, params, updates)


def is_half_array(x: object) -> bool:
  """True for an array in bfloat16 or float16."""
  return getattr(x, "dtype", None) in _HALF


class _Pair(NamedTuple):
  given: Array
  correction: Array | optax.MaskedNode


def _apart(pairs: PyTree) -> tuple[PyTree, PyTree]:
  pick = lambda i: jax.tree.map(lambda pair: pair[i], pairs, is_leaf=lambda x: isinstance(x, _Pair))
  return pick(0), pick(1)


def _first(path: KeyPath, p: Array, correction: str) -> Array | optax.MaskedNode:
  """Returns the correction of a parameter that equals its master weight."""
  if not is_half_array(p) or correction == "stochastic":
    return optax.MaskedNode()
  if correction != "float32" and p.dtype != jnp.bfloat16:
    raise ValueError(
      f"parameter {path_text(path)!r} is {p.dtype.name}: correction={correction!r} is for bfloat16; float16 "
      "takes 'float32' or 'stochastic'"
    )
  return p.astype(jnp.float32) if correction == "float32" else jnp.zeros_like(p, jnp.dtype(correction))


def _join(p: Array, correction: Array | optax.MaskedNode) -> Array:
  if isinstance(correction, optax.MaskedNode):
    return p.astype(jnp.float32) if is_half_array(p) else p
  if correction.dtype == jnp.float32:
    return correction
  low = correction.astype(jnp.int32) << (16 - 8 * correction.dtype.itemsize)
  high = _bits(p).astype(jnp.int32) << 16
  return jax.lax.bitcast_convert_type(high + low, jnp.float32)


def split(
  master: Float32[Array, "..."], correction: str, dtype: np.dtype, key: Array, nearest: bool = False
) -> tuple[Array, Array | optax.MaskedNode]:
  """Returns the half-precision parameter for a master weight, and its correction (see `master_weights`).

  24 bits are rounded stochastically by the key, or to the `nearest`.
  """
  if correction == "stochastic":
    return stochastic_round(master, key, dtype), optax.MaskedNode()
  if dtype == jnp.float16:
    return master.astype(dtype), master
  bits = jax.lax.bitcast_convert_type(master, jnp.uint32)
  magnitude = bits & _MAGNITUDE
  bits = jnp.where(magnitude > _INFINITY, _NAN, bits)  # another NaN could round to a number
  if correction == "int8":
    noise = jnp.uint32(0x80) if nearest else cheap_noise(key, master.shape) >> 24
    rounded = (bits + noise) & _HIGH_24
    overflows = (magnitude < _INFINITY) & ((rounded & _MAGNITUDE) >= _INFINITY)
    bits = jnp.where(overflows, bits & _HIGH_24, rounded)
  high = (bits + np.uint32(0x8000)) >> np.uint32(16)
  low = jax.lax.bitcast_convert_type(bits - (high << np.uint32(16)), jnp.int32)
  new = jax.lax.bitcast_convert_type(high.astype(jnp.uint16), dtype)
  if correction == "float32":
    return new, master
  return new, (low >> (16 - 8 * np.dtype(correction).itemsize)).astype(correction)


def _bits(x: Array) -> UInt16[Array, "..."]:
  return jax.lax.bitcast_convert_type(x, jnp.uint16)
