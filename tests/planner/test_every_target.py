"""Every preset planned on every described device, and on slices and hosts of several."""

import functools

import jax
import jax.numpy as jnp
import optax
import pytest

import mpjax
from mpjax.formats import LOW_PRECISION, described_devices, narrow_bits
from mpjax.policies import presets

_SEVERAL = ("v5e:2x2", "v6e:2x4", "v5p:2x2x1", "tpu7x:2x2x1", "h100:8", "h100:2x8")
_UNITS = {
  "fp32": {"tensorfloat32", "float32", "bfloat16"},
  "tf32": {"tensorfloat32", "float32", "bfloat16 x3"},
  "fp16": {"float16"},
}
_FP8 = {  # the formats of the recipe that `auto` is
  "hopper": {"float8_e4m3fn", "float8_e5m2"},
  "tpu_v5": {"float8_e4m3b11fnuz"},
}


def loss(params, batch):
  x = jnp.tanh(jnp.tanh(batch["x"] @ params["in"]) @ params["mid"]) @ params["out"]
  return ((x - batch["y"]) ** 2).mean()


@functools.cache
def plan_of(preset, target):
  device = mpjax.planner.get_target(target)
  axes = {} if device.devices == 1 else {"mesh": jax.sharding.AbstractMesh((device.devices,), ("fsdp",))}
  step = mpjax.make_train_step(loss, optax.adam(1e-3), preset, **axes)
  params = {name: jnp.zeros((256, 256)) for name in ("in", "mid", "out")}
  state = jax.eval_shape(lambda: mpjax.make_train_step(loss, optax.adam(1e-3), preset).init(params))
  rows = jax.ShapeDtypeStruct((256 * device.devices, 256), jnp.float32)
  return mpjax.plan(step, state, {"x": rows, "y": rows}, target=device, compile=False)


@pytest.mark.parametrize("target", [*described_devices(), *_SEVERAL])
@pytest.mark.parametrize("preset", sorted({*presets()} - {"auto"}))
def test_every_preset_has_a_plan_on_every_target(preset, target):
  plan = plan_of(preset, target)
  dtypes = set(plan.matrix_flops())
  units = mpjax.planner.get_target(target).matrix_units
  assert 0 < plan.peak < plan.room
  assert plan.floor.seconds > 0
  assert 0.9 * plan.floor.seconds < plan.time.seconds == pytest.approx(sum(plan.time.parts.values()))
  assert dtypes
  if preset == "fp8" and units in LOW_PRECISION:
    assert any(map(narrow_bits, dtypes))
    assert dtypes >= _FP8.get(units, set())
  elif preset == "fp8":
    assert dtypes == {"bfloat16"}
  elif preset.startswith("bf16"):
    assert "bfloat16" in dtypes
  else:
    assert dtypes <= _UNITS[preset] | {"float32"}
