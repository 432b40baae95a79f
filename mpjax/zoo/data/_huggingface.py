"""Hugging Face datasets, if the `datasets` package is installed: text, tokens, or images with labels."""

from __future__ import annotations

import importlib.util
import os
import pathlib
from typing import Any

import numpy as np

from mpjax._mistakes import DataError
from mpjax.registry import Positive, register_data
from mpjax.zoo.data._images import Classes, images_to_rows
from mpjax.zoo.data._text import Loaded, Share, documents_to_rows, streams_to_rows


@register_data("huggingface")
def load_huggingface(
  *,
  path: str | None = None,
  name: str | None = None,
  text_column: str | None = None,
  token_column: str | None = None,
  vocab_size: Positive | None = None,
  image_column: str | None = None,
  label_column: str | None = None,
  num_classes: Classes | None = None,
  train_split: str = "train",
  eval_split: str | None = None,
  seq_len: Positive = 128,
  packed: bool = True,
  valid_fraction: Share = 0.05,
) -> Loaded:
  """Loads a dataset saved at `path`, or `name` from the hub: text as bytes, tokens, or images with labels.

  Uses `path` if it is a folder, else `name`. Lists of numbers below `vocab_size`, or texts, are concatenated
  into a stream; with `packed: false` each row comes from one of them, is padded, and has a `mask`. Without
  `eval_split`, the share `valid_fraction` of the training split is held out.
  """
  # Releases before 4 may run a dataset's own script: only if the user's environment allows it.
  os.environ.setdefault("HF_DATASETS_TRUST_REMOTE_CODE", "0")
  if importlib.util.find_spec("datasets") is None:
    raise DataError("data.kind=huggingface needs the datasets package: pip install datasets")
  saved = path is not None and pathlib.Path(path).is_dir()
  source = path if saved else name
  if not source:
    missing = f"data.path={path!r}: no such folder" if path else "data.kind=huggingface"
    raise DataError(f"{missing}: expected data.path (a saved dataset) or data.name (of the hub)")
  if eval_split == train_split:
    raise DataError(f"data.eval_split={eval_split!r} is the training split: expected another split, or null")
  columns = [column for column in (token_column, text_column, image_column, label_column) if column]
  wanted = [name for name in (train_split, eval_split) if name]
  splits = {name: split.select_columns(columns) for name, split in _load(source, saved, wanted).items()}
  titles = {split: f"{source}[{split}]" for split in splits}
  if token_column:
    if vocab_size is None:
      raise DataError("data.vocab_size: missing; expected the number of the tokenizer's tokens")
    found = [_tokens(split, token_column, titles[name], vocab_size) for name, split in splits.items()]
    # A stream, or the sequences in it.
    lists = [[stream] if packed else np.split(stream, np.cumsum(n)[:-1]) for stream, n in found]
    if len(lists) == 1:
      whole: Any = lists[0][0] if packed else lists[0]
      cut = len(whole) - max(1, round(len(whole) * valid_fraction))
      parts = whole[:cut], whole[cut:]
      lists = [[part] for part in parts] if packed else list(parts)
    facts = {"vocab_size": vocab_size}
    return streams_to_rows(lists, source, "tokens", seq_len, facts, packed=packed)
  if text_column:
    documents: list[dict[str, bytes]] = [{} for _ in splits]
    for of, (name, split) in zip(documents, splits.items(), strict=True):
      for i, text in enumerate(split[text_column]):
        if not isinstance(text, str):
          raise DataError(f"{titles[name]}: {text_column}[{i}] is {type(text).__name__}: expected a string")
        of[f"{name}/{i}"] = text.encode()
    return documents_to_rows(documents, source, seq_len, valid_fraction, packed=packed)
  if not (image_column and label_column):
    raise DataError("expected data.text_column, data.token_column, or data.image_column with label_column")
  pairs = [(split[image_column], np.asarray(list(split[label_column]))) for split in splits.values()]
  named = dict(zip(titles.values(), pairs, strict=True))
  return images_to_rows(named, source, num_classes, valid_fraction)


def _load(source: str, saved: bool, wanted: list[str]) -> dict[str, Any]:
  """Returns splits by name."""
  datasets = importlib.import_module("datasets")
  try:
    splits = datasets.load_from_disk(source) if saved else datasets.load_dataset(source)
  except Exception as error:  # missing files, failed connections and others
    raise DataError(f"cannot load dataset {source!r}: {' '.join(str(error).split())}") from error
  splits = splits if isinstance(splits, dict) else {wanted[0]: splits}
  for split in wanted:
    if split not in splits:
      raise DataError(f"dataset {source!r}: no split {split!r}; there are {', '.join(splits)}")
  return {split: splits[split] for split in wanted}


def _tokens(split: Any, name: str, title: str, vocab_size: int) -> tuple[np.ndarray, np.ndarray]:
  """Returns the concatenated lists of a column, in 16 bits if they suffice, and the length of each list."""
  length_of = importlib.import_module("pyarrow.compute").list_value_length
  dtype = np.uint16 if vocab_size <= 1 << 16 else np.int32
  parts, lengths = [np.zeros(0, dtype)], [np.zeros(0, np.int64)]
  for chunk in split.select_columns([name]).with_format("arrow")[:].column(name).chunks:
    inside = chunk.flatten() if hasattr(chunk, "flatten") else chunk
    numbers = inside.to_numpy(zero_copy_only=False)  # with gaps they are floats
    if chunk.null_count or inside is chunk or numbers.dtype.kind not in "ui":
      raise DataError(f"{title}: {name} is {chunk.type} or has gaps: expected lists of integers")
    if len(wrong := numbers[(numbers < 0) | (numbers >= vocab_size)]):
      raise DataError(f"{title}: {name} has {wrong[0]}: expected 0 on, below data.vocab_size={vocab_size}")
    parts.append(numbers.astype(dtype))
    lengths.append(length_of(chunk).to_numpy(zero_copy_only=False).astype(np.int64))
  return np.concatenate(parts), np.concatenate(lengths)
