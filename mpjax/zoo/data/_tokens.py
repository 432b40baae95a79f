"""Memory-mapped files of token numbers that another program made from text."""

from __future__ import annotations

import copy
import hashlib
import pathlib
from collections.abc import Sequence
from typing import Literal

import numpy as np

from mpjax.registry._kinds import Natural, Positive, register_data
from mpjax.registry._names import DataError
from mpjax.zoo.data._text import Loaded, Share, find_files

# Rows that are read before a run, for the fingerprint and to find numbers outside the vocabulary.
_SAMPLED = 256
_NUMPY_FILE = b"\x93NUMPY"


@register_data("tokens")
def load_tokens(
  *,
  path: str | list[str],
  vocab_size: Positive,
  eval_path: str | list[str] | None = None,
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
  if numbers.itemsize == 2 and vocab_size > 1 << 16:
    raise DataError(f"data.dtype=uint16: data.vocab_size={vocab_size} needs uint32")
  rows = TokenRows(_files(path, "path"), numbers, vocab_size, seq_len, skip_bytes)
  if eval_path is not None:
    train = rows
    held_out = TokenRows(_files(eval_path, "eval_path"), numbers, vocab_size, seq_len, skip_bytes)
  else:
    count = len(rows) - max(1, round(len(rows) * valid_fraction))
    if len(rows) < 2:
      raise DataError(f"data.path={path!r}: {len(rows)} rows of {seq_len} tokens: expected at least two")
    train, held_out = rows.part(0, count), rows.part(count, len(rows))
  digest = hashlib.blake2b(repr((seq_len, vocab_size)).encode(), digest_size=8)
  for split in (train, held_out):
    digest.update(split.sample())
  facts = {
    "vocab_size": vocab_size,
    "seq_len": seq_len,
    "fingerprint": digest.hexdigest(),
    "description": f"{_named(path)}: {len(train) * seq_len:,} tokens of {vocab_size:,} to train on, "
    f"{len(held_out) * seq_len:,} held out",
  }
  return train, held_out, facts


class TokenRows:
  """Rows of `seq_len + 1` tokens from mapped files; the last token of a row is the first of the next row."""

  def __init__(
    self, files: Sequence[pathlib.Path], dtype: np.dtype, vocab_size: int, seq_len: int, skip_bytes: int
  ):
    self._files, self._vocab_size, self._seq_len = list(files), vocab_size, seq_len
    self._tokens = [_map(file, dtype, skip_bytes) for file in files]
    counts = [max(0, (len(tokens) - 1) // seq_len) for tokens in self._tokens]
    self._ends = np.cumsum(counts)
    if not self._ends[-1]:
      longest = max(map(len, self._tokens))
      raise DataError(
        f"data.seq_len={seq_len}: longer than the {longest} tokens of {_named(list(map(str, files)))}"
      )
    self._rows = range(int(self._ends[-1]))

  def part(self, first: int, last: int) -> TokenRows:
    """Returns the rows from `first` up to, not including, `last`, from the same maps."""
    some = copy.copy(self)
    some._rows = self._rows[first:last]
    return some

  def __len__(self) -> int:
    return len(self._rows)

  def __getitem__(self, index: int) -> dict[str, np.ndarray]:
    row = self._rows[index]
    file = int(np.searchsorted(self._ends, row, side="right"))
    start = (row - (int(self._ends[file - 1]) if file else 0)) * self._seq_len
    tokens = np.asarray(self._tokens[file][start : start + self._seq_len + 1])
    if tokens.max() >= self._vocab_size:
      at = int(np.argmax(tokens >= self._vocab_size))
      raise DataError(
        f"{self._files[file]}: token {start + at} is {tokens[at]}: expected less than "
        f"data.vocab_size={self._vocab_size}; is data.dtype right?"
      )
    return {"tokens": tokens.astype(np.int32)}

  def sample(self) -> bytes:
    """Returns a digest of the number of rows and of some rows; reads only a small part of large files."""
    digest = hashlib.blake2b(repr(len(self)).encode(), digest_size=16)
    for index in np.unique(np.linspace(0, len(self) - 1, _SAMPLED).astype(int)):
      digest.update(self[int(index)]["tokens"].tobytes())
    return digest.digest()


def _map(file: pathlib.Path, dtype: np.dtype, skip_bytes: int) -> np.ndarray:
  with file.open("rb") as stream:
    head = stream.read(len(_NUMPY_FILE))
  size = file.stat().st_size - skip_bytes
  if head == _NUMPY_FILE:
    raise DataError(f"{file} is an array of NumPy: expected raw numbers, as array.tofile(path) writes them")
  if size <= 0:
    raise DataError(f"{file} has no tokens: {size + skip_bytes} bytes, data.skip_bytes={skip_bytes}")
  if size % dtype.itemsize:
    raise DataError(
      f"{file}: {size} bytes are not a whole number of {dtype.name}: it is cut off, or data.dtype is wrong"
    )
  return np.memmap(file, dtype, mode="r", offset=skip_bytes)


def _files(path: str | list[str], key: str) -> list[pathlib.Path]:
  """Returns the files that a key names, each once."""
  paths = [path] if isinstance(path, str) else path
  found = [[file for _, file in find_files(each)] for each in paths]
  if not all(found) or not found:
    lacking = next((each for each, files in zip(paths, found, strict=True) if not files), path)
    raise DataError(
      f"data.{key}={lacking!r}: no such file; expected a file, a folder, a glob or a list of these"
    )
  return list(dict.fromkeys(file for files in found for file in files))


def _named(path: str | list[str]) -> str:
  return path if isinstance(path, str) else ", ".join(path)
