"""Published rates of steps, and the decoder that stands for the models that were measured."""

import dataclasses
import math

import jax
import pytest

import mpjax
from benchmarks.step_time import PUBLISHED, decoder_of, seconds_of

SMALL = {"dim": 512, "layers": 2, "heads": 4, "kv_heads": 4, "hidden": 512, "vocab": 512, "blocks": 128}
BY_NAME = {given["name"]: given for given in PUBLISHED["rows"]}


# What the sources say in TFLOP/s of a device beside the rates that are read.
@pytest.mark.parametrize(
  ("name", "tflops"), [("GPT-3 175B, v6e-256", 384.9), ("Llama 3.1 70B, 256 H200", 508.4)]
)
def test_published_rates_and_sizes_fit_the_published_flops(name, tflops):
  decoder = decoder_of(BY_NAME[name])
  flops = decoder.batch * decoder.length * decoder.token_flops()
  assert flops / seconds_of(BY_NAME[name], decoder) == pytest.approx(tflops * 1e12, rel=1e-3)


def test_every_step_fits_its_devices():
  for decoder in map(decoder_of, PUBLISHED["rows"]):
    assert math.prod(decoder.mesh.values()) == decoder.target.devices
    for leaf in jax.tree.leaves(decoder.training("bf16")[1:]):
      leaf.sharding.shard_shape(leaf.shape)


@pytest.mark.parametrize("name", ["MaxText 32B, v5p-128", "Llama 3.1 8B, 8 H100"])
def test_the_decoder_has_its_attention_as_a_kernel_and_its_products_in_half_precision(name):
  decoder = dataclasses.replace(decoder_of(BY_NAME[name]), batch=1, length=256, save=["context"], **SMALL)
  step, state, batch = decoder.training("bf16")
  plan = mpjax.plan(step, state, batch, target=decoder.target, compile=False)
  assert sum(kernel.count for kernel in plan.fused) == 2 * 2  # of each layer: forward, and once backward
  assert {kernel.operands[0] for kernel in plan.fused} == {"bfloat16"}
  assert plan.parameters == sum(leaf.size for leaf in jax.tree.leaves(state.params))
