"""Text files as windows of bytes: the standard library's source, or the user's own files."""

from __future__ import annotations

import glob
import hashlib
import itertools
import os
import pathlib
import sysconfig
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

import numpy as np
import pydantic

from mpjax.registry._kinds import Positive, register_data
from mpjax.registry._names import DataError

# The share of rows that is held out.
Share = Annotated[float, pydantic.Field(gt=0, lt=1)]
# Training rows, rows held out, and facts about them.
Loaded = tuple[Any, Any, dict[str, Any]]

_NOT_OURS = {"site-packages", "dist-packages", "__pycache__"}


@register_data("stdlib")
def load_stdlib(*, seq_len: Positive = 128, valid_fraction: Share = 0.05) -> Loaded:
  """Loads the `*.py` files of this Python's standard library, split by file."""
  files = find_files(sysconfig.get_path("stdlib"), lambda name: name in _NOT_OURS)
  documents = {name: file.read_bytes() for name, file in files if name.endswith(".py")}
  return documents_to_rows([documents], "Python standard library source", seq_len, valid_fraction)


@register_data("text")
def load_text(
  *, path: str | list[str] | None = None, seq_len: Positive = 128, valid_fraction: Share = 0.05
) -> Loaded:
  """Loads a file, a folder (every file in it that is text), a glob, or a list of these, as bytes.

  In a folder or a glob, a file is text if its first kilobyte has no zero byte; empty and hidden files are
  left out. A file that several paths lead to is read once, so that it cannot be in both splits. Several
  files are split by file, a single file by position.
  """
  paths = [path] if isinstance(path, str) else list(path or [])
  if not paths or not all(paths):  # an empty string would be the working directory
    raise DataError("data.path: missing; expected a text file, a folder, a glob or a list of these")
  documents: dict[str, bytes] = {}
  seen: set[pathlib.Path] = set()
  for position, each in enumerate(paths):
    is_named = pathlib.Path(each).is_file()
    texts = {name: file for name, file in find_files(each) if _has_text(file, is_named)}
    if not texts:
      raise DataError(
        f"data.path={each!r}: no such file, or no text files there (not empty, hidden or binary ones)"
      )
    for name, file in texts.items():
      if (real := file.resolve()) not in seen:
        seen.add(real)
        # Named by position in the list: split and fingerprint do not depend on the location.
        documents[name if len(paths) == 1 else f"{position}:{name}"] = file.read_bytes()
  return documents_to_rows([documents], ", ".join(paths), seq_len, valid_fraction)


def find_files(
  path: str, skip: Callable[[str], bool] = lambda name: name.startswith(".")
) -> list[tuple[str, pathlib.Path]]:
  """Returns (name, file) of the file at a path, of those in a folder, or of a glob's, sorted by name.

  Names are relative to the folder, or to the part of the pattern before its first wildcard. Files and whole
  folders for whose name `skip` is true are left out of a folder.

  Raises:
    OSError: for a folder that cannot be listed; `os.walk` would leave it out.
  """
  root = base = pathlib.Path(path)
  if root.is_file():
    return [(root.name, root)]
  files: list[pathlib.Path] = []
  if path and root.is_dir():

    def refuse(error: OSError) -> None:
      raise error

    for folder, folders, names in os.walk(root, onerror=refuse):
      folders[:] = [name for name in folders if not skip(name)]
      files += [pathlib.Path(folder, name) for name in names if not skip(name)]
  else:
    files += map(pathlib.Path, glob.glob(path, recursive=True))
    base = pathlib.Path(*itertools.takewhile(lambda part: not glob.has_magic(part), root.parts))
  return sorted((file.relative_to(base).as_posix(), file) for file in files if file.is_file())


class Windows:
  """Rows of `seq_len + 1` tokens; the last token of a row is the first of the next row.

  With the `lengths` of concatenated sequences, a row is of one sequence, padded with 0, and `mask` is true
  for the sequence. One of fewer than two tokens makes no row, since it has no token to predict.
  """

  def __init__(self, tokens: np.ndarray, seq_len: int, lengths: np.ndarray | None = None):
    self._tokens, self._seq_len, self._is_padded = tokens, seq_len, lengths is not None
    self._starts: Any
    self._stops: Any
    if lengths is None:  # without an array of all rows
      last = (len(tokens) - 1) // seq_len * seq_len
      self._starts, self._stops = (range(at, at + last, seq_len) for at in (0, seq_len + 1))
      return
    counts = -(-np.maximum(lengths - 1, 0) // seq_len)
    ends = np.cumsum(lengths)
    first = ends - lengths - seq_len * (np.cumsum(counts) - counts)
    self._starts = np.repeat(first, counts) + seq_len * np.arange(counts.sum())
    self._stops = np.minimum(self._starts + seq_len + 1, np.repeat(ends, counts))

  def __len__(self) -> int:
    return len(self._starts)

  def __getitem__(self, index: int) -> dict[str, np.ndarray]:
    inside = self._tokens[self._starts[index] : self._stops[index]]
    row = np.zeros(self._seq_len + 1, np.int32)
    row[: len(inside)] = inside
    return {"tokens": row} | ({"mask": np.arange(len(row)) < len(inside)} if self._is_padded else {})


def documents_to_rows(
  documents: Sequence[Mapping[str, bytes]],
  title: str,
  seq_len: int,
  valid_fraction: float,
  *,
  packed: bool = True,
) -> Loaded:
  """Cuts the documents of each split, by name, into windows of bytes.

  Holds out a share of a single split's documents, chosen by name, or the end of a single document.
  `packed`: a split is one stream; else each row comes from one document and is padded.

  Raises:
    DataError: if a split is empty or shorter than a window.
  """
  splits = [list(split.values()) for split in documents]
  if len(splits) == 1 and len(splits[0]) == 1:
    [[text]] = splits
    cut = len(text) - round(len(text) * valid_fraction)
    splits = [[text[:cut]], [text[cut:]]]
  elif len(splits) == 1:
    splits = _split_by_name(documents[0], valid_fraction)
  streams = [np.frombuffer((b"\0" if packed else b"").join(split), np.uint8) for split in splits]
  lengths = None if packed else [np.array([len(text) for text in split], np.int64) for split in splits]
  facts = {"vocab_size": 256, "bytes_per_token": 1}
  return streams_to_rows(streams, title, "bytes", seq_len, facts, lengths)


def streams_to_rows(
  streams: list[np.ndarray],
  title: str,
  units: str,
  seq_len: int,
  facts: dict[str, Any],
  lengths: list[np.ndarray] | None = None,
) -> Loaded:
  """Cuts the training tokens and the held-out tokens into windows of `seq_len` tokens to predict.

  `lengths` are those of the sequences in each split, for padded rows of one sequence each. `units` says what
  a token is, `facts` are further facts about the data.

  Raises:
    DataError: if a split is empty, or a stream is shorter than a window.
  """
  for name, tokens in zip(("training", "evaluation"), streams, strict=True):
    if len(tokens) <= (seq_len if lengths is None else 1):
      raise DataError(
        f"data.seq_len={seq_len}: longer than the {len(tokens)} {units} of the {name} split of {title}; "
        "use a smaller seq_len, more text or another valid_fraction"
      )
  sizes = (seq_len, [len(tokens) for tokens in streams])
  digest = hashlib.blake2b(repr(sizes).encode(), digest_size=8)
  for tokens in (*streams, *(lengths or ())):
    digest.update(np.ascontiguousarray(tokens).data)
  facts = facts | {
    "seq_len": seq_len,
    "fingerprint": digest.hexdigest(),
    "description": f"{title}: {len(streams[0]):,} {units} to train on, {len(streams[1]):,} held out",
  }
  splits = zip(streams, lengths or (None, None), strict=True)
  train, held_out = (Windows(tokens, seq_len, of) for tokens, of in splits)
  return train, held_out, facts


def _split_by_name(documents: Mapping[str, bytes], fraction: float) -> list[list[bytes]]:
  """Returns documents to train on and to hold out, at least one each; a hash of the name chooses them."""
  order = sorted(documents, key=lambda name: hashlib.sha256(os.fsencode(name)).digest())
  held_out = set(order[: min(max(1, round(len(order) * fraction)), len(order) - 1)])
  return [[text for name, text in documents.items() if (name in held_out) == part] for part in (False, True)]


def _has_text(file: pathlib.Path, is_named: bool) -> bool:
  with file.open("rb") as stream:
    head = stream.read(1024)
  return bool(head) and (is_named or b"\0" not in head)
