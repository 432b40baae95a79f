"""Datasets as the tests load them: default options, what is in a split, small images."""

from types import SimpleNamespace

import numpy as np

from mpjax.train.data import load_data

DEFAULTS = {
  "batch_size": 4,
  "path": None,
  "seq_len": 8,
  "valid_fraction": 0.25,
  "eval_batches": None,
  "workers": 0,
  "name": None,
  "text_column": None,
  "image_column": None,
  "label_column": None,
  "train_split": "train",
  "eval_split": None,
}


def load(kind, seed=0, **options):
  return load_data(SimpleNamespace(kind=kind, **(DEFAULTS | options)), seed=seed)


def letters(data, split):
  rows = getattr(data, f"{split}_row")
  examples = getattr(data.info, f"{split}_examples")
  return {byte for i in range(examples) for byte in rows(i)["tokens"].tolist()} - {0}


IMAGES = np.random.default_rng(0).integers(0, 255, (40, 6, 6), dtype=np.uint8)
LABELS = np.arange(40) % 3
