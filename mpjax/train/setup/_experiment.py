"""A config's training step, for any policy, at any place: what runs, tools and exports have in common."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AbstractMesh, AxisType
from jaxtyping import Float32

from mpjax._average import Average
from mpjax._mistakes import ConfigError, config_errors
from mpjax._types import Array, ArrayLike, Mesh, PyTree
from mpjax.casting import Explanation, autocast
from mpjax.dtypes import platform
from mpjax.loss_scale import find_scaler, find_states
from mpjax.optim import average_weights, evaluation_weights, keeps_other_weights
from mpjax.policy import Policy, matmul_precision
from mpjax.registry import MODELS, DataInfo, MissingFact, ModelInfo, Task
from mpjax.sharding import (
  AXES,
  Rows,
  ShardingRules,
  axis_sizes,
  batch_shards,
  make_mesh,
  on_device,
  place_rows,
  rows_of_process,
)
from mpjax.step import (
  Layout,
  TrainState,
  TrainStep,
  make_train_step,
  merged,
  row_count,
  row_keys,
  state_of,
  unrounded,
)
from mpjax.train.config._config import DEFAULT_RECOMPUTE, Config
from mpjax.train.config._plugins import place
from mpjax.train.data import Data, load_data
from mpjax.train.setup._optimizers import make_optimizer, make_schedule

if TYPE_CHECKING:
  from mpjax.planner import Target


@dataclasses.dataclass(frozen=True)
class Place:
  """Where a step runs.

  Attributes:
    mesh: the devices; `None` for one device, without the policy's dtypes of transfers.
    backend: the platform; `None` for this machine's.
    offload: what lies in the host's memory between steps, as `mesh.offload` says.
  """

  mesh: Mesh | None
  backend: str | None = None
  offload: Literal["optimizer"] | None = None

  @staticmethod
  def of_run(config: Config) -> Place:
    """Returns the devices of a run, in all its processes.

    Raises:
      ConfigError: if the mesh does not fit the devices.
    """
    with config_errors("mesh."):
      return Place(make_mesh(config.mesh.sizes, jax.devices()), offload=config.mesh.offload)

  @staticmethod
  def of_tools(config: Config) -> Place:
    """Returns the devices of a run, or one if its mesh does not fit here, with all state on devices."""
    with contextlib.suppress(ConfigError):
      place = Place.of_run(config.changed({"mesh.offload": None}))
      _require_rows(config, place.mesh)
      return place
    return Place.one()

  @staticmethod
  def of_target(config: Config, target: Target) -> tuple[Place, dict[str, int]]:
    """Returns the devices of a plan, and their number along each axis.

    Raises:
      ConfigError: if the mesh does not fit the target.
    """
    with config_errors(f"target={target.name}: mesh."):
      sizes = axis_sizes(config.mesh.sizes, target.devices)
    offload, mesh = config.mesh.offload, None
    if math.prod(sizes.values()) > 1 or offload is not None:
      types = (AxisType.Auto,) * len(AXES)
      described = AbstractMesh(tuple(sizes.values()), AXES, axis_types=types)
      mesh = make_mesh(sizes, jax.devices()) if target.is_here else described
    return Place(mesh, target.kind, offload), sizes

  @staticmethod
  def one() -> Place:
    """Returns the first device of this machine."""
    return Place(make_mesh(dict.fromkeys(AXES, 1), jax.devices()))


def _require_rows(config: Config, mesh: Mesh | None) -> None:
  """Raises `ConfigError` unless micro-batches divide a batch, and a mesh's devices a micro-batch."""
  rows, parts = config.data.batch_size, config.train.accumulate
  shards = 1 if mesh is None else batch_shards(mesh)
  if rows % (parts * shards):
    times = f"train.accumulate={parts} times {shards} devices (mesh.data x mesh.fsdp)"
    raise ConfigError(f"data.batch_size={rows}: expected a multiple of {parts * shards}, which is {times}")


@dataclasses.dataclass(frozen=True)
class Experiment:
  """What a config computes, under a policy, which may differ from its own, at a place.

  Allocates nothing on a device. `info` are facts about its data.
  """

  config: Config
  info: DataInfo
  policy: Policy
  at: Place

  @functools.cached_property
  def task(self) -> Task:
    """The model with its loss.

    Raises:
      ConfigError: if the model does not take such data, or its sizes do not fit together.
    """
    config = self.config
    make = MODELS.find(config.model.kind).fun
    facts = {field.name: getattr(self.info, field.name) for field in dataclasses.fields(DataInfo)}
    backend, recompute = platform(self.at.backend), config.train.recompute
    told = ModelInfo(**facts, policy=self.policy, backend=backend, recompute=recompute)
    with self.model_errors():
      task = make(told, **config.model.options)
      if not isinstance(task, Task):
        raise ValueError(f"{make.__name__} returned a {type(task).__name__}: expected a mpjax.train.Task")
      jax.eval_shape(lambda: (task.init(jax.random.key(0)), None)[1])  # a module cannot be a result
    return task

  @functools.cached_property
  def step(self) -> TrainStep:
    """The training step.

    Raises:
      ConfigError: if parts of the config do not fit together.
    """
    config, train, mesh = self.config, self.config.train, self.at.mesh
    _require_rows(config, mesh)
    optimizer = make_optimizer(config.optimizer, train.steps)
    if train.average is not None:
      optimizer = average_weights(optimizer, train.average)
    is_divided = mesh is not None and mesh.shape["fsdp"] > 1
    return make_train_step(
      self.task.loss_fn,
      optimizer,
      self.policy if mesh is not None else self.policy.without_devices(),
      accumulate=train.accumulate,
      skip_nonfinite=train.skip_nonfinite,
      # For `blocks`, the model does it.
      recompute=DEFAULT_RECOMPUTE if train.recompute == "blocks" else train.recompute,
      mesh=mesh,
      sharding=None if mesh is None else ShardingRules(config.mesh.rules, self.task.sharding),
      gather=config.mesh.gather if is_divided else "step",
      offload=self.at.offload,
      grad_norm=True,
    )

  @functools.cached_property
  def learning_rate(self) -> Callable[[TrainState], Array]:
    """Jitted: the state before a step -> the learning rate of its update, also of one that is skipped."""
    schedule = make_schedule(self.config.optimizer, self.config.train.steps)

    def rate(state: TrainState) -> Array:
      counts = find_states(state.opt_state, optax.ScaleByScheduleState).values()
      scaler = find_scaler(state.opt_state)
      taken = state.step - (0 if scaler is None else scaler.skipped_steps)
      return jnp.asarray(schedule(next((each.count for each in counts), taken)), jnp.float32)

    return jax.jit(rate)

  @property
  def layout(self) -> Layout:
    """Returns the layout of the state and the batches on the mesh."""
    assert self.step.layout is not None
    return self.step.layout

  @functools.cached_property
  def rows(self) -> Rows:
    """The rows of each global batch that this process feeds."""
    return rows_of_process(self.layout.batch_sharding, self.config.data.batch_size)

  def place(self, batch: PyTree) -> PyTree:
    """Makes global arrays from this process's rows of a batch, which are on the host."""
    return place_rows(batch, self.layout.batch_sharding, self.config.data.batch_size)

  def first_state(self) -> TrainState:
    """Makes the state before the first step, on its devices."""
    if self.layout.mesh.size == 1:  # compiling one program would take longer than it saves
      return self._init()
    return jax.jit(self._init, out_shardings=self.layout.shardings(self.state_shapes))()

  def shapes(self) -> tuple[TrainState, PyTree]:
    """Returns shapes and dtypes of a state and of a batch, with shardings on a mesh."""
    shapes = self.state_shapes, self.batch_shapes
    return shapes if self.step.layout is None else self.step.layout.shapes(*shapes)

  @property
  def batch_shapes(self) -> PyTree[jax.ShapeDtypeStruct]:
    """Returns shapes and dtypes of a global batch."""
    return self.info.batch_shapes(self.config.data.batch_size)

  @functools.cached_property
  def state_shapes(self) -> TrainState:
    """Shapes and dtypes of the first state, traced once."""
    self.step.jitted  # noqa: B018 (what is wrong with it is no error of the trace)
    return jax.eval_shape(self._init)

  def _init(self) -> TrainState:
    key, step_key = jax.random.split(jax.random.key(self.config.seed))
    return self.step.init(
      **self.task.init_arguments(key),
      rng=step_key if {"rng", "row_rngs"} & set(self.step.loss.keywords) else None,
      batch=self.batch_shapes if self.step.needs_batch else None,
    )

  @contextlib.contextmanager
  def model_errors(self) -> Iterator[None]:
    """Turns a ValueError of the model or its step into a `ConfigError`; a TypeError needs its traceback."""
    try:
      yield
    except ConfigError:
      raise
    except MissingFact as error:
      model, data, rows = self.config.model.kind, self.config.data.kind, ", ".join(self.info.row) or "nothing"
      does_not = f"model.kind={model} does not take the data of data.kind={data}, rows of {rows}"
      raise ConfigError(f"{does_not}: {error}") from error
    except (ValueError, MemoryError, OverflowError) as error:  # the last two: sizes do not fit into memory
      text = " ".join(str(error).split()) or type(error).__name__
      raise ConfigError(f"model: {text}{place(error)}") from error

  def check(self) -> None:
    """Raises `ConfigError` if the model has no first state, or rules or overrides do not fit it."""
    with self.model_errors():
      shapes = self.state_shapes
    with config_errors("mesh.rules or the model's sharding: "):
      self.layout.shardings(shapes)
    if self.policy.overrides or self.policy.fp8:
      self.explain()

  def check_step(self) -> None:
    """Traces a step and an evaluation. The run does not trace them again.

    Raises:
      ConfigError: if the loss function or the evaluation is wrong.
    """
    state, batch = self.shapes()
    with self.model_errors():
      jax.eval_shape(self.step.jitted, state, batch)
      jax.eval_shape(self.evaluate, jax.eval_shape(self.for_evaluation, state), batch)

  @functools.cached_property
  def for_evaluation(self) -> Callable[[TrainState], TrainState]:
    """Jitted: a state -> what `evaluate` reads of it, with the average of the weights if there is one."""
    return jax.jit(lambda state: state.replace(arrays=weights_of(self.step, state), opt_state={}, rng=None))

  @functools.cached_property
  def evaluate(self) -> Callable[[TrainState, PyTree], dict[str, Array | Average]]:
    """Jitted: (state of `for_evaluation`, batch) -> `eval_loss` and the task's other metrics, in float32.

    An `Average` stays one, so that `mean_of_batches` is exact. Delayed FP8 scaling takes its histories from
    the state; without them, each tensor is scaled by its own amax. Raises `ValueError` if there is no loss.
    """
    fun, policy = self.task.evaluate or self.task.loss_fn, self.policy.with_output_dtype(jnp.float32)

    def run(state: TrainState, batch: PyTree) -> dict[str, Array | Average]:
      with self.layout.in_mesh():
        out = apply(fun, policy, state, batch)
      if not isinstance(out, dict):
        loss, *rest = out if isinstance(out, tuple) else (out,)
        out = {"loss": loss, **(rest[0] if rest else {})}
      named = {f"eval_{name.removeprefix('eval_')}": _in_float32(value) for name, value in out.items()}
      if "eval_loss" not in named:
        found = ", ".join(named) or "nothing"
        raise ValueError(f"evaluate returned {found}: expected a loss among the metrics")
      return named

    return jax.jit(run)

  def explain(self) -> Explanation:
    """Explains what runs in which dtype under the policy, and why. Computes nothing.

    Raises:
      ConfigError: if an override of the policy matches no module.
    """
    with config_errors():
      return self.step.explain(self.state_shapes, self.batch_shapes)


@dataclasses.dataclass(frozen=True)
class Setup(Experiment):
  """An experiment with its data: the parts of a training run."""

  data: Data


def make_setup(config: Config, at: Place | None = None) -> Setup:
  """Builds the parts of a run, and makes every check that needs the data or the devices.

  ```python
  setup = mpjax.train.make_setup(mpjax.train.load_config("vit_digits", ["policy=bf16"]))
  state = setup.first_state()
  batch = setup.place(next(setup.data.train(setup.rows)))
  print(setup.explain())
  ```

  Args:
    config: the config, as `load_config` returns it.
    at: where to run, if not where the config says.

  Returns:
    A `Setup` with the attributes `config`, `policy`, `data`, `info`, `task` and `step`, and the methods
    `first_state()`, `place(batch)` and `explain()`.

  Raises:
    ConfigError: if parts of the config do not fit together.
    DataError: if data is missing or cannot be used.
  """
  at = at or Place.of_run(config)
  data = load_data(config.data, seed=config.seed)
  setup = Setup(config, data.info, config.resolve_policy(), at, data)
  setup.check()
  return setup


def weights_of(
  step: TrainStep, state: TrainState, which: str = "average", *, masters: bool = False
) -> PyTree:
  """Returns the weights of a run's state, on the devices.

  `which`: `"last"`, those that the run trains; `"average"`, those of `mpjax.optim.evaluation_weights`, which
  are the last if the optimiser keeps no others. With `masters` in float32, not in the policy's `param_dtype`.
  """
  is_other = which == "average" and keeps_other_weights(state.opt_state)
  if not (is_other or masters):
    return state.arrays
  state = on_device(state)
  weights, layers = unrounded(step.trained.parameters(state), step.layers(state))
  if is_other:
    weights = evaluation_weights(weights, state_of(layers))
  return merged(weights if masters else step.policy.cast_to_param(weights), state.arrays)


def _in_float32(value: ArrayLike | Average) -> Float32[Array, ""] | Average:
  if isinstance(value, Average):
    return Average(jnp.asarray(value.total, jnp.float32), jnp.asarray(value.count))
  return jnp.asarray(value, jnp.float32)


def mean_of_batches(values: Sequence[Array | Average]) -> float:
  """Returns the mean of a metric, of which `evaluate` computed a value for each batch; waits for the values.

  The mean of averages is the sum of totals over the sum of counts; batches with count 0 are left out, and the
  result is NaN if all counts are 0. Plain means are averaged with equal weights.
  """
  on_host = jax.device_get(list(values))
  pairs = [(each.total, each.count) if isinstance(each, Average) else (each, 1) for each in on_host]
  totals, counts = np.array([pair for pair in pairs if pair[1]], np.float64).reshape(-1, 2).T
  with np.errstate(invalid="ignore"):  # infinities of both signs
    return float(totals.sum() / counts.sum()) if len(counts) else math.nan


def apply(fun: Callable[..., PyTree], policy: Policy, state: TrainState, batch: PyTree) -> PyTree:
  """Applies a function to a state's model and a batch (or other inputs) under a policy.

  It takes the parameters or the `nnx.Module`, the batch, and those of the keywords `model_state`, `rng` and
  `row_rngs` (of a fixed key) that it names. Floating results have the policy's `output_dtype`.
  """
  names = inspect.signature(fun).parameters
  keywords: dict[str, PyTree] = {"model_state": state.model_state} if "model_state" in names else {}
  if "rng" in names:
    keywords["rng"] = jax.random.key(0)
  if "row_rngs" in names:
    keywords["row_rngs"] = row_keys(jax.random.key(0), row_count(batch))
  if policy.autocast:
    # Passed as a module, so that its parts have their paths.
    model = state.params if state.graphdef is None else state.model
    policy = policy if state.fp8_state else policy.without_histories()
    return autocast(fun, policy, fp8_state=state.fp8_state or None)(model, batch, **keywords)
  with matmul_precision(policy):
    cast = state.replace(params=policy.cast_to_compute(state.params))
    model = cast.params if cast.graphdef is None else cast.model
    return policy.cast_to_output(fun(model, policy.cast_to_compute(batch), **keywords))
