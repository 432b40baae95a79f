"""The distance of a policy's gradients from float32's, and the noise that the gradients have anyway."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from mpjax._render.tables import Renamed
from mpjax._types import Array, PyTree
from mpjax.dtypes import at_least_float32
from mpjax.jaxpr import layer_pattern
from mpjax.loss_scale import LossScaleState, find_scaler
from mpjax.numerics import reference_state, reference_step, rows
from mpjax.patterns import named_leaves
from mpjax.policy import Policy, get_policy
from mpjax.step import TrainState, TrainStep, make_train_step

# The number of updates over which an optimiser's stored state is compared with a float32 state.
_UPDATES = 8


@dataclasses.dataclass(frozen=True)
class Noise(Renamed):
  """The noise of the gradient: the distance of one batch's gradient from the mean over all data.

  The estimate is from the difference of the gradients of neighbouring batches, or of the halves of a single
  one or of equal ones. It is relative to the gradient's norm, whether the loss is a mean or a sum over rows.

  Attributes:
    total: noise of the whole gradient.
  """

  total: float


@dataclasses.dataclass(frozen=True)
class GradientError(Renamed):
  """The error of a policy, relative to float32.

  Attributes:
    gradient: |g - g32| / |g32| over all batches; infinite if the policy's gradient is not finite.
    modules: the same by module of the parameters, relative to the norm of the module's own gradient.
    update: if the policy keeps weights or the optimiser's state in fewer bits, the same relative error of the
      weights' change over 8 updates with float32's gradients; else 0.
  """

  gradient: float
  modules: dict[str, float]
  update: float = 0.0

  @property
  def total(self) -> float:
    """Returns the larger of `gradient` and `update`."""
    return max(self.gradient, self.update)


class Gradients:
  """Float32 gradients of a training step on some batches, as a reference for policies.

  Attributes:
    loss: mean of the float32 loss over batches.
    noise: noise of the gradients; `None` if it is not needed.
  """

  def __init__(
    self, step: TrainStep, state: TrainState, batches: Sequence[PyTree], *, needs_noise: bool = True
  ):
    """Computes the gradients in float32.

    Args:
      step: the step with the loss function and the optimiser; the devices of its mesh need not exist here.
      state: state of the step.
      batches: at least one batch.
      needs_noise: whether to estimate the noise.

    Raises:
      ValueError: if the gradients are not finite or are zero, or the batches are too small for an estimate.
    """
    self._step, self._state, self._batches = step.without_mesh(), state, batches
    self._wide, self._wide_state = reference_step(self._step), reference_state(state)
    found = [self._wide.gradients(self._wide_state, batch) for batch in batches]
    self._grads = [grads for _, grads in found]
    self.loss = float(np.mean([float(loss) for loss, _ in found]))
    self._squares = _added(map(_squares, self._grads))
    if not math.isfinite(self.loss) or not math.isfinite(_total(self._squares)):
      raise ValueError(
        f"in float32 the loss is {self.loss:g} and its gradient is not finite, so a policy has nothing to "
        "match: mpjax.find_nonfinite names the first operation with NaN or infinity"
      )
    if not _total(self._squares):
      raise ValueError("the gradient in float32 is zero on these batches: expected batches to learn from")
    self.noise = self._noise() if needs_noise else None

  def error(self, policy: Policy) -> GradientError:
    """Measures a policy; FP8 products are emulated if the device does not have units for them."""
    policy = policy.without_histories()
    recipe = policy.fp8 and dataclasses.replace(policy.fp8, emulate=True)
    step = self._step.with_policy(dataclasses.replace(policy, fp8=recipe))
    state = step.adopt(self._state, self._step, warn=False)
    differences = []
    for batch, reference in zip(self._batches, self._grads, strict=True):
      grads, state = _finite_gradients(step, state, batch)
      differences.append(_squares(_minus(grads, reference)))
    apart = _added(differences)
    return GradientError(
      gradient=_ratio(_total(apart), _total(self._squares)),
      modules={module: _ratio(square, self._squares[module]) for module, square in apart.items()},
      update=self._update_error(policy),
    )

  def _update_error(self, policy: Policy) -> float:
    """Returns the relative error of the weights' change under a policy's storage, against float32."""
    keys = ("param_dtype", "vector_dtype", "optimizer_dtype", "master_weights")
    stored = {key: getattr(policy, key) for key in keys}
    if stored["param_dtype"] == np.dtype("float32") and stored["optimizer_dtype"] is None:
      return 0.0
    wide, way = (self._way({"base": "fp32", **fields}) for fields in ({}, stored))
    return _ratio(_square([_minus(way, wide)]), _square([wide]))

  def _way(self, policy: dict[str, object]) -> PyTree:
    """Returns the change of the master weights over several updates with float32's gradients."""
    # The gradient of this loss is the batch.
    linear = lambda params, grads: sum(
      jnp.vdot(p.astype(jnp.float32), g) for p, g in zip(*map(jax.tree.leaves, (params, grads)), strict=True)
    )
    step = make_train_step(linear, self._step.inner_tx, get_policy(policy), donate=False)
    before = get_policy("fp32").cast_to_param(self._step.masters(self._state))
    first = step.init(before)
    state = first
    for i in range(_UPDATES):
      state, _ = step(state, self._grads[i % len(self._grads)])
    return _minus(*map(step.masters, (state, first)))

  def _noise(self) -> Noise:
    apart = together = 0.0
    if len(self._batches) >= 2:
      # For neighbours a and b of one batch each, |a - b|^2 is twice the noise of one, squared.
      pairs = list(zip(self._grads, self._grads[1:], strict=False))
      apart = _square(_minus(*pair) for pair in pairs) / 2
      together = _total(self._squares) * len(pairs) / len(self._grads)
    if not apart and rows(self._batches[0]) >= 2:  # one batch, or equal ones
      pair = self._halves(self._batches[0])
      apart = _square([_minus(*pair)])
      together = 2 * _square(pair) - apart  # of the halves' sum
    if not apart:
      raise ValueError(
        "one row, or equal ones, say nothing of the gradient's noise: give a batch of two rows or more, "
        "several batches, or a tolerance such as 0.01"
      )
    # At most 1e6, for opposite gradients.
    return Noise(_ratio(apart, max(together, 1e-12 * apart)))

  def _halves(self, batch: PyTree) -> tuple[PyTree, PyTree]:
    """Returns the gradients of two halves of a batch; an odd row is left out."""
    n = rows(batch)
    options = self._wide.options
    halved = dataclasses.replace(options, accumulate=math.gcd(options.accumulate, n // 2))
    step = TrainStep(self._wide.fun, self._wide.inner_tx, halved)
    has_rows = lambda x: np.ndim(x) > 0 and np.shape(x)[0] == n
    # A strided slice would not work on an explicit mesh.
    pairs = lambda x: x[: n - n % 2].reshape(n // 2, 2, *x.shape[1:])
    part = lambda i: jax.tree.map(lambda x: pairs(jnp.asarray(x))[:, i] if has_rows(x) else x, batch)
    first, second = (step.gradients(self._wide_state, part(i))[1] for i in (0, 1))
    return first, second


def _square(trees: Iterable[PyTree]) -> float:
  """Returns the sum of the squares of all entries."""
  return _total(_added(map(_squares, trees)))


def _finite_gradients(step: TrainStep, state: TrainState, batch: PyTree) -> tuple[PyTree, TrainState]:
  """Returns gradients at the largest loss scale that keeps them finite, and the state with it."""
  scaling = step.policy.loss_scaling
  while True:
    loss, grads = step.gradients(state, batch)
    scaler = find_scaler(state.opt_state)
    if math.isfinite(_square([grads])) or scaling is None or scaler is None:
      return grads, state
    smaller = float(scaler.scale) / 2
    if scaling.kind != "dynamic" or smaller < scaling.min_scale or not math.isfinite(float(loss)):
      return grads, state
    state = state.replace(opt_state=_with_scale(state.opt_state, smaller))


def _with_scale(opt_state: PyTree, scale: float) -> PyTree:
  is_scale = lambda node: isinstance(node, LossScaleState)
  change = lambda node: node._replace(scale=jnp.float32(scale)) if is_scale(node) else node
  return jax.tree.map(change, opt_state, is_leaf=is_scale)


@jax.jit
def _minus(a: PyTree, b: PyTree) -> PyTree:
  """Returns the difference of two trees in float32 or wider."""
  return jax.tree.map(lambda x, y: _wide(x) - _wide(y), a, b)


def _squares(tree: PyTree) -> dict[str, float]:
  """Returns the sum of squares by module; equal layers share a name such as `blocks/*/up`.

  A parameter at the root of the tree is its own module.
  """
  found: dict[str, float] = {}
  for (name, _), sums in zip(named_leaves(tree), jax.device_get(_leaf_squares(tree)), strict=True):
    largest, square = map(float, sums)
    path = name.removeprefix("params/")
    module = layer_pattern(path.rpartition("/")[0] or path)
    found[module] = found.get(module, 0.0) + largest**2 * square
  return found


def _added(parts: Iterable[Mapping[str, float]]) -> dict[str, float]:
  """Returns the sums of squares of several trees together."""
  found: dict[str, float] = {}
  for part in parts:
    for module, square in part.items():
      found[module] = found.get(module, 0.0) + square
  return found


def _total(of: Mapping[str, float]) -> float:
  """Returns the sum over modules; infinity if one is not finite."""
  return math.fsum(of.values()) if all(map(math.isfinite, of.values())) else math.inf


def _ratio(of: float, to: float) -> float:
  """Returns the ratio of two norms from their squares; 0 if both are 0."""
  if not math.isfinite(of) or (of and not to):
    return math.inf
  return math.sqrt(of / to) if to else 0.0


@jax.jit
def _leaf_squares(tree: PyTree) -> list[tuple[Array, Array]]:
  """Returns the largest magnitude of each leaf, and the sum of squares in that unit, to stay in range."""

  def of(x: Array) -> tuple[Array, Array]:
    size = jnp.abs(_wide(x))
    largest = jnp.max(size, initial=0.0)
    return largest, jnp.sum(jnp.square(size / jnp.where(largest == 0, 1, largest)))

  return [of(x) for x in jax.tree.leaves(tree)]


def _wide(x: Array) -> Array:
  return x.astype(at_least_float32(x.dtype))
