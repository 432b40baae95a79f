"""`Layout`: the shardings of a training step's state and batches on a mesh."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping
from typing import TypeVar

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from mpjax._types import Mesh, PyTree
from mpjax.dtypes import as_shapes, one_of
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

  def shardings(self, state: TrainState, *, in_step: bool = False) -> TrainState:
    """Returns a `NamedSharding` for each array of a state (arrays or shapes), between steps or in one."""
    specs, mesh = self.specs(state.arrays), self._typed_mesh()
    whole: TrainState = jax.tree.map(lambda _: PartitionSpec(), state)
    laid = whole.replace(arrays=specs, opt_state=specs_like(state.opt_state, state.arrays, specs, self.mesh))
    placed: TrainState = jax.tree.map(lambda spec: NamedSharding(mesh, spec), laid, is_leaf=is_spec)
    if in_step or self.offload is None:
      return placed
    return placed.replace(opt_state=in_host_shardings(state.opt_state, placed.opt_state))

  def shapes(self, state: TrainState, batch: PyTree) -> tuple[TrainState, PyTree]:
    """Returns a state and a batch (arrays or shapes) as shapes with the shardings of a step, for a plan."""
    state, batch = as_shapes((state, batch))
    rows, put = self.batch_sharding, lambda x, at: x.update(sharding=at)
    of_batch = jax.tree.map(lambda x: rows if x.ndim else NamedSharding(rows.mesh, PartitionSpec()), batch)
    return jax.tree.map(put, state, self.shardings(state)), jax.tree.map(put, batch, of_batch)

  def place(self, state: TrainState) -> TrainState:
    """Moves a state to its shardings on the mesh, from any others."""
    if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(state)):
      return self.put_away(self.keep(on_device(state)))
    return jax.device_put(state, self.shardings(state))

  def keep(self, state: TrainState) -> TrainState:
    """Constrains a state on the devices to its shardings; inside `jit`."""
    is_explicit = has_explicit_axes(self._typed_mesh())
    constrain = jax.sharding.reshard if is_explicit else jax.lax.with_sharding_constraint
    kept: TrainState = constrain(state, self.shardings(state, in_step=True))
    return kept

  def put_away(self, state: TrainState) -> TrainState:
    """Moves what `offload` names from the devices to the host; inside `jit`."""
    return state if self.offload is None else state.replace(opt_state=to_host(state.opt_state))

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


def run_on(
  layout: Layout | None,
  fun: Callable[[TrainState, PyTree], _Out],
  state: TrainState,
  batch: PyTree,
  out: Callable[[TrainState], PyTree],
) -> _Out:
  """Calls `fun(state, batch)` on axes that the compiler divides, also if the surrounding mesh is explicit.

  `fun` gets all state on the devices. `out` makes the shardings of its results, or a prefix of their tree,
  from those of the state.
  """
  if layout is None:
    return fun(state, batch)
  if has_explicit_axes(layout._typed_mesh()):
    fun = jax.sharding.auto_axes(fun, out_sharding=out(layout.shardings(state, in_step=True)))
  return fun(on_device(state), batch)


def require_same_rows(batch: PyTree, divided: str) -> None:
  """Raises `ValueError` for a batch whose leaves have different numbers of rows; scalars have none.

  `divided` is what needs them: rows could broadcast after it, and the loss would be wrong without an error.
  """
  with_rows = [(name, leaf) for name, leaf in named_leaves(batch) if np.ndim(leaf)]
  for name, leaf in with_rows[1:]:
    first_name, first = with_rows[0]
    if leaf.shape[0] != first.shape[0]:
      raise ValueError(
        f"batch[{first_name!r}] has {first.shape[0]} rows and batch[{name!r}] {leaf.shape[0]}: {divided} "
        "divides a batch by its rows, so all its arrays need as many; close over arrays without rows"
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
    raise ValueError(f"gather={gather!r}: {one_of(gather, GATHERS)}")
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
