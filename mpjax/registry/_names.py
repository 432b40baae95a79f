"""The errors of a config, names of examples, and what a word may mean. Does not import JAX."""

from __future__ import annotations

import contextlib
import difflib
import pathlib
from collections.abc import Iterable, Iterator

_PACKAGE = pathlib.Path(__file__).parents[1]
# A wheel has the example configs inside the package, a checkout next to it.
_EXAMPLES = (_PACKAGE / "configs", _PACKAGE.parent / "configs")
# Other trainers' names of our keys.
_ALIASES = {
  "lr": "learning_rate",
  "bs": "batch_size",
  "batch": "batch_size",
  "wd": "weight_decay",
  "warmup": "warmup_steps",
  "max_steps": "steps",
  "num_steps": "steps",
  "grad_clip": "clip_norm",
  "clip": "clip_norm",
  "gradient_accumulation_steps": "accumulate",
  "accum": "accumulate",
  "precision": "policy",
  "dtype": "policy",
  "output_dir": "out",
  "resume_from": "init_from",
}


class ConfigError(ValueError):
  """The config is wrong: one line that names the key, the value and what to write instead."""

  exit_status = 2


class DataError(ValueError):
  """Data is missing or cannot be used: one line that names it."""

  exit_status = 2


@contextlib.contextmanager
def config_errors(before: str = "") -> Iterator[None]:
  """Turns a `ValueError` of its block into a `ConfigError` that begins with a text, such as `mesh.`."""
  try:
    yield
  except (ConfigError, DataError):
    raise
  except ValueError as error:
    raise ConfigError(f"{before}{error}") from error


def examples() -> dict[str, pathlib.Path]:
  """Returns the file of each example config that comes with mpjax, by name."""
  folder = next((folder for folder in _EXAMPLES if folder.is_dir()), None)
  return {} if folder is None else {file.stem: file for file in sorted(folder.glob("*.yaml"))}


def keys_meant(word: str, keys: Iterable[str]) -> list[str]:
  """Returns those of the dotted keys that a word (`lr`, `batch-size`, `train.stepz`) may mean.

  They end in the word, or else in a similar word.
  """
  word, keys = word.replace("-", "_").lower(), list(keys)
  if word in keys:
    return [word]
  last = word.rpartition(".")[2]
  last = _ALIASES.get(last, last)
  ends: dict[str, list[str]] = {}
  for key in keys:
    ends.setdefault(key.rpartition(".")[2], []).append(key)
  if last in ends:
    return ends[last]
  return [key for end in nearest(last, ends) for key in ends[end]]


def nearest(word: str, choices: Iterable[str]) -> list[str]:
  """Returns a list with the choice most similar to a word; an empty list if none is similar."""
  return difflib.get_close_matches(word, list(choices), n=1, cutoff=0.7)
