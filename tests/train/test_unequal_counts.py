"""Losses over tokens that count: evaluations of unequal batches, padded rows, and runs on them."""

import itertools
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import mpjax

# The task of `model.kind: gpt` for rows that are made here.
from mpjax.zoo._tasks import gpt, resnet
from tests.train._tiny_gpt import records
from tests.zoo._datasets import load

datasets = pytest.importorskip("datasets")

SIZES = {"dim": 16, "layers": 1, "heads": 2, "attention": "xla"}
LENGTHS = (9, 3, 17, 2, 1, 5, 20, 0, 4, 7, 12, 3)
# Lists of unequal length, with tokens that say where they are from.
LISTS = [[100 * i % 89 + j for j in range(length)] for i, length in enumerate(LENGTHS)]


def masked_task(info):
  """A mean over the values of a batch that count, of which some batches have few and one has none."""

  def loss_fn(params, batch):
    error = (batch["x"] - params["w"]) ** 2
    return mpjax.Average((error * batch["counts"]).sum(), batch["counts"].sum())

  def evaluate(params, batch):
    loss = loss_fn(params, batch)
    share = mpjax.Average((batch["x"] > 0).sum(where=batch["counts"]), batch["counts"].sum())
    return loss, {"positive": share, "rows": batch["x"].sum() * 0 + len(batch["x"])}

  # The steps are those of a plain mean: this is about evaluation.
  plain = lambda params, batch: ((batch["x"] - params["w"]) ** 2).mean()
  return mpjax.train.Task(lambda key: {"w": jnp.zeros(3)}, plain, evaluate)


class MaskedRows:
  """Rows of which the first 8 count wholly, the next 8 hardly, and 8 do not count."""

  def __init__(self, seed):
    self.x = np.random.default_rng(seed).normal(size=(32, 3)).astype(np.float32)
    self.counts = np.arange(32)[:, None] < np.array([8, 13, 8])
    self.counts[24:, 1:] = True

  def __len__(self):
    return len(self.x)

  def __getitem__(self, index):
    return {"x": self.x[index], "counts": self.counts[index]}


@pytest.mark.parametrize(("policy", "devices"), [("fp32", 8), ("bf16", 1)])
def test_an_evaluation_of_averages_is_that_of_all_that_counts(tmp_path, policy, devices):
  mpjax.train.register_model("masked")(masked_task)
  mpjax.train.register_data("masked_rows")(lambda: (MaskedRows(0), MaskedRows(1)))
  config = {
    "policy": policy,
    "out": str(tmp_path / "run"),
    "model": {"kind": "masked"},
    "data": {"kind": "masked_rows", "batch_size": 8},
    "optimizer": {"name": "sgd", "learning_rate": 1e-30, "weight_decay": 0},
    "train": {"steps": 1},
    "mesh": {"data": devices},
  }
  result = mpjax.train.run(config)
  rows = MaskedRows(1)
  counted = rows.x[rows.counts].astype(np.float64)
  batches = [(rows.x[i : i + 8] ** 2, rows.counts[i : i + 8]) for i in range(0, 32, 8)]
  of_means = np.mean([x[counts].mean() for x, counts in batches if counts.any()])
  rel = 1e-6 if policy == "fp32" else 2e-2
  assert result.eval_loss == pytest.approx((counted**2).mean(), rel=rel)
  assert abs(of_means - (counted**2).mean()) > 0.05  # what is not asked for is far away
  assert result["eval_positive"] == pytest.approx((counted > 0).mean(), rel=1e-6)
  assert result["eval_rows"] == 8
  (line,) = records(tmp_path / "run")
  assert (line["eval_loss"], line["eval_positive"]) == (result.eval_loss, result["eval_positive"])


def saved(folder, **columns):
  datasets.Dataset.from_dict(columns).save_to_disk(folder)
  return str(folder)


def pairs(rows):
  """Counts of (token, next token) that a loss predicts."""
  found = [rows[i] for i in range(len(rows))]
  return [
    (int(a), int(b))
    for row in found
    for a, b, counts in zip(row["tokens"], row["tokens"][1:], row["mask"][1:], strict=False)
    if counts
  ]


def within(lists):
  return [pair for one in lists for pair in itertools.pairwise(one)]


def test_lists_that_are_not_packed_are_rows_of_their_own_padded_and_lose_no_token(tmp_path):
  path = saved(tmp_path / "lists", ids=LISTS)
  options = {"path": path, "token_column": "ids", "vocab_size": 120, "batch_size": 1, "packed": False}
  data = load("huggingface", **options)
  assert data.info.row == {"tokens": ("int32", (9,)), "mask": ("bool", (9,))}
  assert pairs(data.train_rows) == within(LISTS[:9])
  assert pairs(data.eval_rows) == within(LISTS[9:])
  first = data.train_rows[1]
  assert first["tokens"].tolist() == [*LISTS[1], 0, 0, 0, 0, 0, 0]
  assert first["mask"].tolist() == [True] * 3 + [False] * 6
  again = load("huggingface", **options)
  reordered = saved(tmp_path / "other", ids=[LISTS[1], LISTS[0], *LISTS[2:]])
  other = load("huggingface", **options | {"path": reordered})
  assert data.info.fingerprint == again.info.fingerprint != other.info.fingerprint


def made(vocab_size=120, **options):
  row = {"tokens": ("int32", (9,)), "mask": ("bool", (9,))}
  facts = {"vocab_size": vocab_size, "seq_len": 8, "recompute": "none", "bytes_per_token": 1, "row": row}
  return gpt(types.SimpleNamespace(**facts), **SIZES, **options)


def test_the_loss_of_padded_rows_is_the_mean_over_their_tokens_alone():
  lengths = [9, 2, 5, 1]
  mask = np.arange(9) < np.array(lengths)[:, None]
  tokens = np.where(mask, np.random.default_rng(0).integers(1, 120, (4, 9)), 0).astype(np.int32)
  batch = {"tokens": tokens, "mask": mask}
  graphdef, params = nnx.split(made().init(jax.random.key(0)))

  def parts(params):  # row by row, without padding
    model = nnx.merge(graphdef, params)
    losses = []
    for row, length in zip(tokens, lengths, strict=True):
      logits = model(row[None, : length - 1])[0] if length > 1 else jnp.zeros((0, 120))
      losses.append(optax.softmax_cross_entropy_with_integer_labels(logits, row[1:length]))
    return jnp.concatenate(losses).mean(), [loss.sum() for loss in losses]

  (value, sums), gradients = jax.jit(jax.value_and_grad(parts, has_aux=True))(params)
  for loss_rows in (0, 16):
    task = made(loss_rows=loss_rows)

    def loss(params, batch):
      average = task.loss_fn(nnx.merge(graphdef, params), batch)
      return average.value, average

    def run(params):
      of_rows = [loss(params, jax.tree.map(lambda x: x[i : i + 1], batch))[1] for i in range(4)]
      evaluated = task.evaluate(nnx.merge(graphdef, params), batch)
      return jax.value_and_grad(loss, has_aux=True)(params, batch), of_rows, evaluated

    ((got, average), got_gradients), of_rows, evaluated = jax.jit(run)(params)
    assert int(average.count) == 8 + 1 + 4
    pairs = zip(*map(jax.tree.leaves, ((got, got_gradients), (value, gradients))), strict=True)
    for a, b in pairs:
      assert np.linalg.norm(np.asarray(a) - b) <= 2e-5 * np.linalg.norm(b)
    np.testing.assert_allclose([part.total for part in of_rows], sums, rtol=1e-5)
    assert float(of_rows[3].total) == int(of_rows[3].count) == 0
    bits = evaluated["bits_per_byte"]
    assert float(bits.total) / int(bits.count) == pytest.approx(float(value) / np.log(2), rel=1e-5)


def test_rows_that_a_model_does_not_take_are_refused():
  tokens, images = {"tokens": ("int32", (9,))}, {"images": ("uint8", (8, 8, 1))}
  for make, row, said in [
    (gpt, {}, "tokens of nothing"),
    (gpt, {"tokens": ("float32", (9,))}, r"tokens of float32\[9\]: expected int\[9\]"),
    (gpt, {"tokens": ("int32", (10,))}, r"tokens of int32\[10\]: expected int\[9\]"),
    (gpt, {"tokens": ("int32", (3, 3))}, r"tokens of int32\[3, 3\]: expected int\[9\]"),
    (gpt, tokens | {"mask": ("int32", (9,))}, r"mask of int32\[9\]: expected bool\[9\]"),
    (gpt, tokens | {"mask": ("bool", (8,))}, r"mask of bool\[8\]: expected bool\[9\]"),
    (resnet, {"images": ("uint8", (8, 8))}, r"images of uint8\[8, 8\]: expected \[8, 8, 1\]"),
    (resnet, images | {"labels": ("int32", (1,))}, r"labels of int32\[1\]: expected int\[\]"),
  ]:
    facts = {"vocab_size": 9, "seq_len": 8, "num_classes": 3, "image_shape": (8, 8)}
    info = types.SimpleNamespace(**facts, recompute="none", row=row)
    with pytest.raises(ValueError, match=said):
      make(info)
