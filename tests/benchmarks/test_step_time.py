"""Published rates of steps, and the decoder that stands for the models that were measured."""

import math

import jax
import pytest

from benchmarks.step_time import PUBLISHED, decoder_of, seconds_of

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
