"""What a training step is on TPU and GPU, read from its StableHLO: no accelerator needed."""

import collections
import pathlib
import re

import jax
import jax.export
import pytest

import mpjax
from mpjax.train import load_config

# A step of another platform.
from mpjax.train.setup._experiment import Experiment, Place
from mpjax.train.setup._saved_run import facts_of

CONFIGS = pathlib.Path(__file__).parents[2] / "configs"
SMALLER = {
  "gpt_stdlib": ["model.layers=1", "model.dim=32", "data.seq_len=32"],
  "vit_digits": ["model.layers=1"],
  "resnet_digits": ["model.stages=[1,1]"],
}
PRODUCT = re.compile(r"stablehlo\.(dot_general|convolution)\b.*: \(tensor<([^>]+)>, tensor<([^>]+)>\)")


def experiment_of(name, policy, *options, backend=None):
  config = load_config(CONFIGS / f"{name}.yaml", [*SMALLER[name], *options])
  return Experiment(config, facts_of(config), mpjax.get_policy(policy), Place(None, backend))


def exported_step(name, policy, platform, accumulate=1):
  """StableHLO of the whole training step of a shipped config, for another platform."""
  experiment = experiment_of(name, policy, f"train.accumulate={accumulate}", backend=platform)
  return jax.export.export(experiment.step.jitted, platforms=[platform])(*experiment.shapes()).mlir_module()


def product_dtypes(text):
  """{(operation, lhs dtype, rhs dtype): count}."""
  found = PRODUCT.findall(text)
  return collections.Counter((name, *(x.rsplit("x", 1)[-1] for x in operands)) for name, *operands in found)


@pytest.mark.parametrize(
  ("name", "platform", "dtype", "accumulate"),
  [("gpt_stdlib", "cuda", "f16", 2), ("vit_digits", "tpu", "bf16", 1), ("resnet_digits", "cuda", "f16", 2)],
)
def test_auto_puts_every_product_of_the_step_into_half_precision(name, platform, dtype, accumulate):
  policy = mpjax.get_policy("auto", backend=platform)
  counts = product_dtypes(exported_step(name, policy, platform, accumulate))
  assert {(lhs, rhs) for _, lhs, rhs in counts} == {(dtype, dtype)}, counts
  # Forward and both gradients of each product: the reading has found the step and not a fragment of it.
  assert sum(counts.values()) > 12


@pytest.mark.parametrize("policy", ["fp32", "tf32"])
def test_full_precision_policies_keep_float32_products(policy):
  text = exported_step("gpt_stdlib", mpjax.get_policy(policy), "cuda")
  assert {(lhs, rhs) for _, lhs, rhs in product_dtypes(text)} == {("f32", "f32")}
  # JAX's name for one pass of the matrix units at reduced precision.
  assert ("precision = [HIGH, HIGH]" in text or "tf32" in text.lower()) == (policy == "tf32")
