"""The ablation of autocast, as far as it goes without a compiler for a device."""

import contextlib

import jax
import jax.numpy as jnp
import pytest

from benchmarks import ablation
from benchmarks._kinds_of_models import EXAMPLES


def program(name, mechanism=None):
  jax.clear_caches()
  with ablation.without(mechanism) if mechanism else contextlib.nullcontext():
    return str(ablation.gradient(name).trace(*EXAMPLES[name].shapes()).jaxpr)


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_model_cast_by_hand_has_the_parameters_and_the_loss_of_the_plain_one(name):
  params, statistics, batch = EXAMPLES[name].shapes()
  (loss, after), gradients = jax.eval_shape(ablation.gradient(name, by_hand=True), params, statistics, batch)
  assert (loss.shape, loss.dtype) == ((), jnp.float32)
  types = lambda tree: jax.tree.map(lambda x: (x.shape, x.dtype), tree)
  assert types(after) == types(statistics)
  assert types(gradients) == types(params)


def test_a_mechanism_is_off_while_its_variant_is_traced_and_no_longer():
  as_it_is = program("transformer")
  for name in ("pull-in", "products at ends", "barriers", "saved statistics"):
    assert program("transformer", name) != as_it_is, name
  assert program("transformer") == as_it_is
  assert program("autoencoder", "losses by element") != program("autoencoder")
  for name in ablation.MECHANISMS:  # each names a function that there is
    with ablation.without(name):
      pass
