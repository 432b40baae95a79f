"""The training steps whose memory the memory suite asks after: planned, compiled, or run on a GPU."""

from __future__ import annotations

import inspect
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks._worker import serve
from mpjax.planner import CompileError, Plan, Target, get_target, plan, policy_on_target
from mpjax.policy import get_policy
from mpjax.registry._info import DataInfo
from mpjax.step import TrainState, TrainStep, make_train_step
from mpjax.train import load_config, make_optimizer, make_task
from mpjax.train.loop._step_records import peak_memory

CONFIGS = pathlib.Path(__file__).parents[2] / "configs"
FILES = {"gpt": "gpt_stdlib", "vit": "vit_digits", "resnet": "resnet_digits"}
STEPS = 3
POLICIES: dict[str, Any] = {
  "fp32": "fp32",
  # A TPU multiplies float32 in one pass of bfloat16 unless it is asked for more.
  "fp32 highest": {"base": "fp32", "matmul_precision": "highest"},
  "bf16": "bf16",
  "fp16": "fp16",
  "bf16_pure": "bf16_pure",
  "fp8": "fp8",
}
STATE_PARTS = ("master weights", "optimizer state", "model state", "FP8 state", "other state")


class Case:
  """A step of `mpjax.zoo.models` at some size, under a policy, for a device.

  Args:
    model: `gpt`, `vit` or `resnet`.
    sizes: of its config's `model` section.
    data: `seq_len` and `vocab_size` of a GPT; `image` (its side) and `classes` of the others.
    policy: a name in `POLICIES`.
    target: the device.
  """

  def __init__(self, model: str, sizes: dict[str, Any], data: dict[str, int], policy: str, target: Target):
    overrides = [f"model.{key}={value}" for key, value in sizes.items()]
    config = load_config(str(CONFIGS / f"{FILES[model]}.yaml"), overrides)
    images = "image" in data
    self._data = data
    facts = {"image_shape": (data["image"],) * 2 + (3,), "num_classes": data["classes"]} if images else data
    info = DataInfo(train_examples=1, eval_examples=1, fingerprint="", description="", facts=facts)
    asked = get_policy(POLICIES[policy], backend=target.kind)
    resolved, _ = policy_on_target(asked, target)
    self._target = target
    self._task = make_task(config, info, resolved, backend=target.kind)
    self.step: TrainStep = make_train_step(
      self._task.loss_fn, make_optimizer(config.optimizer, config.train.steps), resolved
    )

  def init(self) -> TrainState:
    """A first state."""
    key, step_key = jax.random.split(jax.random.key(0))
    random = "row_rngs" in inspect.signature(self._task.loss_fn).parameters
    return self.step.init(**self._task.init_arguments(key), rng=step_key if random else None)

  def shapes(self, rows: int) -> dict[str, Any]:
    """Shapes of a batch."""
    if "image" in self._data:
      side = self._data["image"]
      return {
        "images": jax.ShapeDtypeStruct((rows, side, side, 3), jnp.float32),
        "labels": jax.ShapeDtypeStruct((rows,), jnp.int32),
      }
    return {"tokens": jax.ShapeDtypeStruct((rows, self._data["seq_len"] + 1), jnp.int32)}

  def plan(self, rows: int, compile: bool) -> Plan:
    """What the step takes on the target."""
    state = jax.eval_shape(self.init)
    return plan(self.step, state, self.shapes(rows), target=self._target, compile=compile)

  def measure(self, rows: int) -> dict[str, Any]:
    """What some steps take on this process's first device; the most it has had in use before them, too."""
    state = jax.block_until_ready(jax.jit(self.init)())
    batch = jax.device_put(jax.tree.map(_made_up, self.shapes(rows)))
    compiled = self.step.jitted.lower(state, batch).compile()
    before = peak_memory()
    for _ in range(STEPS):
      state, metrics = jax.block_until_ready(compiled(state, batch))
    return {"peak": peak_memory(), "before": before, "loss": float(metrics["loss"])}


def _made_up(leaf: Any) -> np.ndarray:
  random = np.random.default_rng(0)
  if np.issubdtype(leaf.dtype, np.integer):  # classes are ten or more
    return random.integers(0, 10, leaf.shape, dtype=leaf.dtype)
  return random.normal(size=leaf.shape).astype(leaf.dtype)


def case(task: dict[str, Any], target: Target) -> Case:
  """That of a row of the report."""
  return Case(task["model"], task["sizes"], task["data"], task["policy"], target)


def figures(case: Case, rows: int) -> dict[str, Any]:
  """Peaks of a batch of some rows with their parts; bytes."""
  try:
    plan = case.plan(rows, compile=True)
  except CompileError as error:
    return _parts(case.plan(rows, compile=False)) | {"error": str(error)}
  return _parts(plan)


def _parts(plan: Plan) -> dict[str, Any]:
  # With the compiler's state: a TPU's tiles are larger than what they hold.
  memory = plan.compiled.memory if plan.compiled else plan.memory
  found: dict[str, Any] = {
    "parameters": plan.parameters,
    "state": sum(memory.parts.get(part, 0) for part in STATE_PARTS),
    "analytic": {"peak": plan.memory.peak, "saved": plan.memory.saved_bytes, "parts": plan.memory.parts},
  }
  if plan.compiled:
    found["compiled"] = {"peak": plan.compiled.peak, "saved": memory.saved_bytes, "parts": memory.parts}
    found["compile_seconds"] = plan.compiled.seconds
  return found


def start(task: dict[str, Any]) -> tuple[dict[str, Any], Any]:
  """A worker's answer, which is all that it has to say."""
  made = case(task, get_target("here"))
  measured = made.measure(task["rows"])
  return figures(made, task["rows"]) | {"measured": measured}, dict


if __name__ == "__main__":
  serve(start)
