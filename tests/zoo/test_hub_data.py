"""Hugging Face datasets, made here and read by the real package: saved, or as files that it loads."""

import numpy as np
import pytest

from mpjax.train import DataError
from tests.train._runs import raises_one_line
from tests.zoo._datasets import IMAGES, LABELS, letters, load

datasets = pytest.importorskip("datasets")

TEXTS = [chr(65 + i) * 40 for i in range(12)]


@pytest.fixture
def offline(tmp_path, monkeypatch):
  """A cache of its own, and no way out to the hub."""
  monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
  monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)


def saved(folder, **splits):
  """Saves a dataset of columns, one split or several by name, and returns where it lies."""
  made = {name: datasets.Dataset.from_dict(columns) for name, columns in splits.items()}
  whole = next(iter(made.values())) if list(made) == ["only"] else datasets.DatasetDict(made)
  whole.save_to_disk(folder)
  return str(folder)


def pictures(images, labels=LABELS):
  """Columns of images, encoded as PNG, and labels."""
  from PIL import Image

  features = datasets.Features({"image": datasets.Image(), "label": datasets.Value("int64")})
  columns = {"image": [Image.fromarray(image) for image in images], "label": [int(label) for label in labels]}
  return datasets.Dataset.from_dict(columns, features=features)


def test_text_that_was_saved(tmp_path):
  path = saved(tmp_path / "split", train={"text": TEXTS}, test={"text": ["a" * 40, "b" * 40]})
  data = load("huggingface", path=path, text_column="text", eval_split="test")
  assert letters(data, "eval") == set(b"ab")
  assert letters(data, "train") == set(range(65, 77))
  one = saved(tmp_path / "one", only={"text": TEXTS})
  assert letters(load("huggingface", path=one, text_column="text"), "train") < set(range(65, 77))


@pytest.mark.parametrize("vocab_size", [300, 100_000])
def test_tokens_that_were_saved(tmp_path, vocab_size):
  lists = [[i, i + 1, 299] for i in range(40)]
  stream = np.ravel(lists).tolist()
  path = saved(tmp_path / "one", only={"input_ids": lists, "text": ["x"] * 40})
  options = {"token_column": "input_ids", "vocab_size": vocab_size, "batch_size": 2}
  data = load("huggingface", path=path, **options)
  assert data.info.vocab_size == vocab_size
  np.testing.assert_array_equal(data.train_rows[2]["tokens"], stream[16:25])
  np.testing.assert_array_equal(data.eval_rows[0]["tokens"], stream[90:99])
  split = saved(tmp_path / "split", train={"input_ids": lists[:30]}, test={"input_ids": lists[30:]})
  apart = load("huggingface", path=split, eval_split="test", **options)
  np.testing.assert_array_equal(apart.eval_rows[0]["tokens"], stream[90:99])
  shuffled = datasets.load_from_disk(path).select(range(39, -1, -1))
  shuffled.save_to_disk(tmp_path / "shuffled")
  rows = load("huggingface", path=str(tmp_path / "shuffled"), **options).train_rows
  assert rows[0]["tokens"].tolist() == [39, 40, 299, 38, 39, 299, 37, 38, 299]


def test_images_are_decoded_when_they_are_read(tmp_path):
  pictures(IMAGES).save_to_disk(tmp_path / "images")
  options = {"path": str(tmp_path / "images"), "image_column": "image", "label_column": "label"}
  data = load("huggingface", **options)
  assert (data.info.image_shape, data.info.num_classes, data.info.eval_examples) == ((6, 6, 1), 3, 10)
  rows = [data.train_rows[i] for i in range(30)] + [data.eval_rows[i] for i in range(10)]
  assert sorted(int(row["labels"]) for row in rows) == sorted(LABELS.tolist())
  values = np.stack([row["images"] for row in rows[:30]])
  assert abs(values.mean()) < 1e-5
  assert abs(values.std() - 1) < 1e-5
  np.savez(tmp_path / "images.npz", images=IMAGES, labels=LABELS)
  arrays = load("npz", path=str(tmp_path / "images.npz"))
  np.testing.assert_allclose(arrays.train_rows[3]["images"], data.train_rows[3]["images"], atol=1e-6)


TEXT, IDS = {"text_column": "text"}, {"token_column": "ids", "vocab_size": 9}
PICTURES = {"image_column": "image", "label_column": "label"}
BAD = [  # columns of the training split, options, words of the error
  ({"text": ["a" * 40, None]}, TEXT, ["[train]", "text[1]", "NoneType"]),
  ({"text": TEXTS}, TEXT | {"eval_split": "train"}, ["another"]),
  ({"text": TEXTS}, {"text_column": "body"}, ["'body'", "text"]),
  ({"text": TEXTS}, {}, ["data.text_column"]),
  ({"ids": [[1]] * 9}, {"token_column": "ids"}, ["data.vocab_size"]),
  ({"ids": [[1, 9]] * 9}, IDS, ["[train]", "ids has 9", "data.vocab_size=9"]),
  ({"ids": [[1], None, [2, None]]}, IDS, ["[train]", "gaps"]),
  ({"ids": TEXTS}, IDS, ["ids is string", "lists of integers"]),
  ({"ids": [[1]] * 9}, IDS, ["data.seq_len=8", "tokens of a split"]),
  (
    {"image": IMAGES.tolist(), "label": [-1, *LABELS[1:].tolist()]},
    PICTURES,
    ["[train]", "labels are -1 to 2"],
  ),
  ({"image": TEXTS, "label": list(range(12))}, PICTURES, ["images are <U"]),
]


def test_unfit_datasets_are_named(tmp_path):
  for i, (columns, options, words) in enumerate(BAD):
    path = saved(tmp_path / str(i), train=columns)
    raises_one_line(DataError, words, load, "huggingface", path=path, **options)
  path, options = saved(tmp_path / "two", train={"text": TEXTS}, test={"text": TEXTS}), {"train_split": "all"}
  raises_one_line(DataError, ["'all'", "train, test"], load, "huggingface", path=path, **TEXT, **options)


def test_datasets_that_are_not_there_are_named(offline, monkeypatch):
  raises_one_line(DataError, ["nobody/nothing"], load, "huggingface", name="nobody/nothing", **TEXT)
  monkeypatch.delattr(datasets, "load_dataset")  # a path is not looked for on the hub
  for options, words in [
    ({"path": "no/such/folder"}, ["data.path='no/such/folder': no such folder", "data.name"]),
    ({}, ["data.path", "data.name"]),
  ]:
    raises_one_line(DataError, words, load, "huggingface", **TEXT, **options)
