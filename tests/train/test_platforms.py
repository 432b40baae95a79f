"""What a training step is on TPU and GPU, read from its StableHLO: no accelerator needed."""

import pathlib
import re

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import mpjax
from mpjax.train import load_config, make_setup, make_task, parse_config
from mpjax.train._setup import init_state

ROOT = pathlib.Path(__file__).parents[2]
SMALLER = {
  "gpt_stdlib": ["model.layers=2", "model.dim=32", "data.seq_len=32"],
  "vit_digits": ["model.layers=2"],
  "resnet_digits": [],
}
PRODUCT = re.compile(r"stablehlo\.(dot_general|convolution)\b.*: \(tensor<([^>]+)>, tensor<([^>]+)>\)")


def exported_step(name, policy, platform, accumulate=1):
  """StableHLO of the whole training step of a shipped config, for another platform."""
  config = load_config(ROOT / "configs" / f"{name}.yaml", [*SMALLER[name], "mesh.data=1", "policy=fp32"])
  setup = make_setup(config)
  task = make_task(config, setup.info, policy)
  step = mpjax.make_train_step(task.loss_fn, optax.adamw(1e-3), policy, accumulate=accumulate)
  state = jax.eval_shape(lambda: init_state(config, task, step, None))
  batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), next(setup.data.eval()))
  return jax.export.export(step.jitted, platforms=[platform])(state, batch).mlir_module()


def product_dtypes(text):
  """{(operation, lhs dtype, rhs dtype): count}."""
  counts = {}
  for operation, *operands in PRODUCT.findall(text):
    key = (operation, *(operand.rsplit("x", 1)[-1] for operand in operands))
    counts[key] = counts.get(key, 0) + 1
  return counts


@pytest.mark.parametrize("name", SMALLER)
@pytest.mark.parametrize(("platform", "dtype", "accumulate"), [("tpu", "bf16", 1), ("cuda", "f16", 2)])
def test_auto_puts_every_product_of_the_step_into_half_precision(name, platform, dtype, accumulate):
  policy = mpjax.get_policy("auto", backend=platform)
  counts = product_dtypes(exported_step(name, policy, platform, accumulate))
  assert {(lhs, rhs) for _, lhs, rhs in counts} == {(dtype, dtype)}, counts
  # Forward and both gradients of each product: the reading has found the step and not a fragment of it.
  assert sum(counts.values()) > 15


@pytest.mark.parametrize("policy", ["fp32", "tf32"])
def test_full_precision_policies_keep_float32_products(policy):
  text = exported_step("gpt_stdlib", mpjax.get_policy(policy), "cuda")
  assert {(lhs, rhs) for _, lhs, rhs in product_dtypes(text)} == {("f32", "f32")}
  # JAX's name for one pass of the matrix units at reduced precision.
  assert ("precision = [HIGH, HIGH]" in text or "tf32" in text.lower()) == (policy == "tf32")


def test_every_product_is_counted():
  def f(x, w):
    return jax.lax.conv(x, w, (1, 1), "SAME").sum() + (x[0, 0] @ x[0, 0].T).sum()

  shapes = jax.ShapeDtypeStruct((1, 2, 8, 8), jnp.float16), jax.ShapeDtypeStruct((2, 2, 3, 3), jnp.float16)
  text = jax.export.export(jax.jit(f), platforms=["cuda"])(*shapes).mlir_module()
  assert product_dtypes(text) == {("convolution", "f16", "f16"): 1, ("dot_general", "f16", "f16"): 1}


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALLER)
def test_saved_arrays_of_the_state_keep_their_dtypes(name):
  config = parse_config(
    load_config(ROOT / "configs" / f"{name}.yaml", [*SMALLER[name], "mesh.data=1"]).model_dump()
    | {"policy": "fp16"}
  )
  setup = make_setup(config)
  state = setup.first_state()
  before = jax.tree.map(lambda x: x.dtype, (state.params, state.model_state, state.opt_state))
  assert {leaf.dtype for leaf in jax.tree.leaves((state.params, state.model_state))} == {np.dtype("float32")}
  state, _ = jax.eval_shape(setup.step.jitted, state, next(setup.data.train()))
  assert jax.tree.map(lambda x: x.dtype, (state.params, state.model_state, state.opt_state)) == before
