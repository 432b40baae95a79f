"""The ablation of autocast, as far as it goes without a compiler for a device."""

import contextlib

import jax
import jax.numpy as jnp
import pytest

from benchmarks.autocast import _ablation as ablation
from benchmarks.autocast._kinds_of_models import EXAMPLES, F32


def arguments(example):
  variables = dict(example.variables())
  return variables.pop("params"), variables, example.batch()


def program(name, variant):
  patched = ablation.MECHANISMS.get(variant, contextlib.nullcontext)
  jax.clear_caches()
  with patched():
    gradient = ablation.gradient(EXAMPLES[name], variant)
    return str(jax.make_jaxpr(gradient)(*arguments(EXAMPLES[name])))


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_model_cast_by_hand_has_the_parameters_and_the_loss_of_the_plain_one(name):
  example = EXAMPLES[name]
  params, statistics, batch = arguments(example)
  (loss, after), gradients = jax.eval_shape(ablation.gradient(example, "hand"), params, statistics, batch)
  assert (loss.shape, loss.dtype) == ((), F32)
  after = after[0] if example.returns_result else after
  types = lambda tree: jax.tree.map(lambda x: (x.shape, x.dtype), tree)
  assert types(after) == types(statistics)
  assert {leaf.dtype for leaf in jax.tree.leaves(gradients)} == {jnp.dtype(F32)}


def test_a_mechanism_is_off_while_its_variant_is_traced_and_no_longer():
  as_it_is = program("transformer", "autocast")
  for name in ("pull-in", "products at islands' ends", "barriers", "saved statistics"):
    assert program("transformer", name) != as_it_is, name
  assert program("transformer", "autocast") == as_it_is
  assert program("autoencoder", "losses by element") != program("autoencoder", "autocast")
  for off in ablation.MECHANISMS.values():
    with off():  # each names a function that there is
      pass


def test_a_table_says_what_casts_by_hand_and_a_mechanism_give():
  figures = lambda temporaries, accessed: {"temp_bytes": temporaries, "bytes_accessed": accessed}
  rows = {
    "float32": figures(400e6, 8e9),
    "hand": figures(200e6, 4e9),
    "autocast": figures(100e6, 5e9),
    "grad_dtype=bfloat16": figures(100e6, 4e9),
    "without barriers": figures(150e6, 5e9),
    "without heads": figures(100e6, 5e9),
  }
  report = {"command": "x", "device": "a TPU", "versions": {"jax": "1"}, "models": {"BERT": rows}}
  text = ablation.table(report)
  sizes = "400.0 MB, 8.00 GB | 200.0 MB, 4.00 GB | 100.0 MB, 5.00 GB | 100.0 MB, 4.00 GB"
  assert f"| BERT | {sizes} | 0.500, 1.250 | 0.500, 1.000 |" in text
  assert "| without barriers | +50.0, +0.0 |" in text
  assert "| without heads | 0 |" in text
