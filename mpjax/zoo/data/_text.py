"""Text files as windows of bytes: the standard library's source, or the user's own files."""

from __future__ import annotations

import glob
import hashlib
import itertools
import mmap
import os
import pathlib
import sysconfig
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import numpy as np
import pydantic

from mpjax.registry._checks import Positive
from mpjax.registry._errors import DataError
from mpjax.registry._registry import register_data

# The share of rows that is held out.
Share = Annotated[float, pydantic.Field(gt=0, lt=1)]
# Training rows, rows held out, and facts about them.
Loaded = tuple[Any, Any, dict[str, Any]]
# A document in memory, or mapped from a file.
Document = bytes | memoryview

_SEPARATOR = b"\0"
# A single file of at least this many bytes is mapped, and need not fit into memory.
_MAPPED = 1 << 30
_TOO_LARGE = "larger than memory: expected a single file, which is mapped, or files for data.kind=tokens"
_NOT_OURS = {"site-packages", "dist-packages", "__pycache__"}


@register_data("stdlib")
def load_stdlib(*, seq_len: Positive = 128, valid_fraction: Share = 0.05) -> Loaded:
  """Loads the `*.py` files of this Python's standard library, split by file."""
  root = pathlib.Path(sysconfig.get_path("stdlib"))
  files = _walk(root, lambda name: name in _NOT_OURS)
  named = {file.relative_to(root).as_posix(): file for file in files if file.suffix == ".py"}
  documents = {name: _read(named[name]) for name in sorted(named)}
  return documents_to_rows(documents, "Python standard library source", seq_len, valid_fraction)


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
  documents: dict[str, Document] = {}
  seen: set[pathlib.Path] = set()
  for position, each in enumerate(paths):
    found = False
    only_text = not _is_file(pathlib.Path(each))
    for name, file in _find(each):
      real = file.resolve()
      if real not in seen and (text := _read(file, only_text)):
        seen.add(real)
        # Named by position in the list: split and fingerprint do not depend on the location.
        documents[name if len(paths) == 1 else f"{position}:{name}"] = text
      found |= real in seen
    if not found:
      raise DataError(
        f"data.path={each!r}: no text files there (empty, hidden and binary files are left out)"
      )
  return documents_to_rows(documents, ", ".join(paths), seq_len, valid_fraction)


class TextWindows:
  """Rows of `seq_len + 1` tokens; the last token of a row is the first of the next row."""

  def __init__(self, tokens: np.ndarray, seq_len: int):
    self._tokens, self._seq_len = tokens, seq_len

  def __len__(self) -> int:
    return (len(self._tokens) - 1) // self._seq_len

  def __getitem__(self, index: int) -> dict[str, np.ndarray]:
    start = index * self._seq_len
    return {"tokens": self._tokens[start : start + self._seq_len + 1].astype(np.int32)}


class PaddedWindows:
  """Rows of `seq_len + 1` tokens from one sequence each, padded with 0; `mask` is true for the sequence.

  A longer sequence makes several rows, which overlap by one token as in `TextWindows`. A sequence of fewer
  than two tokens makes no row, since it has no token to predict.

  Args:
    tokens: the concatenated sequences: [sum of lengths].
    lengths: the length of each sequence: [sequences].
    seq_len: number of tokens to predict in a row.
  """

  def __init__(self, tokens: np.ndarray, lengths: np.ndarray, seq_len: int):
    self._tokens, self._seq_len = tokens, seq_len
    self._ends = np.cumsum(lengths, dtype=np.int64)
    self._lengths = np.asarray(lengths, np.int64)
    self._last_rows = np.cumsum(-(-np.maximum(self._lengths - 1, 0) // seq_len), dtype=np.int64)

  def __len__(self) -> int:
    return int(self._last_rows[-1]) if len(self._last_rows) else 0

  def __getitem__(self, index: int) -> dict[str, np.ndarray]:
    at = int(np.searchsorted(self._last_rows, index, side="right"))
    first_row = self._last_rows[at - 1] if at else 0
    start = int(self._ends[at] - self._lengths[at] + (index - first_row) * self._seq_len)
    inside = self._tokens[start : min(start + self._seq_len + 1, int(self._ends[at]))]
    row = np.zeros(self._seq_len + 1, np.int32)
    row[: len(inside)] = inside
    return {"tokens": row, "mask": np.arange(len(row)) < len(inside)}


def documents_to_rows(
  documents: Mapping[str, Document],
  title: str,
  seq_len: int,
  valid_fraction: float,
  held_out_prefix: str | None = None,
  *,
  packed: bool = True,
) -> Loaded:
  """Splits documents and cuts each split into windows of bytes.

  Holds out the documents whose name has the prefix; without a prefix, a share of the documents, chosen by
  name, or the end of a single document. If `packed`, a split is one stream; else each row comes from one
  document and is padded.

  Raises:
    DataError: if a split is empty or shorter than a window.
  """
  if held_out_prefix is not None:
    held_out = {name: text for name, text in documents.items() if name.startswith(held_out_prefix)}
    train = {name: text for name, text in documents.items() if name not in held_out}
  elif len(documents) == 1:
    ((name, text),) = documents.items()
    cut = len(text) - round(len(text) * valid_fraction)
    train, held_out = {name: text[:cut]}, {name: text[cut:]}
  else:
    train, held_out = split_by_name(documents, valid_fraction)
  splits = [list(split.values()) for split in (train, held_out)]
  separator = _SEPARATOR if packed else b""
  streams = [np.frombuffer(_joined(split, separator, title), np.uint8) for split in splits]
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
  """Cuts the training tokens and the held-out tokens into windows.

  Args:
    streams: the tokens of each split.
    title: where they come from, for a person.
    units: what a token is.
    seq_len: number of tokens to predict in a row.
    facts: further facts about the data.
    lengths: the lengths of the sequences in each split, for padded rows of one sequence each; `None` for rows
      across sequences.

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
    digest.update(np.ascontiguousarray(tokens))
  facts = facts | {
    "seq_len": seq_len,
    "fingerprint": digest.hexdigest(),
    "description": f"{title}: {len(streams[0]):,} {units} to train on, {len(streams[1]):,} held out",
  }
  if lengths is not None:
    train, held_out = (
      PaddedWindows(tokens, of, seq_len) for tokens, of in zip(streams, lengths, strict=True)
    )
    return train, held_out, facts
  return TextWindows(streams[0], seq_len), TextWindows(streams[1], seq_len), facts


def _joined(documents: list[Document], separator: bytes, title: str) -> Document:
  if len(documents) == 1:
    return documents[0]
  try:
    return separator.join(documents)
  except MemoryError as error:
    raise DataError(f"{title}: {_TOO_LARGE}") from error


def split_by_name(
  documents: Mapping[str, Document], fraction: float
) -> tuple[dict[str, Document], dict[str, Document]]:
  """Returns (train, held out), at least one document each; a hash of the name chooses about `fraction`."""
  order = sorted(documents, key=lambda name: hashlib.sha256(os.fsencode(name)).digest())
  count = min(max(1, round(len(order) * fraction)), len(order) - 1)
  held_out = set(order[:count])
  part = lambda inside: {n: text for n, text in documents.items() if (n in held_out) == inside}
  return part(False), part(True)


def _find(path: str) -> list[tuple[str, pathlib.Path]]:
  """Returns (name, file) of the files at a path, sorted by name."""
  root = pathlib.Path(path)
  if _is_file(root):
    return [(root.name, root)]
  if root.is_dir():
    files = _walk(root, lambda name: name.startswith("."))
    base = root
  else:
    files = [pathlib.Path(name) for name in glob.glob(path, recursive=True)]
    if not files:
      raise DataError(f"data.path={path!r}: no such file, folder or match")
    # Names are relative to the part of the pattern before its first wildcard, not to the location.
    fixed = itertools.takewhile(lambda part: not glob.has_magic(part), root.parts)
    base = pathlib.Path(*fixed)
  return sorted((file.relative_to(base).as_posix(), file) for file in files if _is_file(file))


def _walk(root: pathlib.Path, skip: Callable[[str], bool]) -> list[pathlib.Path]:
  """Returns the files below a folder, without files and whole folders for whose name `skip` is true."""
  found = []

  def refuse(error: OSError) -> None:  # os.walk would silently leave the folder out
    raise DataError(f"data.path: cannot list {error.filename}: {error.strerror}") from error

  for folder, folders, files in os.walk(root, onerror=refuse):
    folders[:] = [name for name in folders if not skip(name)]
    found += [pathlib.Path(folder, name) for name in files if not skip(name)]
  return [file for file in found if _is_file(file)]


def _is_file(path: pathlib.Path) -> bool:
  """Returns whether a path is a file.

  Raises:
    DataError: if the path cannot be examined, for example in a folder that cannot be entered.
  """
  try:
    return path.is_file()
  except OSError as error:
    raise DataError(f"data.path: cannot read {path}: {error.strerror}") from error


def _read(file: pathlib.Path, only_text: bool = False) -> Document:
  """Returns the content of a file. With `only_text`, returns nothing for a file that is not text."""
  try:
    with file.open("rb") as stream:
      head = stream.read(1024)
      if only_text and b"\0" in head:
        return b""
      if not only_text and os.fstat(stream.fileno()).st_size >= _MAPPED:
        return memoryview(mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ))
      return head + stream.read()
  except OSError as error:
    raise DataError(f"data.path: cannot read {file}: {error.strerror}") from error
  except MemoryError as error:
    raise DataError(f"data.path: {file}: {_TOO_LARGE}") from error
