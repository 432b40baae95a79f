"""`model.loss_rows`: the built-in GPT's loss in chunks of rows, for a large vocabulary or as asked for."""

import math
import types

import jax
import numpy as np
import pytest
from flax import nnx

import mpjax
from mpjax.train.models._language_model import gpt
from tests.casting._jaxprs import equations

TOKENS = np.random.default_rng(0).integers(0, 60, (4, 17)).astype(np.int32)
SIZES = {"dim": 16, "layers": 1, "heads": 2, "attention": "xla"}


def task(vocab_size, **options):
  info = types.SimpleNamespace(vocab_size=vocab_size, seq_len=16, recompute="none", bytes_per_token=None)
  return gpt(info, **SIZES, **options)


def loss_and_gradients(made, policy="fp32"):
  graphdef, params = nnx.split(made.init(jax.random.key(0)))
  loss = lambda params: made.loss_fn(nnx.merge(graphdef, params), {"tokens": TOKENS}, None)
  return jax.value_and_grad(mpjax.autocast(loss, policy)), params


@pytest.mark.parametrize("tie_head", [True, False])
def test_the_loss_is_that_of_whole_logits(tie_head):
  run, params = loss_and_gradients(task(60, tie_head=tie_head))
  usual = jax.jit(run)(params)
  for policy, most in (("fp32", 1e-5), ("bf16", 3e-2)):
    got = jax.jit(loss_and_gradients(task(60, tie_head=tie_head, loss_rows=16), policy)[0])(params)
    for a, b in zip(*map(jax.tree.leaves, (got, usual)), strict=True):
      assert np.linalg.norm(a - b) < most * np.linalg.norm(b)


@pytest.mark.parametrize(
  ("vocab_size", "options", "in_chunks"),
  [
    (1 << 14, {}, False),
    ((1 << 14) + 1, {}, True),
    ((1 << 14) + 1, {"loss_rows": 0}, False),
    (500, {"loss_rows": 16}, True),
  ],
)
def test_rows_are_divided_as_asked_for_or_by_the_vocabulary(vocab_size, options, in_chunks):
  run, params = loss_and_gradients(task(vocab_size, **options))
  made = equations(run, params)
  assert any(e.primitive.name == "scan" for e in made) == in_chunks
  logits = (v.aval.shape for e in made if e.primitive.name == "exp" for v in e.outvars)
  rows = options.get("loss_rows") or TOKENS[:, 1:].size
  assert max(map(math.prod, logits)) == vocab_size * rows


def test_an_evaluation_has_the_same_loss():
  whole, chunked = task(60), task(60, loss_rows=16)
  model = whole.init(jax.random.key(0))
  want = whole.evaluate(model, {"tokens": TOKENS})["loss"]
  np.testing.assert_allclose(chunked.evaluate(model, {"tokens": TOKENS})["loss"], want, rtol=1e-6)
