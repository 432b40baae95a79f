"""Rows of the fault table about data: arrays, texts and token numbers that are not what they should be."""

from __future__ import annotations

import io
import os
import pathlib
import shutil
import zipfile
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from benchmarks.chaos._trial import Case, Prepared, Row, Trial, bound_by_permissions, each, says

_STEPS: tuple[str, ...] = (
  "train.steps=2",
  "train.log_every=1",
  "train.eval_every=2",
  "train.checkpoint_every=2",
)
_STEPS += (
  "policy=bf16",
  "data.batch_size=4",
  "data.eval_batches=1",
  "model.layers=1",
  "model.dim=16",
  "model.heads=2",
)


_NPZ = ("data.kind=npz", "data.path=a.npz", "data.valid_fraction=0.25")


def rows(prepared: Prepared) -> list[Row]:
  """Returns the rows about data."""
  line = "trains, or 2 in one line; no traceback, no abort"
  return [
    Row("arrays of images and labels (`npz`)", line, _arrays() | _archives()),
    Row("texts", f"{line}; nothing is left out in silence", _texts()),
    Row("token numbers", line, _tokens()),
  ]


def _train(trial: Trial, config: str, *data: str, refused: bool | None = False, **options: Any) -> str:
  words = [*_STEPS, *data, f"out={trial.out}"]
  allowed = {True: (2,), False: (0,), None: (0, 2)}[refused]
  status, said = trial.command("train", config, *words, statuses=allowed, **options)
  if status == 2:
    says(said.partition("error: ")[2], "data", "labels", "images", "npz", "larger than memory")
  return "trained" if status == 0 else "refused in one line"


def _good() -> dict[str, np.ndarray]:
  rng = np.random.default_rng(0)
  images, labels = rng.normal(size=(64, 8, 8, 1)).astype(np.float32), np.arange(64) % 10
  return {"images": images, "labels": labels}


def _arrays() -> dict[str, Case]:
  good = _good()
  images, labels = good["images"], good["labels"]
  evaluated = lambda images, labels: {"eval_images": images, "eval_labels": labels}
  with_value = lambda array, value: np.where(np.arange(array.size).reshape(array.shape) == 7, value, array)
  # What takes the place of arrays, and whether that has to be refused.
  changes: dict[str, tuple[Mapping[str, Any], bool | None]] = {
    "as they should be": ({}, False),
    "with some to evaluate": (evaluated(images[:16], labels[:16]), False),
    **{f"without {name}": ({name: None}, True) for name in good},
    "without labels to evaluate": ({"eval_images": images[:16]}, True),
    "without images to evaluate": ({"eval_labels": labels[:16]}, True),
    "no rows": ({"images": images[:0], "labels": labels[:0]}, True),
    "one row": ({"images": images[:1], "labels": labels[:1]}, None),
    "fewer labels than images": ({"labels": labels[:60]}, True),
    "more labels than images": ({"labels": np.append(labels, 1)}, True),
    "no rows to evaluate": (evaluated(images[:0], labels[:0]), None),
    "other images to evaluate": (evaluated(images[:16, :4], labels[:16]), True),
    "images of two dimensions": ({"images": images[:, :, 0, 0]}, True),
    "images of three dimensions": ({"images": images[..., 0]}, None),
    "images of five dimensions": ({"images": images[..., None]}, True),
    "an image": ({"images": images[0]}, True),
    "a number for images": ({"images": np.float32(1)}, True),
    "images without pixels": ({"images": images[:, :0]}, True),
    "images in bytes": ({"images": (images * 50 + 128).clip(0, 255).astype(np.uint8)}, False),
    "images in float64": ({"images": images.astype(np.float64)}, False),
    "images in float16": ({"images": images.astype(np.float16)}, False),
    "images in big-endian": ({"images": images.astype(">f4")}, False),
    "images in columns": ({"images": np.asfortranarray(images)}, False),
    "images in int64": ({"images": images.astype(np.int64)}, None),
    "images in bool": ({"images": images > 0}, None),
    "images in complex": ({"images": images.astype(complex)}, True),
    "images of text": ({"images": images.astype(str)}, True),
    "images of objects": ({"images": images.astype(object)}, True),
    "a NaN in images": ({"images": with_value(images, np.nan)}, None),
    "an infinity in images": ({"images": with_value(images, np.inf)}, None),
    "images of 1e38": ({"images": images * np.float32(1e37)}, None),
    "labels in float": ({"labels": labels + 0.5}, True),
    "labels in bool": ({"labels": labels > 4}, None),
    "labels of text": ({"labels": labels.astype(str)}, True),
    "labels in int8": ({"labels": labels.astype(np.int8)}, False),
    "labels in uint64": ({"labels": labels.astype(np.uint64)}, False),
    "labels of two dimensions": ({"labels": labels[:, None]}, None),
    "labels of objects": ({"labels": labels.astype(object)}, True),
    "a date for a label": ({"labels": labels.astype("datetime64[s]")}, True),
    **{
      f"label {x}": ({"labels": with_value(labels, x)}, True) for x in (-1, 50_000_000, 2**31 - 1, 2**63 - 1)
    },
    "eval label 2147483647": (evaluated(images[:16], with_value(labels[:16], 2**31 - 1)), True),
  }

  def tried(trial: Trial, change: Mapping[str, Any], refused: bool | None) -> str:
    arrays = {name: x for name, x in (good | dict(change)).items() if x is not None}
    np.savez(trial.folder / "a.npz", **arrays)
    return _train(trial, "vit_digits", *_NPZ, refused=refused)

  return each(tried, changes)


def _archives() -> dict[str, Case]:
  def good() -> bytes:
    file = io.BytesIO()
    np.savez(file, allow_pickle=False, **_good())
    return file.getvalue()

  def with_code() -> bytes:
    file = io.BytesIO(good())
    with zipfile.ZipFile(file, "a") as archive:
      archive.writestr("../../escaped.npy", b"x")
    return file.getvalue()

  contents: dict[str, Callable[[], bytes]] = {
    "an empty file": lambda: b"",
    "half a file": lambda: good()[: len(good()) // 2],
    "a file without its end": lambda: good()[:-30],
    "a flipped bit": lambda: good()[:3000] + bytes([good()[3000] ^ 1]) + good()[3001:],
    "a text": lambda: b"images, labels\n",
    "a pickle": lambda: b"\x80\x04\x95\x05\x00\x00\x00\x00\x00\x00\x00\x8c\x01x\x94.",
    "zeros": lambda: bytes(5000),
  }

  def tried(trial: Trial, make: Callable[[], bytes]) -> str:
    (trial.folder / "a.npz").write_bytes(make())
    return _train(trial, "vit_digits", *_NPZ, refused=True)

  def entry_outside(trial: Trial) -> str:
    (trial.folder / "a.npz").write_bytes(with_code())
    return _train(trial, "vit_digits", *_NPZ)

  def path(trial: Trial, place: str) -> str:
    return _train(trial, "vit_digits", *_NPZ, f"data.path={place}", refused=True)

  return {
    **each(tried, {name: (make,) for name, make in contents.items()}),
    "an entry outside the folder": entry_outside,
    **each(path, {f"path {place!r}": (place,) for place in ("/", "/nowhere", "/dev/null", "")}),
  }


def _texts() -> dict[str, Case]:
  def tried(trial: Trial, make: Callable[[pathlib.Path], object], refused: bool | None) -> str:
    text = pathlib.Path(shutil.copytree(trial.prepared.finished.parent / "text", trial.folder / "text"))
    make(text)
    words = ("data.kind=text", f"data.path={text}", "data.seq_len=16")
    try:
      return _train(trial, "gpt_stdlib", *words, refused=refused, before=bound_by_permissions)
    finally:
      if (text / "closed").exists():
        (text / "closed").chmod(0o755)

  def closed(mode: int, file: bool) -> Callable[[pathlib.Path], object]:
    def make(text: pathlib.Path) -> None:
      there = text / "closed"
      if file:
        there.write_text("x" * 900)
      else:
        there.mkdir()
        (there / "a.txt").write_text("y" * 900)
      there.chmod(mode)

    return make

  def emptied(text: pathlib.Path) -> None:
    for file in text.iterdir():
      file.unlink()

  def sparse(text: pathlib.Path) -> None:
    with (text / "0.txt").open("r+b") as file:
      file.truncate(200 << 30)

  makes: dict[str, tuple[Callable[[pathlib.Path], object], bool | None]] = {
    "a folder that cannot be read": (closed(0o000, False), True),
    "a folder that can be listed alone": (closed(0o444, False), True),
    "a file that cannot be read": (closed(0o000, True), True),
    "an empty folder": (emptied, True),
    "an empty file beside others": (lambda text: (text / "e.txt").write_text(""), False),
    "a file of 200 GB": (sparse, True),
    "bytes that are no text": (lambda text: (text / "b.txt").write_bytes(bytes(range(256)) * 9), None),
    "a dangling link": (lambda text: (text / "l.txt").symlink_to("/nowhere"), None),
    "a link to itself": (lambda text: (text / "l.txt").symlink_to(text / "l.txt"), None),
    "a link to the folder": (lambda text: (text / "l").symlink_to(text), None),
    "a name that is not UTF-8": (lambda text: (text / os.fsdecode(b"\xff.txt")).write_text("x" * 90), None),
    "a named pipe": (lambda text: os.mkfifo(text / "p.txt"), None),
  }

  def path(trial: Trial, place: str) -> str:
    (trial.folder / "tiny.txt").write_text("abc")
    words = ["data.kind=text", f"data.path={place}", "data.seq_len=16"]
    return _train(trial, "gpt_stdlib", *words, refused=True)

  paths: tuple[str, ...] = (
    "/nowhere",
    "/proc/1",
    "nothing/*.txt",
    "[/nowhere]",
    "tiny.txt",
    "''",
    "/dev/null",
    "[]",
  )
  paths += ("a" * 300, "/dev/zero")
  return {
    **each(tried, makes),
    **each(path, {f"path {place[:30]!r}": (place,) for place in paths}),
  }


def _tokens() -> dict[str, Case]:
  good = (np.arange(4000) % 50).astype("<u2")
  keys = ("data.kind=tokens", "data.vocab_size=50", "data.seq_len=16")

  def tried(trial: Trial, content: bytes | np.ndarray, words: tuple[str, ...], refused: bool | None) -> str:
    (trial.folder / "a.bin").write_bytes(bytes(content))
    return _train(trial, "gpt_stdlib", *keys, "data.path=a.bin", *words, refused=refused)

  too_large = lambda at: np.where(np.arange(good.size) == at, 900, good).astype("<u2")
  cases: dict[str, tuple[bytes | np.ndarray, tuple[str, ...], bool | None]] = {
    "as they should be": (good, (), False),
    "an empty file": (b"", (), True),
    "an odd number of bytes": (bytes(good)[:-1], (), True),
    "fewer than a row": (good[:9], (), True),
    "a number beyond the vocabulary, first": (too_large(0), (), True),
    "a number beyond the vocabulary, last": (too_large(3999), (), None),
    "32-bit numbers": (good.astype("<u4"), ("data.dtype=uint32",), False),
    "32-bit numbers that are negative": (good.astype("<i4") - 9, ("data.dtype=uint32",), True),
    "another dtype": (good, ("data.dtype=float32",), True),
    "a vocabulary of none": (good, ("data.vocab_size=0",), True),
    "a vocabulary of 2^40": (good, (f"data.vocab_size={2**40}",), True),
    "more to skip than there is": (good, ("data.skip_bytes=99999",), True),
    "less than nothing to skip": (good, ("data.skip_bytes=-2",), True),
    "an odd number to skip": (good, ("data.skip_bytes=3",), True),
    "no file to evaluate": (good, ("data.eval_path=/nowhere",), True),
    "a folder to evaluate": (good, ("data.eval_path=/",), True),
    "no path": (good, ("data.path=null",), True),
  }
  return each(tried, cases)
