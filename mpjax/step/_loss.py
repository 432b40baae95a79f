"""The loss of a training step under its policy, and its gradients over micro-batches."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Float32, Shaped

from mpjax._average import Average, constant, divided, is_average, nonzero
from mpjax._calls import misfit
from mpjax._lazy import nnx
from mpjax._types import Array, ArrayLike, LossFunction, Metrics, PyTree
from mpjax.casting import autocast, give_scopes, require_recompute
from mpjax.dtypes import at_least_float32, cast_like, one_of, widen_floating
from mpjax.loss_scale import find_scaler, map_parts
from mpjax.policy import Policy
from mpjax.sharding import axes_of_batch
from mpjax.step._checks import require_honoured, unpack
from mpjax.step._collectives import over_shards
from mpjax.step._layout import Layout, require_same_rows
from mpjax.step._train_state import TrainState, whole_of
from mpjax.step._trained import Chosen, is_masked, merged, only

_Carry: TypeAlias = tuple[PyTree, PyTree, PyTree]  # gradients, model state, amax histories
KEYWORDS = ("rng", "row_rngs", "model_state")
MODEL_STATES = ("last", "step")


@dataclasses.dataclass(frozen=True)
class StepOptions:
  """The options of a training step: arguments of `make_train_step`, which explains each.

  Its `mesh`, `sharding`, `gather` and `offload` are a `layout` here, `None` without a mesh.
  """

  policy: Policy
  wrt: Chosen | nnx.filterlib.Filter | None = None
  accumulate: int = 1
  skip_nonfinite: bool = False
  cast_batch: bool = True
  donate: bool = True
  recompute: str = "islands"
  layout: Layout | None = None
  grad_norm: bool = False
  model_state: str = "last"

  def __post_init__(self) -> None:
    n = self.accumulate
    if isinstance(n, bool) or not isinstance(n, int) or n < 1:
      raise ValueError(f"accumulate={n!r}: expected a positive integer")
    require_honoured(self.policy, over_devices=self.layout is not None)
    require_recompute(self.recompute)
    if self.model_state not in MODEL_STATES:
      raise ValueError(f"model_state={self.model_state!r}: {one_of(self.model_state, MODEL_STATES)}")

  @property
  def shards(self) -> int:
    """The number of devices that share a batch."""
    return 1 if self.layout is None else self.layout.shards

  @property
  def filter(self) -> nnx.filterlib.Filter:
    """The filter for the parameters of an `nnx.Module`: `nnx.Param`, and what else `wrt` trains."""
    return nnx.Param if self.wrt is None else nnx.Any(nnx.Param, self.wrt)

  def __repr__(self) -> str:
    fields = [f for f in dataclasses.fields(self) if f.name not in ("policy", "wrt", "layout")]
    changed = {f.name: getattr(self, f.name) for f in fields if getattr(self, f.name) != f.default}
    mesh = {} if self.layout is None else {"mesh": dict(self.layout.mesh.shape)}
    shown = {"policy": self.policy.label, **changed, **mesh}
    return f"StepOptions({', '.join(f'{name}={value!r}' for name, value in shown.items())})"


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


# (fun, autocast's policy or `None`, recompute=, fp8_state=) -> the function that a step runs.
Transform: TypeAlias = Callable[..., LossFunction]


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

  def keys(self, key: Array | None, batch: PyTree, part: Array | None = None) -> Array | None:
    """Returns the loss function's `rng` or `row_rngs`, or `None`, by a step's key, for a part of a batch."""
    if key is None:
      return None
    if self.by_row:
      return row_keys(key, row_count(batch), 0 if part is None else part)
    return key if part is None else jax.random.fold_in(key, part)

  def arguments(self, state: TrainState, batch: PyTree) -> tuple[tuple[PyTree, PyTree], dict[str, PyTree]]:
    """Returns the loss function's positional and keyword arguments; PRNG keys as shapes."""
    keys = jax.eval_shape(lambda state, batch: self.keys(state.step_key, batch), state, batch)
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

    The derivative with respect to `fp8_state` gives the next amax histories. `state` is for the loss scale
    and the model's state and structure.
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
    model = whole_of(params) if state.graphdef is None else nnx.merge(state.graphdef, params, model_state)
    if state.graphdef is not None and not policy.autocast:  # autocast names modules itself
      give_scopes((model,))
    with divided(options.accumulate * options.shards):
      out = loss_fn(model, batch, **self._keywords(keys, state))
    if state.graphdef is not None:
      names = set(nnx.traversals.flatten_mapping(params))
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
    scaler, scaled = find_scaler(state.opt_state), share.astype(jnp.float32)
    scaled = scaled if scaler is None else scaled * scaler.scale
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
      like: a tree with the gradients' dtypes; with accumulation they are in float32 or wider.
      of_parts: turns the loss into one of a device's parts of parameters, which have the gradients, too.
    """
    options, n = self.options, self.options.accumulate
    scaled = self.scaled if of_parts is None else of_parts(self.scaled)

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

    def body(carry: _Carry, xs: tuple[PyTree, Array | None]) -> tuple[_Carry, Pass]:
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


def split_batch(n: int, batch: PyTree) -> PyTree:
  """Splits leaves [batch, ...] into [n, batch / n, ...]; strided, so that rows stay on their device.

  A scalar is the same in each. Raises `ValueError` if `n` does not divide the rows, or they differ in number.
  """
  if n > 1:
    require_same_rows(batch, f"accumulate={n}")

  def split(x: Shaped[Array, " ..."]) -> Shaped[Array, "n ..."]:
    if not x.ndim:
      return jnp.broadcast_to(x, (n,))
    if x.shape[0] % n:
      raise ValueError(f"a batch of {x.shape[0]} rows cannot be split into accumulate={n} micro-batches")
    return x.reshape(x.shape[0] // n, n, *x.shape[1:]).swapaxes(0, 1)

  return jax.tree.map(lambda x: split(x if hasattr(x, "ndim") else jnp.asarray(x)), batch)


def first_of_batch(n: int, batch: PyTree) -> PyTree:
  """Returns the first of the `n` micro-batches of a batch."""
  return jax.tree.map(lambda x: x[0], split_batch(n, batch))
