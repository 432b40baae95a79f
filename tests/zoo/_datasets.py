"""Datasets as the tests load them: default options, what is in a split, small images."""

import numpy as np

from mpjax.train.config._config import DataConfig
from mpjax.train.data import load_data

WINDOWS = {"seq_len": 8, "valid_fraction": 0.25}
DEFAULTS = {"stdlib": WINDOWS, "text": WINDOWS, "huggingface": WINDOWS, "npz": {"valid_fraction": 0.25}}


def spec(kind, **options):
  return DataConfig(kind=kind, **({"batch_size": 4} | DEFAULTS.get(kind, {}) | options))


def load(kind, seed=0, **options):
  return load_data(spec(kind, **options), seed=seed)


def letters(data, split):
  rows = getattr(data, f"{split}_rows")
  return {byte for i in range(len(rows)) for byte in rows[i]["tokens"].tolist()} - {0}


IMAGES = np.random.default_rng(0).integers(0, 255, (40, 6, 6), dtype=np.uint8)
LABELS = np.arange(40) % 3
