"""Gradients of a training step on a mesh: each device runs the loss on its rows, and they are reduced."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Int32, Shaped

from mpjax._types import AnyJaxpr, Array, JaxprEqn, PyTree
from mpjax.dtypes import at_least_float32, cast_like
from mpjax.jaxpr import (
  Backward,
  CallKind,
  Calls,
  Trait,
  bodies_of,
  call_kind,
  custom_vjp_rules,
  dtype_of,
  has,
  open_jaxpr,
  shape_of,
  values_read,
)
from mpjax.patterns import named_leaves
from mpjax.sharding import axes_of_batch, dimension_over, is_spec, keep_axes
from mpjax.step import _collectives
from mpjax.step._collectives import Part
from mpjax.step._gather_where_read import gather_where_read
from mpjax.step._layout import Layout
from mpjax.step._loss import Pass, StepLoss
from mpjax.step._train_state import TrainState
from mpjax.step._trained import is_masked, only

_WHOLE = PartitionSpec()
# The scales of parameters that cross in FP8.
_Scales = Sequence[Array | None]
# (parameters, state, rows, keys, scales) to a tree of arrays.
_OfRows = Callable[[PyTree, TrainState, PyTree, Array | None, _Scales], PyTree]
# The dtypes in which a value is read, each with whether matrix products alone read it so.
Reads: TypeAlias = frozenset[tuple[np.dtype, bool]]


def value_and_grad_on_mesh(
  loss: StepLoss, layout: Layout, state: TrainState, batch: PyTree, trained: PyTree[bool]
) -> Pass:
  """Computes what `loss.value_and_grad` does, for a whole batch: each device runs it on its rows."""
  mesh, specs, policy = layout.mesh, layout.specs(state.arrays), loss.options.policy
  devices, params = _Devices(loss, layout, state, batch), loss.compute_params(state)
  parts, by_step = devices.parts(params), layout.gather == "step"
  scales = _collectives.scales_of(mesh, params, parts)
  of_rows = functools.partial(loss.value_and_grad, trained=trained)
  if by_step:
    gathered = _collectives.gather(mesh, params, parts, scales)
    out, mine = devices.run(lambda *args: of_rows(*args[:-1]), gathered, params)
  else:
    of_parts = lambda scales: lambda fun: gather_where_read(fun, parts, scales)
    each = lambda *args: of_rows(*args[:-1], of_parts=of_parts(args[-1]))
    # In float32, so that gradients of half-precision parameters are not rounded before the sum.
    leaves, structure = jax.tree.flatten(params)
    wide = [
      x if part is None else jax.ShapeDtypeStruct(x.shape, at_least_float32(x.dtype))
      for x, part in zip(leaves, parts, strict=True)
    ]
    over_fsdp = jax.tree.map(lambda spec: keep_axes(spec, ("fsdp",)), specs, is_leaf=is_spec)
    out, mine = devices.run(each, params, jax.tree.unflatten(structure, wide), scales, over_fsdp)
  reduced = only(trained, specs)
  grads = _collectives.reduce(mesh, out.grads, reduced, policy.reduce_dtype, by_step)
  fp8_state = jax.tree.map(lambda x: x.max(0), out.fp8_state)
  total = _collectives.over_shards
  unfolded = lambda new, folded, old: new if is_masked(new) else _unfold(total(new), total(folded), old)
  model_state = jax.tree.map(unfolded, out.model_state, mine, state.model_state, is_leaf=is_masked)
  return Pass(total(out.loss), total(out.metrics, jnp.sum), grads, model_state, fp8_state)


class Gather(NamedTuple):
  """A parameter that is divided over `fsdp`: its path and shape, the dtype it is kept in and gathered in."""

  path: str
  shape: tuple[int, ...]
  kept: str
  dtype: str


def gathers(loss: StepLoss, layout: Layout, state: TrainState, batch: PyTree) -> tuple[Gather, ...]:
  """Returns the parameters that are divided over `fsdp`."""
  parts: list[Part | None] = []

  def run(state: TrainState, batch: PyTree) -> None:
    parts[:] = _Devices(loss, layout, state, batch).parts(loss.compute_params(state))

  jax.eval_shape(run, state, batch)
  return tuple(
    Gather(name, tuple(leaf.shape), np.dtype(leaf.dtype).name, part.gather_dtype.name)
    for (name, leaf), part in zip(named_leaves(state.arrays), parts, strict=True)
    if part is not None
  )


@dataclasses.dataclass(frozen=True)
class _Devices:
  """The devices of a step, each with its rows of a batch."""

  loss: StepLoss
  layout: Layout
  state: TrainState
  batch: PyTree

  def run(
    self,
    fun: _OfRows,
    params: PyTree,
    like: PyTree,
    scales: _Scales = (),
    specs: PyTree[PartitionSpec] = _WHOLE,
  ) -> tuple[PyTree, PyTree]:
    """Runs a function on each device; returns its results and the model's state before, stacked by device.

    It takes `params` in the dtypes of `like`; `specs` is their division over `fsdp`.
    """
    mesh, state = self.layout.mesh, self.state
    rest = state.replace(arrays={}, opt_state=_scalars(state.opt_state), rng=None)

    def each(
      params: PyTree, scales: _Scales, rest: TrainState, key: Array | None, batch: PyTree
    ) -> tuple[PyTree, PyTree]:
      index = jax.lax.axis_index(axes_of_batch(mesh))
      params = cast_like(params, like)
      mine = jax.tree.map(lambda x: _fold(x, index), rest.model_state)
      keys = self.loss.keys(key, batch, index)
      return fun(params, rest.replace(model_state=mine), batch, keys, scales), mine

    replicated = (params, scales, rest, state.step_key)
    return _collectives.on_each(mesh, each, replicated, self.batch, specs)

  def parts(self, params: PyTree) -> list[Part | None]:
    """Returns the division of each parameter over `fsdp`; `None` for a whole one.

    A parameter crosses in the dtype in which the program reads it, and in the policy's gather dtype if only
    products read it.
    """
    policy = self.loss.options.policy
    leaves, structure = jax.tree.flatten(params)
    specs = jax.tree.leaves(self.layout.specs(self.state.arrays), is_leaf=is_spec)
    divided = [i for i, spec in enumerate(specs) if dimension_over(spec, "fsdp") is not None]
    own = [leaf.dtype for leaf in leaves]
    read, crossing, asked = list(own), list(own), policy.gather_dtype
    if divided and (asked is not None or any(own[i].itemsize > 2 for i in divided)):
      shapes = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves]
      forward = lambda *args: self.loss.forward(*args[:-1])
      of_flat = lambda *flat: self.run(forward, jax.tree.unflatten(structure, flat), params)
      closed = jax.make_jaxpr(of_flat)(*shapes)
      for i, (dtype, is_multiplied) in zip(divided, _read_in(closed, divided), strict=True):
        if dtype is not None and jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < own[i].itemsize:
          read[i] = dtype
        takes_asked = asked is not None and is_multiplied and jnp.issubdtype(own[i], jnp.floating)
        crossing[i] = asked if takes_asked else read[i]
    dtypes = own if self.layout.gather == "block" else read  # where it is read, the program casts it itself
    parts = map(Part, specs, dtypes, crossing, [policy.reduce_dtype] * len(specs))
    return [part if i in divided else None for i, part in enumerate(parts)]


def _scalars(tree: PyTree) -> PyTree:
  """Replaces arrays that are not scalars by zeros []: a loss scale reads only scalars of a state."""
  is_kept = lambda leaf: leaf.ndim == 0 or jnp.issubdtype(leaf.dtype, jax.dtypes.extended)
  return jax.tree.map(lambda leaf: leaf if is_kept(leaf) else jnp.zeros([], leaf.dtype), tree)


def _fold(x: Shaped[Array, "*shape"], index: Int32[Array, ""]) -> Shaped[Array, "*shape"]:
  """Folds the device's index into keys in the model's state; other arrays stay unchanged."""
  if not jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
    return x
  fold = lambda key: jax.random.fold_in(key, index)
  for _ in range(x.ndim):
    fold = jax.vmap(fold)
  return fold(x)


def _unfold(new: Array, folded: Array, old: Array) -> Array:
  """Returns the key for all devices instead of one that was folded for each and came back unchanged."""
  return jnp.where(new == folded, old, new) if jnp.issubdtype(new.dtype, jax.dtypes.prng_key) else new


def _read_in(closed: AnyJaxpr, inputs: Sequence[int]) -> list[tuple[np.dtype | None, bool]]:
  """Returns the one dtype in which a program reads each of some inputs; `None` if there are several.

  The second value says whether only matrix products read it, in any dtype.
  """
  found, answers = _reads(closed), []
  for i in inputs:
    dtypes = {dtype for dtype, _ in found[i]}
    answers.append(
      (dtypes.pop() if len(dtypes) == 1 else None, all(multiplied for _, multiplied in found[i]))
    )
  return answers


class _Reads(Backward[Reads]):
  """How a value, or a view of it, is read; `in_rule`: in a rule of a `custom_vjp`."""

  nothing: Reads = frozenset()

  def __init__(self, in_rule: bool):
    self._in_rule = in_rule

  def enters(self, equation: JaxprEqn) -> bool:
    kind = call_kind(equation)
    if kind is CallKind.CUSTOM_VJP and not self._in_rule:
      return False  # the backward rule reads what the forward one returns
    return kind is not None and kind.is_plain  # other rules do more than the body shows

  def transfer(self, equation: JaxprEqn, results: list[Reads], calls: Calls) -> list[Reads]:
    given, kind, of_results = values_read(equation), call_kind(equation), self.nothing.union(*results)
    kept = [frozenset([(dtype_of(a), kind is None and has(equation, Trait.PRODUCT))]) for a in given]
    if equation.primitive is jax.lax.convert_element_type_p:
      kept = [frozenset([(np.dtype(equation.params["new_dtype"]), all(x for _, x in of_results))])]
    elif has(equation, Trait.ALIAS) and len(equation.invars) == len(equation.outvars):
      kept = results
    elif has(equation, Trait.PASSES_ON) and len(equation.invars) == 1:
      is_whole = has(equation, Trait.SAME_WEIGHT)
      kept = [frozenset((dtype, x and is_whole) for dtype, x in of_results)]
    elif kind is CallKind.CUSTOM_VJP and not self._in_rule:
      body = self.solve(bodies_of(equation)[0], results).inputs
      kept = list(map(self.join, body, _in_forward_rule(equation)))
    return [*kept, *[self.nothing] * (len(equation.invars) - len(given))]


def _reads(closed: AnyJaxpr, in_rule: bool = False) -> list[Reads]:
  outputs = [frozenset([(dtype_of(atom), in_rule)]) for atom in open_jaxpr(closed).outvars]
  return _Reads(in_rule).solve(closed, outputs).inputs


def _in_forward_rule(equation: JaxprEqn) -> list[Reads]:
  """Returns the dtypes in which the forward rule of a `custom_vjp` reads its operands."""
  forward, _ = custom_vjp_rules(equation)

  def flat(*operands: Array) -> list[Array]:
    residuals, outs = forward(list(operands), [True] * len(operands))
    return [*residuals, *outs]

  shapes = [jax.ShapeDtypeStruct(shape_of(a), dtype_of(a)) for a in equation.invars]
  try:
    rule = jax.make_jaxpr(flat)(*shapes)
  except NameError:  # an axis that a collective in the rule names is missing
    return [frozenset([(dtype_of(a), True)]) for a in equation.invars]
  # What is multiplied, the body says. A rule that calls its own function again would not end.
  return [frozenset((dtype, True) for dtype, _ in reads) for reads in _reads(rule, in_rule=True)]
