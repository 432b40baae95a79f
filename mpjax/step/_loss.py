"""The loss of a training step under its policy, and its gradients over micro-batches."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Float32

from mpjax._average import Average, constant, divided, is_average, nonzero
from mpjax._calls import misfit
from mpjax._lazy import nnx
from mpjax._types import Array, ArrayLike, LossFunction, Metrics, PyTree
from mpjax.casting import autocast
from mpjax.casting._nnx_modules import give_scopes
from mpjax.dtypes import at_least_float32, cast_like, widen_floating
from mpjax.loss_scale import find_scaler, map_parts, scale_loss
from mpjax.policy import Policy
from mpjax.sharding import axes_of_batch
from mpjax.step._checks import unpack
from mpjax.step._collectives import over_shards
from mpjax.step._micro_batches import first_of_batch, split_batch
from mpjax.step._options import StepOptions
from mpjax.step._static_leaves import whole_of
from mpjax.step._train_state import TrainState
from mpjax.step._trained import is_masked, merged, only

KEYWORDS = ("rng", "row_rngs", "model_state")


class Pass(NamedTuple):
  """The outputs of a loss function over rows of a batch, forward or forward and backward.

  Attributes:
    loss: f32[], unscaled; rounded to the policy's output dtype. If the loss function returns an `Average`,
      the `Average` over these rows.
    metrics: arrays by name, in the policy's output dtype, and averages. Over micro-batches and devices
      floating ones are averaged, and integers summed.
    grads: tree like the parameters, for the scaled loss; a leaf that is overwritten is its next value. `None`
      of a pass forward.
    model_state: the new state, in the dtypes of the old; `optax.MaskedNode` for a leaf that did not change.
    fp8_state: the new amax histories; `{}` for none.
    weight: the weight of a micro-batch among all: an average's count, over all devices; `None`: the same as
      the others'.
  """

  loss: Float32[Array, ""] | Average
  metrics: Metrics
  grads: PyTree
  model_state: PyTree
  fp8_state: PyTree
  weight: Float32[Array, ""] | None = None


class Transform(Protocol):
  """Turns a loss function into the one that a step runs, with the same signature."""

  def __call__(
    self, fun: LossFunction, policy: Policy | None, *, recompute: str, fp8_state: PyTree | None
  ) -> LossFunction:
    """Transforms `fun`; `policy` is autocast's, `None` if the step casts the arguments itself."""


def _under_autocast(
  fun: LossFunction, policy: Policy | None, *, recompute: str, fp8_state: PyTree | None
) -> LossFunction:
  return fun if policy is None else autocast(fun, policy, recompute=recompute, fp8_state=fp8_state)


@dataclasses.dataclass(frozen=True, eq=False)
class StepLoss:
  """A loss function as a training step runs it.

  Attributes:
    fun: the loss function.
    options: the options of the step, with its policy.
    transform: applies the policy to the loss function: autocast, or a replacement that inspects values
      (`dataclasses.replace(loss, transform=...)`).
  """

  fun: LossFunction
  options: StepOptions
  transform: Transform = _under_autocast

  def __post_init__(self) -> None:
    if {"rng", "row_rngs"} <= set(self.keywords):
      raise ValueError("loss_fn takes both 'rng' and 'row_rngs': expected one of them")
    if why := misfit(self.fun, (None, None), dict.fromkeys(self.keywords)):
      raise TypeError(
        f"loss_fn cannot be called as loss_fn(params, batch): {why}. A batch is one tree: pass step(state, "
        "(x, y)) and unpack it in loss_fn. Name a key 'rng' (a fresh one each step) and the model's state "
        "'model_state'; bind everything else with functools.partial"
      )

  @functools.cached_property
  def keywords(self) -> tuple[str, ...]:
    """Returns which of `rng`, `row_rngs` and `model_state` the loss function takes."""
    names = inspect.signature(self.fun).parameters
    bound = self.fun.keywords if isinstance(self.fun, functools.partial) else {}
    return tuple(name for name in KEYWORDS if name in names and name not in bound)

  @property
  def by_row(self) -> bool:
    """Whether it takes a key for each row, not one for all."""
    return "row_rngs" in self.keywords

  @property
  def random(self) -> str:
    """The name of the argument for keys that it takes, or could take."""
    return "row_rngs" if self.by_row else "rng"

  @property
  def autocast_policy(self) -> Policy:
    """The policy that it runs under: its loss and metrics are cast to the output dtype afterwards."""
    return self.options.policy.with_output_dtype(jnp.float32)

  def keys(self, state: TrainState, batch: PyTree) -> Array | None:
    """Returns the loss function's `rng` or `row_rngs` in the next step; `None` for neither."""
    return self.keys_of(state.step_key, batch)

  def keys_of(self, key: Array | None, batch: PyTree, part: Array | None = None) -> Array | None:
    """Returns what `keys` does, from the key of a step, for one part of a batch that is divided."""
    if key is None:
      return None
    if self.by_row:
      return row_keys(key, row_count(batch), 0 if part is None else part)
    return key if part is None else jax.random.fold_in(key, part)

  def arguments(self, state: TrainState, batch: PyTree) -> tuple[tuple[PyTree, PyTree], dict[str, PyTree]]:
    """Returns the loss function's positional and keyword arguments; PRNG keys as shapes."""
    keys = jax.eval_shape(self.keys, state, batch)
    model = state.params if state.graphdef is None else state.model
    return (model, batch), self._keywords(keys, state)

  def _keywords(self, keys: PyTree, state: TrainState) -> dict[str, PyTree]:
    values = {"rng": keys, "row_rngs": keys, "model_state": state.model_state}
    return {name: values[name] for name in self.keywords}

  def compute_params(self, state: TrainState) -> PyTree:
    """Returns the parameters for the loss function: unchanged, or in the compute dtype."""
    policy = self.options.policy
    if policy.autocast:
      return state.arrays
    # FP8 scales and amax histories are state, in their own dtype.
    return map_parts(policy.cast_to_compute, lambda leaf: leaf, state.arrays)

  def scaled(
    self, params: PyTree, fp8_state: PyTree, batch: PyTree, keys: Array | None, state: TrainState
  ) -> tuple[Float32[Array, ""], Pass]:
    """Computes the loss times the loss scale, for one micro-batch.

    A device's part of an average is divided by the device's share of the count over all devices, so
    that the mean over devices is the average.

    Args:
      params: as `compute_params` gives them.
      fp8_state: amax histories; the derivative with respect to them gives the next ones.
      batch: rows of one micro-batch.
      keys: for `rng` or `row_rngs`.
      state: for the loss scale and the model's state and structure.
    """
    options, policy, model_state = self.options, self.options.policy, state.model_state
    if not policy.autocast and options.cast_batch:
      batch = policy.cast_to_compute(batch)
    loss_fn = self.transform(
      self.fun,
      self.autocast_policy if policy.autocast or policy.in_passes else None,
      recompute=options.recompute,
      fp8_state=fp8_state or None,
    )
    in_module = state.graphdef is not None
    model = nnx.merge(state.graphdef, params, model_state) if in_module else whole_of(params)
    if in_module and not policy.autocast:  # autocast names modules itself
      give_scopes((model,))
    with divided(options.accumulate * options.shards):
      out = loss_fn(model, batch, **self._keywords(keys, state))
    if in_module:
      names = {path for path, _ in nnx.traversals.flatten_mapping(params).items()}
      mutated = nnx.split(model, lambda path, _: path in names, ...)[2]
      pure = nnx.as_pure if isinstance(model_state, nnx.State) else nnx.to_pure_dict
      model_state = pure(mutated)
    loss, metrics, returned = unpack(out, "model_state" in self.keywords, options.grad_norm)
    if returned is not None:
      model_state = returned
    weight: Array | None = None
    if is_average(loss):
      weight = constant(loss.count)
      if options.layout is not None and options.shards > 1:
        weight = jax.lax.psum(weight, axes_of_batch(options.layout.mesh))
      share = Average(loss.total, weight / options.shards).value
    else:
      share = loss
    scaled = share.astype(jnp.float32)
    if find_scaler(state.opt_state) is not None:
      scaled = scale_loss(share, state.opt_state)
    # Reported values are in the output dtype. The differentiated loss does not pass through it, since the
    # scale itself may not fit there (2**16 in float16).
    cast = lambda x: x if is_average(x) else policy.cast_to_output(x)
    loss, metrics = jax.tree.map(cast, (loss, metrics), is_leaf=is_average)
    if not is_average(loss):
      loss = loss.astype(jnp.float32)
    # In a trace an unchanged leaf is the same object.
    changed = lambda new, old: optax.MaskedNode() if new is old else cast_like(new, old)
    model_state = jax.tree.map(changed, model_state, state.model_state)
    return scaled, Pass(loss, metrics, None, model_state, None, weight)

  def forward(
    self, params: PyTree, state: TrainState, batch: PyTree, keys: Array | None
  ) -> Float32[Array, ""]:
    """Computes the scaled loss of the first micro-batch."""
    if self.options.accumulate > 1:
      batch = first_of_batch(self.options.accumulate, batch)
      keys = self._split_keys(keys)[0] if keys is not None else None
    return self.scaled(params, state.fp8_state, batch, keys, state)[0]

  def value_and_grad(
    self,
    params: PyTree,
    state: TrainState,
    batch: PyTree,
    keys: Array | None,
    trained: PyTree[bool],
    like: PyTree | None = None,
    of_parts: Callable[[LossFunction], LossFunction] | None = None,
  ) -> Pass:
    """Computes loss and gradients of the given rows, micro-batch by micro-batch.

    Args:
      params: as `compute_params` gives them.
      state: the state.
      batch: rows, a whole number of micro-batches.
      keys: as `keys` gives them for these rows.
      trained: for each of `params` whether it has a gradient; the others have an `optax.MaskedNode` instead.
      like: a tree whose dtypes the gradients of a step without accumulation have; with accumulation they
        are in float32 or wider.
      of_parts: turns the loss into a function of a device's parts of parameters; `params` and the gradients
        are then parts. `None`: all are whole.
    """
    options, n = self.options, self.options.accumulate
    scaled = self.scaled
    if of_parts is not None:
      scaled = of_parts(scaled)

    def micro_step(params: PyTree, model_state: PyTree, batch: PyTree, keys: Array | None) -> Pass:
      fun = lambda chosen, *args: scaled(merged(chosen, params), *args)
      grad_fn = jax.value_and_grad(fun, argnums=(0, 1), has_aux=True)
      at_hand = state.replace(model_state=model_state)
      (_, out), (grads, fp8_state) = grad_fn(only(trained, params), state.fp8_state, batch, keys, at_hand)
      made: Pass = out._replace(grads=grads, fp8_state=fp8_state)
      return made

    if n == 1:
      out = micro_step(params, state.model_state, batch, keys)
      grads = out.grads if like is None else cast_like(out.grads, only(trained, like))
      return out._replace(weight=None, grads=grads)

    rows = (split_batch(n, batch), None if keys is None else self._split_keys(keys))
    goes_on = options.model_state == "last"

    def body(
      carry: tuple[PyTree, PyTree, PyTree], xs: tuple[PyTree, Array | None]
    ) -> tuple[tuple[PyTree, PyTree, PyTree], Pass]:
      grads, model_state, fp8_state = carry
      given = params
      if of_parts is not None:  # otherwise a compiler would gather loop invariants before the loop
        given, xs = jax.lax.optimization_barrier((params, xs))
      out = micro_step(given, model_state, *xs)
      if of_parts is not None:  # otherwise it would add up whole gradients, and cut them after the loop
        out = out._replace(grads=jax.lax.optimization_barrier(out.grads))
      weight = out.weight
      weighed = lambda g, dtype: g.astype(dtype) if weight is None else g.astype(dtype) * weight.astype(dtype)
      grads = map_parts(lambda total, g: total + weighed(g, total.dtype), jnp.maximum, grads, out.grads)
      fp8_state = jax.tree.map(jnp.maximum, fp8_state, out.fp8_state)
      # Where the state goes on, a micro-batch keeps only which leaves change.
      changed = jax.tree.map(lambda x: None if goes_on else x, out.model_state)
      kept = out._replace(model_state=changed, grads=None, fp8_state=None)
      if goes_on:
        model_state = merged(out.model_state, model_state)
      return (grads, model_state, fp8_state), kept

    zeros = jax.tree.map(lambda p: jnp.zeros_like(p, at_least_float32(p.dtype)), only(trained, params))
    first = (zeros, state.model_state, jax.tree.map(jnp.zeros_like, state.fp8_state))
    (grads, model_state, fp8_state), kept = jax.lax.scan(body, first, rows)
    counted = n if kept.weight is None else nonzero(kept.weight.sum())
    grads = map_parts(lambda g: g / counted, lambda g: g, grads)
    loss, metrics = over_shards(widen_floating((kept.loss, kept.metrics)), jnp.sum)
    if goes_on:
      keep = lambda mark, new: mark if is_masked(mark) else new
      is_mark = lambda x: x is None or is_masked(x)
      model_state = jax.tree.map(keep, kept.model_state, model_state, is_leaf=is_mark)
    else:
      model_state = over_shards(kept.model_state)
    return Pass(loss, metrics, grads, model_state, fp8_state)

  def _split_keys(self, keys: Array) -> Array:
    """Returns keys for each micro-batch."""
    n = self.options.accumulate
    return split_batch(n, keys) if self.by_row else jax.random.split(keys, n)


def row_count(batch: PyTree) -> int:
  """Returns the number of rows of a batch; its scalars have none."""
  rows: int = next(leaf.shape[0] for leaf in jax.tree.leaves(batch) if leaf.ndim)
  return rows


def row_keys(key: Array, rows: int, part: ArrayLike = 0) -> Array:
  """Returns a key for each row of one part of a batch; rows are numbered through all parts."""
  return jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, jnp.asarray(part) * rows + jnp.arange(rows))
