"""Windows of text as bytes, and of token numbers that another program made from text."""

from __future__ import annotations

import copy
import glob
import hashlib
import itertools
import os
import pathlib
import sysconfig
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal, Self

import numpy as np
import pydantic

from mpjax._mistakes import DataError
from mpjax.registry import Natural, Positive, register_data

# The share of rows that is held out.
Share = Annotated[float, pydantic.Field(gt=0, lt=1)]
# A file, a folder, a glob, or a list of these.
Paths = str | list[str]
# Training rows, rows held out, and facts about them.
Loaded = tuple[Any, Any, dict[str, Any]]

_NOT_OURS = {"site-packages", "dist-packages", "__pycache__"}
# Rows of token files that are read before a run: for the fingerprint, and to find wrong numbers.
_SAMPLED = 256


@register_data("stdlib")
def load_stdlib(*, seq_len: Positive = 128, valid_fraction: Share = 0.05) -> Loaded:
  """Loads the `*.py` files of this Python's standard library, split by file."""
  files = find_files(sysconfig.get_path("stdlib"), lambda name: name in _NOT_OURS)
  documents = {name: file.read_bytes() for name, file in files if name.endswith(".py")}
  return documents_to_rows([documents], "Python standard library source", seq_len, valid_fraction)


@register_data("text")
def load_text(*, path: Paths, seq_len: Positive = 128, valid_fraction: Share = 0.05) -> Loaded:
  """Loads a file, a folder (every file in it that is text), a glob, or a list of these, as bytes.

  In a folder or a glob, a file is text if its first kilobyte has no zero byte; empty and hidden files are
  left out. A file that several paths lead to is read once, so that it cannot be in both splits. Several
  files are split by file, a single file by position.
  """
  found = _files_of(path, "path", "text files there (not empty, hidden or binary ones)", _has_text)
  names: dict[pathlib.Path, str] = {}
  for position, files in enumerate(found):
    for name, file in files:
      # Named by position in the list: split and fingerprint do not depend on the location.
      names.setdefault(file.resolve(), name if len(found) == 1 else f"{position}:{name}")
  documents = {name: file.read_bytes() for file, name in names.items()}
  return documents_to_rows([documents], ", ".join(_listed(path)), seq_len, valid_fraction)


@register_data("tokens")
def load_tokens(
  *,
  path: Paths,
  vocab_size: Positive,
  eval_path: Paths | None = None,
  dtype: Literal["uint16", "uint32"] | None = None,
  skip_bytes: Natural = 0,
  seq_len: Positive = 128,
  valid_fraction: Share = 0.05,
) -> Loaded:
  """Maps files that contain only token numbers, little-endian; no row crosses from one file into the next.

  `dtype` is by default uint16 if it suffices for the vocabulary, else uint32. Without `eval_path` the last
  rows, a share of `valid_fraction`, are held out. `skip_bytes` is the length of a header of each file.

  Raises:
    DataError: for files that are missing, empty or cut off, or numbers outside the vocabulary.
  """
  numbers = np.dtype(dtype or ("uint16" if vocab_size <= 1 << 16 else "uint32")).newbyteorder("<")
  splits = []
  for key, paths in {"path": path, "eval_path": eval_path}.items():
    if paths is not None:
      found = _files_of(paths, key, "files there")
      files = list(dict.fromkeys(file for each in found for _, file in each))
      splits.append(
        TokenRows([_map(file, numbers, skip_bytes) for file in files], seq_len, vocab_size, files)
      )
  if len(splits) == 1:
    [rows] = splits
    count = len(rows) - max(1, round(len(rows) * valid_fraction))
    if not count:
      raise DataError(f"data.path={path!r}: {len(rows)} rows of data.seq_len={seq_len}: none to train on")
    splits = [rows.part(0, count), rows.part(count, len(rows))]
  digest = hashlib.blake2b(repr((seq_len, vocab_size)).encode(), digest_size=8)
  for split in splits:
    digest.update(split.sample())
  sizes = [f"{len(split) * seq_len:,}" for split in splits]
  facts = {
    "vocab_size": vocab_size,
    "seq_len": seq_len,
    "fingerprint": digest.hexdigest(),
    "description": f"{', '.join(_listed(path))}: {sizes[0]} tokens of {vocab_size:,} to train on, "
    f"{sizes[1]} held out",
  }
  return splits[0], splits[1], facts


def find_files(
  path: str, skip: Callable[[str], bool] = lambda name: name.startswith(".")
) -> list[tuple[str, pathlib.Path]]:
  """Returns (name, file) of the file at a path, of those in a folder, or of a glob's, sorted by name.

  Names are relative to the folder, or to the part of the pattern before its first wildcard. Files and whole
  folders for whose name `skip` is true are left out of a folder.
  """
  root = base = pathlib.Path(path)
  if root.is_file():
    return [(root.name, root)]
  files: list[pathlib.Path] = []
  if root.is_dir():
    for folder, folders, names in os.walk(root, onerror=_refuse):  # it would leave such a folder out
      folders[:] = [name for name in folders if not skip(name)]
      files += [pathlib.Path(folder, name) for name in names if not skip(name)]
  else:
    files += map(pathlib.Path, glob.glob(path, recursive=True))
    base = pathlib.Path(*itertools.takewhile(lambda part: not glob.has_magic(part), root.parts))
  return sorted((file.relative_to(base).as_posix(), file) for file in files if file.is_file())


def _refuse(error: OSError) -> None:
  raise error


def _files_of(
  path: Paths,
  key: str,
  what: str,
  keep: Callable[[pathlib.Path], bool] = lambda file: True,
) -> list[list[tuple[str, pathlib.Path]]]:
  """Returns what `find_files` finds at each path of a key: the file there, or those for which `keep` is true.

  Raises:
    DataError: if nothing is found at a path.
  """
  found = []
  for each in _listed(path) or [""]:
    is_named = pathlib.Path(each).is_file()
    found.append([(name, file) for name, file in find_files(each) if is_named or keep(file)])
    if not found[-1] or not each:  # an empty string would be the working directory
      raise DataError(f"data.{key}={each!r}: no such file, or no {what}")
  return found


def _listed(path: Paths) -> list[str]:
  return [path] if isinstance(path, str) else path


class Windows:
  """Rows of `seq_len + 1` tokens of one stream; the last token of a row is the first of the next row.

  With `padded`, what is left at the end of a stream makes a row, too: padded with 0, and `mask` is true for
  the stream. One of fewer than two tokens makes no row, since it has no token to predict.

  Raises:
    DataError: if there is no row.
  """

  def __init__(self, streams: Sequence[np.ndarray], seq_len: int, *, padded: bool = False):
    self._streams, self._seq_len, self._padded = streams, seq_len, padded
    more = seq_len - 1 if padded else 0
    counts = [(max(len(stream) - 1, 0) + more) // seq_len for stream in streams]
    self._ends, self._rows = np.cumsum(counts), range(sum(counts))
    if not self._rows:
      longest = max(map(len, streams), default=0)
      raise DataError(f"data.seq_len={seq_len}: longer than the {longest} tokens of a split: give it more")

  def part(self, first: int, last: int) -> Self:
    """Returns the rows from `first` up to, not including, `last`."""
    some = copy.copy(self)
    some._rows = self._rows[first:last]
    return some

  def __len__(self) -> int:
    return len(self._rows)

  def place(self, index: int) -> tuple[int, int]:
    """Returns the stream of a row, by position, and where in it the row starts."""
    row = self._rows[index]
    stream = int(np.searchsorted(self._ends, row, side="right"))
    return stream, (row - (int(self._ends[stream - 1]) if stream else 0)) * self._seq_len

  def __getitem__(self, index: int) -> dict[str, np.ndarray]:
    stream, start = self.place(index)
    inside = self._streams[stream][start : start + self._seq_len + 1]
    row = np.zeros(self._seq_len + 1, np.int32)
    row[: len(inside)] = inside
    return {"tokens": row} | ({"mask": np.arange(len(row)) < len(inside)} if self._padded else {})


class TokenRows(Windows):
  """Rows of mapped files, whose numbers are checked when they are read."""

  def __init__(
    self, streams: Sequence[np.ndarray], seq_len: int, vocab_size: int, files: Sequence[pathlib.Path]
  ):
    super().__init__(streams, seq_len)
    self._vocab_size, self._files = vocab_size, files

  def __getitem__(self, index: int) -> dict[str, np.ndarray]:
    row = super().__getitem__(index)
    numbers = row["tokens"].view(np.uint32)  # as in the file
    if (wrong := numbers >= self._vocab_size).any():
      at = int(np.argmax(wrong))
      file, start = self.place(index)
      raise DataError(
        f"{self._files[file]}: token {start + at} is {numbers[at]}: expected less than "
        f"data.vocab_size={self._vocab_size}; is data.dtype right?"
      )
    return row

  def sample(self) -> bytes:
    """Returns a digest of the number of rows and of some rows; reads only a small part of large files."""
    digest = hashlib.blake2b(repr(len(self)).encode(), digest_size=16)
    for index in np.unique(np.linspace(0, len(self) - 1, _SAMPLED).astype(int)):
      digest.update(self[int(index)]["tokens"].tobytes())
    return digest.digest()


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
  """
  splits = [list(split.values()) for split in documents]
  if len(splits) == 1 and len(splits[0]) == 1:
    [[text]] = splits
    cut = len(text) - round(len(text) * valid_fraction)
    splits = [[text[:cut]], [text[cut:]]]
  elif len(splits) == 1:
    splits = _split_by_name(documents[0], valid_fraction)
  if packed:
    splits = [[b"\0".join(split)] for split in splits]
  streams = [[np.frombuffer(text, np.uint8) for text in split] for split in splits]
  facts = {"vocab_size": 256, "bytes_per_token": 1}
  return streams_to_rows(streams, title, "bytes", seq_len, facts, packed=packed)


def streams_to_rows(
  splits: Sequence[Sequence[np.ndarray]],
  title: str,
  units: str,
  seq_len: int,
  facts: Mapping[str, Any],
  *,
  packed: bool,
) -> Loaded:
  """Cuts the streams of the training split and of the one held out into windows of `seq_len` to predict.

  `units` says what a token is, `facts` are further facts about the data. `packed`: as for documents.
  """
  sizes = [sum(map(len, split)) for split in splits]
  digest = hashlib.blake2b(repr((seq_len, sizes)).encode(), digest_size=8)
  lengths = [np.array([len(tokens) for tokens in split], np.int64) for split in splits if not packed]
  for tokens in (*splits[0], *splits[1], *lengths):
    digest.update(np.ascontiguousarray(tokens).data)
  facts = {
    **facts,
    "seq_len": seq_len,
    "fingerprint": digest.hexdigest(),
    "description": f"{title}: {sizes[0]:,} {units} to train on, {sizes[1]:,} held out",
  }
  train, held_out = (Windows(streams, seq_len, padded=not packed) for streams in splits)
  return train, held_out, facts


def _split_by_name(documents: Mapping[str, bytes], fraction: float) -> list[list[bytes]]:
  """Returns documents to train on and to hold out, at least one each; a hash of the name chooses them."""
  order = sorted(documents, key=lambda name: hashlib.sha256(os.fsencode(name)).digest())
  held_out = set(order[: min(max(1, round(len(order) * fraction)), len(order) - 1)])
  return [[text for name, text in documents.items() if (name in held_out) == part] for part in (False, True)]


def _head(file: pathlib.Path) -> bytes:
  with file.open("rb") as stream:
    return stream.read(1024)


def _has_text(file: pathlib.Path) -> bool:
  head = _head(file)
  return bool(head) and b"\0" not in head


def _map(file: pathlib.Path, dtype: np.dtype, skip_bytes: int) -> np.ndarray:
  if _head(file).startswith(b"\x93NUMPY"):
    raise DataError(f"{file} is an array of NumPy: expected raw numbers, as array.tofile(path) writes them")
  try:
    return np.memmap(file, dtype, mode="r", offset=skip_bytes)
  except (ValueError, OverflowError) as error:  # it is empty or cut off, or all is skipped
    said = f"data.dtype={dtype.name} and data.skip_bytes={skip_bytes}"
    raise DataError(f"{file} cannot be read with {said}: {error}") from error
