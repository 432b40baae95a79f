"""Datasets of a hub, with a stand-in for the package that fetches them."""

import sys
import types

import pytest

from mpjax.train.data import DataError
from tests.train._datasets import IMAGES, LABELS, letters, load


class FakeSplit:
  """The part of a `datasets.Dataset` that is used: columns by name."""

  def __init__(self, **columns):
    self.columns = columns
    self.column_names = list(columns)

  def __getitem__(self, name):
    return self.columns[name]


@pytest.fixture
def hub(monkeypatch):
  """A stand-in for the `datasets` package with a few datasets on its hub."""
  texts = FakeSplit(text=[chr(65 + i) * 40 for i in range(12)])
  held_out = FakeSplit(text=[chr(97 + i) * 40 for i in range(3)])
  images = FakeSplit(image=list(IMAGES), label=LABELS.tolist())

  ragged = FakeSplit(image=[IMAGES[0], IMAGES[0][:5]], label=[0, 1])
  hubs = {
    "texts": {"train": texts, "test": held_out},
    "images": {"train": images},
    "gaps": {"train": FakeSplit(text=["a" * 40, None])},
    "ragged": {"train": ragged},
    "blank": {"train": FakeSplit(image=[], label=[])},
  }

  def load_dataset(name):
    if name not in hubs:
      raise ConnectionError(f"no {name}\non the hub")
    return hubs[name]

  module = types.SimpleNamespace(load_dataset=load_dataset, load_from_disk=lambda path: texts)
  monkeypatch.setitem(sys.modules, "datasets", module)


def test_hub_text_and_images(hub, tmp_path):
  data = load("huggingface", name="texts", text_column="text", eval_split="test")
  assert letters(data, "eval") == set(b"abc")
  assert letters(data, "train") == set(range(65, 77))
  assert letters(load("huggingface", path=str(tmp_path), text_column="text"), "train") < set(range(65, 77))
  data = load("huggingface", name="images", image_column="image", label_column="label")
  assert (data.info.image_shape, data.info.num_classes, data.info.eval_examples) == ((6, 6, 1), 3, 10)


def test_a_folder_with_the_name_of_a_hub_dataset_is_not_it(hub, tmp_path, monkeypatch):
  (tmp_path / "images").mkdir()
  monkeypatch.chdir(tmp_path)
  data = load("huggingface", name="images", image_column="image", label_column="label")
  assert data.info.image_shape == (6, 6, 1)


@pytest.mark.parametrize(
  ("options", "words"),
  [
    ({"name": "gaps", "text_column": "text"}, ["gaps[train]", "text[1]", "NoneType"]),
    ({"name": "ragged", "image_column": "image", "label_column": "label"}, ["image[1]", "(5, 6)", "(6, 6)"]),
    ({"name": "blank", "image_column": "image", "label_column": "label"}, ["blank[train]", "no rows"]),
    ({"name": "texts", "text_column": "text", "eval_split": "train"}, ["eval_split='train'", "another"]),
    ({"path": ["texts"], "text_column": "text"}, ["data.path", "data.name"]),
    ({"name": "nothing", "text_column": "text"}, ["nothing", "hub"]),
    ({"name": "texts", "text_column": "body"}, ["'body'", "text"]),
    ({"name": "texts", "text_column": "text", "train_split": "all"}, ["'all'", "train, test"]),
    ({"name": "texts"}, ["data.text_column"]),
    ({}, ["data.path", "data.name"]),
  ],
)
def test_unfit_hub_datasets_are_named(hub, options, words):
  with pytest.raises(DataError) as error:
    load("huggingface", **options)
  assert "\n" not in str(error.value)
  assert all(word in str(error.value) for word in words), error.value
