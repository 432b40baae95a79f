"""Bytes of text files as windows of tokens: the standard library's source, or the user's own files."""

from __future__ import annotations

import glob
import hashlib
import itertools
import pathlib
import sysconfig
from collections.abc import Iterable
from typing import Any

import numpy as np

from mpjax.train.data.dataset import Batch, Data, DataError, DataInfo, make_data

_SEPARATOR = b"\0"
_NOT_OURS = {"site-packages", "dist-packages", "__pycache__"}


def load_stdlib(spec: Any, seed: int) -> Data:
  """The `*.py` files of the running Python's standard library, split by file."""
  root = pathlib.Path(sysconfig.get_path("stdlib"))
  files = (path.relative_to(root) for path in root.rglob("*.py"))
  names = sorted(path.as_posix() for path in files if not _NOT_OURS & set(path.parts))
  documents = {name: (root / name).read_bytes() for name in names}
  return documents_to_data(documents, "Python standard library source", spec, seed)


def load_text(spec: Any, seed: int) -> Data:
  """A file, a folder (every file in it that is text), a glob, or a list of these, as bytes.

  Files are text when their first kilobyte has no zero byte; hidden ones are left out. Several files are
  split by file, a single one by position.
  """
  if spec.path is None:
    raise DataError("data.path: missing; expected a text file, a folder, a glob or a list of these")
  paths = [spec.path] if isinstance(spec.path, str) else list(spec.path)
  documents: dict[str, bytes] = {}
  for path in paths:
    found = dict(_read(path))
    if not found:
      raise DataError(f"data.path={path!r}: no text files there")
    documents |= {name if len(paths) == 1 else f"{path}:{name}": text for name, text in found.items()}
  return documents_to_data(documents, ", ".join(paths), spec, seed)


def documents_to_data(
  documents: dict[str, bytes], title: str, spec: Any, seed: int, held_out_prefix: str | None = None
) -> Data:
  """Splits documents and cuts each split into windows of bytes.

  What is held out are the documents whose name has the prefix, or a share of all chosen by name, or, of a
  single document, its end.

  Raises:
    DataError: if a split is empty or shorter than a window.
  """
  if held_out_prefix is not None:
    held_out = {name: text for name, text in documents.items() if name.startswith(held_out_prefix)}
    train = {name: text for name, text in documents.items() if name not in held_out}
  elif len(documents) == 1:
    ((name, text),) = documents.items()
    cut = len(text) - round(len(text) * spec.valid_fraction)
    train, held_out = {name: text[:cut]}, {name: text[cut:]}
  else:
    train, held_out = split_by_name(documents, spec.valid_fraction)
  splits = [np.frombuffer(_SEPARATOR.join(split.values()), np.uint8) for split in (train, held_out)]
  for name, data in zip(("training", "evaluation"), splits, strict=True):
    if len(data) <= spec.seq_len:
      raise DataError(
        f"data.seq_len={spec.seq_len}: longer than the {len(data)} bytes of the {name} split of {title}; "
        "use a smaller seq_len, more text or another valid_fraction"
      )
  counts = [(len(data) - 1) // spec.seq_len for data in splits]
  digest = hashlib.blake2b(repr((spec.seq_len, [len(data) for data in splits])).encode(), digest_size=8)
  for data in splits:
    digest.update(data.tobytes())
  info = DataInfo(
    kind="tokens",
    vocab_size=256,
    seq_len=spec.seq_len,
    image_shape=None,
    num_classes=None,
    train_examples=counts[0],
    eval_examples=counts[1],
    fingerprint=digest.hexdigest(),
    description=f"{title}: {len(splits[0]) / 1e6:.1f} MB to train on, {len(splits[1]) / 1e6:.2f} MB held out",
  )
  return make_data(info, _windows(splits[0], spec.seq_len), _windows(splits[1], spec.seq_len), spec, seed)


def split_by_name(documents: dict[str, bytes], fraction: float) -> tuple[dict[str, bytes], dict[str, bytes]]:
  """(train, held out): about `fraction` of the documents, chosen by a hash of the name, at least one each."""
  order = sorted(documents, key=lambda name: hashlib.sha256(name.encode()).digest())
  count = min(max(1, round(len(order) * fraction)), len(order) - 1)
  held_out = set(order[:count])
  part = lambda inside: {n: text for n, text in documents.items() if (n in held_out) == inside}
  return part(False), part(True)


def _windows(data: np.ndarray, seq_len: int) -> Any:
  def row(index: int) -> Batch:
    start = index * seq_len
    return {"tokens": data[start : start + seq_len + 1].astype(np.int32)}

  return row


def _read(path: str) -> Iterable[tuple[str, bytes]]:
  """(name, content) of the text files at a path, sorted by name."""
  root = pathlib.Path(path)
  if root.is_file():
    return [(root.name, _content(root))]
  if root.is_dir():
    files = [file for file in root.rglob("*") if not _hidden(file.relative_to(root))]
    base = root
  else:
    files = [pathlib.Path(name) for name in glob.glob(path, recursive=True)]
    if not files:
      raise DataError(f"data.path={path!r}: no such file, folder or match")
    # Names relative to the part of the pattern before its first wildcard: not to where the data lies.
    fixed = itertools.takewhile(lambda part: not glob.has_magic(part), root.parts)
    base = pathlib.Path(*fixed)
  named = {file.relative_to(base).as_posix(): _content(file) for file in files if file.is_file()}
  return sorted((name, text) for name, text in named.items() if text and b"\0" not in text[:1024])


def _content(file: pathlib.Path) -> bytes:
  try:
    return file.read_bytes()
  except OSError as error:
    raise DataError(f"data.path: cannot read {file}: {error.strerror}") from error


def _hidden(path: pathlib.Path) -> bool:
  return any(part.startswith(".") for part in path.parts)
