"""`Layout`: the shardings of a training step's state and batches on a mesh."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping
from typing import TypeVar

import jax
from jax.sharding import NamedSharding, PartitionSpec

from mpjax._types import Mesh, PyTree
from mpjax.dtypes import as_shapes, did_you_mean
from mpjax.patterns import named_leaves
from mpjax.sharding import (
  Dims,
  ShardingRule,
  ShardingRules,
  batch_shards,
  batch_spec,
  check_mesh,
  has_explicit_axes,
  in_host_shardings,
  is_spec,
  lacks_host_memory,
  on_device,
  specs_like,
  to_host,
  with_axis_types,
)
from mpjax.step._micro_batches import require_same_rows
from mpjax.step._train_state import TrainState

GATHERS = ("step", "block")  # once per step, or where they are read
_OFFLOADS = (None, "optimizer")

_Out = TypeVar("_Out")


@dataclasses.dataclass(frozen=True)
class Layout:
  """The shardings of a training step's state and batches on a mesh.

  Attributes:
    mesh: with axes among `data`, `fsdp` and `tensor`; concrete or abstract.
    rules: the sharding rules of parameters.
    gather: when to gather divided parameters, one of `GATHERS`.
    offload: what is in the host's memory between steps: `"optimizer"`, the optimiser's state, or `None`.
  """

  mesh: Mesh
  rules: ShardingRules
  gather: str = "step"
  offload: str | None = None

  @property
  def shards(self) -> int:
    """The number of parts that the devices divide a batch into."""
    return batch_shards(self.mesh)

  @property
  def batch_sharding(self) -> NamedSharding:
    """Returns the sharding of a batch: its rows over the devices."""
    return NamedSharding(self._typed_mesh(), batch_spec(self.mesh))

  def specs(self, params: PyTree) -> PyTree[PartitionSpec]:
    """Returns a `PartitionSpec` for each parameter (arrays or shapes)."""
    return self.rules.specs(params, self.mesh)

  def shardings(self, state: TrainState) -> TrainState:
    """Returns a `NamedSharding` for each array of a state (arrays or shapes), as it lies between steps."""
    placed = self.device_shardings(state)
    if self.offload is None:
      return placed
    return placed.replace(opt_state=in_host_shardings(state.opt_state, placed.opt_state))

  def device_shardings(self, state: TrainState) -> TrainState:
    """Returns a `NamedSharding` for each array of a state (arrays or shapes), as a step computes with it."""
    specs = self.specs(state.arrays)
    whole: TrainState = jax.tree.map(lambda _: PartitionSpec(), state)
    of_optimizer = specs_like(state.opt_state, state.arrays, specs, self.mesh)
    laid = whole.replace(arrays=specs, opt_state=of_optimizer)
    mesh = self._typed_mesh()
    placed: TrainState = jax.tree.map(lambda spec: NamedSharding(mesh, spec), laid, is_leaf=is_spec)
    return placed

  def shapes(self, state: TrainState, batch: PyTree) -> tuple[TrainState, PyTree]:
    """Returns a state and a batch (arrays or shapes) as shapes with the shardings of a step, for a plan."""
    put = lambda x, at: x.update(sharding=at)
    state, batch = as_shapes((state, batch))
    rows = self.batch_sharding
    whole = NamedSharding(rows.mesh, PartitionSpec())
    return (
      jax.tree.map(put, state, self.shardings(state)),
      jax.tree.map(lambda x: put(x, rows if x.ndim else whole), batch),
    )

  def place(self, state: TrainState) -> TrainState:
    """Moves a state to its shardings on the mesh, from any others."""
    if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(state)):
      return self.put_away(self.keep(on_device(state)))
    return jax.device_put(state, self.shardings(state))

  def keep(self, state: TrainState) -> TrainState:
    """Constrains a state on the devices to its shardings; inside `jit`."""
    is_explicit = has_explicit_axes(self._typed_mesh())
    constrain = jax.sharding.reshard if is_explicit else jax.lax.with_sharding_constraint
    kept: TrainState = constrain(state, self.device_shardings(state))
    return kept

  def put_away(self, state: TrainState) -> TrainState:
    """Moves what `offload` names from the devices to the host; inside `jit`."""
    return state if self.offload is None else state.replace(opt_state=to_host(state.opt_state))

  def run(
    self,
    fun: Callable[[TrainState, PyTree], _Out],
    state: TrainState,
    batch: PyTree,
    out: Callable[[TrainState], PyTree],
  ) -> _Out:
    """Calls `fun(state, batch)` on axes that the compiler divides, also if the surrounding mesh is explicit.

    Args:
      fun: the computation of a step, with all its state on the devices.
      state: a state.
      batch: a batch.
      out: makes the shardings of the results, or a prefix of their tree, from those of the state.
    """
    if has_explicit_axes(self._typed_mesh()):
      fun = jax.sharding.auto_axes(fun, out_sharding=out(self.device_shardings(state)))
    return fun(on_device(state), batch)

  def in_mesh(self) -> contextlib.AbstractContextManager[object]:
    """Enters the mesh, for kernels that divide themselves over it: no compiler divides one."""
    if self.mesh.size == 1:
      return contextlib.nullcontext()
    return jax.sharding.use_abstract_mesh(self.mesh.abstract_mesh)

  def _typed_mesh(self) -> Mesh:
    """Returns the mesh, with the explicit axes that `jax.set_mesh` gave it."""
    around = jax.sharding.get_abstract_mesh()
    if around.shape != self.mesh.shape or not has_explicit_axes(around):
      return self.mesh
    return with_axis_types(self.mesh, around.axis_types)

  def check_batch(self, batch: PyTree, accumulate: int) -> None:
    """Raises `ValueError` for a batch whose rows differ in number or cannot be divided over the devices."""
    require_same_rows(batch, "mesh=")
    for name, leaf in named_leaves(batch):
      if leaf.ndim and leaf.shape[0] % (self.shards * accumulate):
        micro = f" in accumulate={accumulate} micro-batches" if accumulate > 1 else ""
        raise ValueError(
          f"batch[{name!r}] is {leaf.dtype}{list(leaf.shape)}: expected a first dimension that can "
          f"be divided over {self.shards} devices{micro}"
        )


def make_layout(
  mesh: Mesh | None,
  sharding: Mapping[str, Dims | None] | ShardingRule | ShardingRules | None,
  gather: str = "step",
  offload: str | None = None,
) -> Layout | None:
  """Makes a layout from these arguments of `make_train_step`; `None` without a mesh.

  Raises:
    ValueError: for a mesh or rules that do not match, or devices that cannot do what `offload` says.
  """
  if gather not in GATHERS:
    raise ValueError(
      f"gather={gather!r}: expected one of {', '.join(GATHERS)}{did_you_mean(str(gather), GATHERS)}"
    )
  if offload not in _OFFLOADS:
    raise ValueError(f"offload={offload!r}: expected 'optimizer', or None")
  if mesh is None:
    needs = [
      (offload is not None, f"offload={offload!r} places state by a mesh"),
      (sharding is not None, "sharding divides parameters over a mesh"),
      (gather != "step", f"gather={gather!r} says when to gather parameters on a mesh"),
    ]
    for text in (text for is_given, text in needs if is_given):
      one = "; one device is enough, as in jax.make_mesh((1,), ('data',))" if offload else ""
      raise ValueError(f"{text}: pass mesh=, too{one}")
    return None
  mesh = check_mesh(mesh)
  if gather == "block" and "fsdp" not in mesh.shape:
    raise ValueError(
      f"gather='block' needs parameters that are divided over an axis fsdp: the mesh has {dict(mesh.shape)}"
    )
  if offload is not None and (why := lacks_host_memory(mesh)):
    raise ValueError(f"offload={offload!r} keeps state in the host's memory: {why}")
  rules = sharding
  if not isinstance(rules, ShardingRules):
    rules = ShardingRules(model=rules) if callable(rules) else ShardingRules(rules)
  return Layout(mesh, rules, gather, offload)
