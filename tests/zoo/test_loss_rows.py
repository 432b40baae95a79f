"""`model.loss_rows`: the built-in GPT's loss in chunks of rows, for a large vocabulary or as asked for."""

import math
import types

import jax
import numpy as np
import pytest
from flax import nnx

import mpjax

# The task of `model.kind: gpt` for rows that are made here.
from mpjax.zoo._tasks import gpt
from tests.casting._jaxprs import equations

TOKENS = np.random.default_rng(0).integers(0, 60, (4, 17)).astype(np.int32)
SIZES = {"dim": 16, "layers": 1, "heads": 2, "attention": "xla"}


def loss_and_gradients(vocab_size, policy="fp32", **options):
  """Returns a function of parameters, to a loss and its gradients, beside the loss of an evaluation."""
  facts = {"vocab_size": vocab_size, "seq_len": 16, "bytes_per_token": None}
  info = types.SimpleNamespace(**facts, recompute="none", row={"tokens": ("int32", (17,))})
  made = gpt(info, **SIZES, **options)
  graphdef, params = nnx.split(made.init(jax.random.key(0)))
  loss = lambda params: made.loss_fn(nnx.merge(graphdef, params), {"tokens": TOKENS}, None)
  run = jax.value_and_grad(mpjax.autocast(loss, policy))
  return run, params, lambda params: made.evaluate(nnx.merge(graphdef, params), {"tokens": TOKENS})


@pytest.mark.parametrize(("policy", "tie_head", "most"), [("fp32", True, 1e-5), ("bf16", False, 3e-2)])
def test_the_loss_is_that_of_whole_logits(policy, tie_head, most):
  run, params, _ = loss_and_gradients(60, tie_head=tie_head)
  usual = jax.jit(run)(params)
  run, _, evaluate = loss_and_gradients(60, policy, tie_head=tie_head, loss_rows=16)
  got, evaluated = jax.jit(lambda params: (run(params), evaluate(params)))(params)
  for a, b in zip(*map(jax.tree.leaves, (got, usual)), strict=True):
    assert np.linalg.norm(np.asarray(a) - b) < most * np.linalg.norm(b)
  assert evaluated.keys() == {"loss"}  # how many bytes a token has is not known
  np.testing.assert_allclose(evaluated["loss"], usual[0], rtol=1e-6)


def test_rows_are_divided_as_asked_for_or_by_the_vocabulary():
  large = (1 << 14) + 1
  for vocab_size, options, in_chunks in [
    (1 << 14, {}, False),
    (large, {}, True),
    (large, {"loss_rows": 0}, False),
    (500, {"loss_rows": 16}, True),
  ]:
    run, params, _ = loss_and_gradients(vocab_size, **options)
    made = equations(run, params)
    assert any(e.primitive.name == "scan" for e in made) == in_chunks, (vocab_size, options)
    logits = (v.aval.shape for e in made if e.primitive.name == "exp" for v in e.outvars)
    rows = options.get("loss_rows") or TOKENS[:, 1:].size
    assert max(map(math.prod, logits)) == vocab_size * rows, (vocab_size, options)
