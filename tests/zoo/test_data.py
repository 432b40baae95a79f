"""Datasets: what is read, how it is split, the order of batches, exact resume, and bad data."""

import os
import sys

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from mpjax.train import DataError
from tests.train._runs import raises_one_line
from tests.zoo._datasets import IMAGES, LABELS, letters, load


@pytest.fixture
def corpus(tmp_path):
  """Twenty files, two of them not text or hidden, with every byte telling of its file."""
  for i in range(20):
    file = tmp_path / "corpus" / f"part{i % 3}" / f"{i}.txt"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(bytes([65 + i]) * 50)
  (tmp_path / "corpus" / "image.bin").write_bytes(b"\0\1\2" * 50)
  (tmp_path / "corpus" / ".hidden.txt").write_bytes(b"~" * 50)
  return tmp_path / "corpus"


def split_letters(path):
  """The letters to train on and those held out, none of which is among both."""
  data = load("text", path=path, seq_len=2)
  train, held_out = letters(data, "train"), letters(data, "eval")
  assert train.isdisjoint(held_out), path
  return train, held_out


def test_text_is_split_by_file_whatever_paths_lead_to_it(corpus):
  parts = [str(corpus / f"part{i}") for i in range(3)]
  for path in [
    str(corpus),
    f"{corpus}/**/*.txt",
    parts,
    [f"{corpus}/part0/*.txt", str(corpus / "part1"), f"{corpus}/part2/"],
    [str(corpus), f"{corpus}/part0/../part1"],
  ]:
    train, held_out = split_letters(path)
    assert train | held_out == set(range(65, 85)), path
    assert len(held_out) == 5, path
  os.rename(corpus / "part0" / "0.txt", os.fsencode(corpus / "part0") + b"/\xff.txt")  # no UTF-8
  train, held_out = split_letters(str(corpus))
  assert train | held_out == set(range(65, 85))
  for i in range(20):  # a link to a file is the file
    (corpus / f"link{i}.txt").symlink_to(corpus / f"part{i % 3}" / f"{i}.txt")
  split_letters(str(corpus))
  assert load("text", path=str(corpus)).info.vocab_size == 256


def test_a_binary_file_is_read_where_it_is_named(corpus):
  with pytest.raises(DataError, match="no text files"):
    load("text", path=f"{corpus}/*.bin")
  for path in (str(corpus / "image.bin"), [str(corpus), str(corpus / "image.bin")]):
    data = load("text", path=path, seq_len=2)
    assert {1, 2} <= letters(data, "train") | letters(data, "eval")


@settings(max_examples=40, deadline=None)
@given(
  lengths=st.lists(st.integers(1, 60), min_size=1, max_size=8),
  seq_len=st.integers(1, 12),
  fraction=st.floats(0.1, 0.9),
)
def test_every_window_lies_where_it_should(tmp_path_factory, lengths, seq_len, fraction):
  """Of one file, whose end is held out, and of several."""
  folder = tmp_path_factory.mktemp("files")
  contents = [bytes([65 + i]) * (length + 20 * seq_len) for i, length in enumerate(lengths)]
  for i, content in enumerate(contents):
    (folder / f"{i}.txt").write_bytes(content)
  data = load("text", path=str(folder), seq_len=seq_len, batch_size=1, valid_fraction=fraction)
  splits = {"train": data.train_rows, "eval": data.eval_rows}
  members = {name: letters(data, name) for name in splits}
  for name, rows in splits.items():
    whole = b"\0".join(content for content in contents if content[0] in members[name])
    if len(contents) == 1:
      cut = len(whole) - round(len(whole) * fraction)
      whole = whole[:cut] if name == "train" else whole[cut:]
    assert len(rows) == (len(whole) - 1) // seq_len
    for i in range(len(rows)):
      assert bytes(rows[i]["tokens"].tolist()) == whole[i * seq_len : (i + 1) * seq_len + 1]
  if len(contents) > 1:
    assert members["train"].isdisjoint(members["eval"])
  assert members["train"] | members["eval"] == {content[0] for content in contents}


def test_installed_packages_are_not_the_standard_library(tmp_path, monkeypatch):
  for i in range(8):
    (tmp_path / f"{i}.py").write_bytes(bytes([65 + i]) * 40)
  for folder in ("site-packages/pkg", "dist-packages", "__pycache__", "test/site-packages"):
    (tmp_path / folder).mkdir(parents=True)
    (tmp_path / folder / "a.py").write_bytes(b"~" * 40)
  (tmp_path / "notes.txt").write_bytes(b"~" * 40)
  monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
  data = load("stdlib", seq_len=2)
  train, held_out = letters(data, "train"), letters(data, "eval")
  assert (train | held_out, train & held_out) == (set(range(65, 73)), set())


def test_the_standard_library_is_there_without_a_download():
  data = load("stdlib", seq_len=128, batch_size=16, valid_fraction=0.05, eval_batches=3)
  assert data.info.train_examples * 128 > 5e6
  assert 0.005 < data.info.eval_examples / data.info.train_examples < 0.2
  batch = next(data.train())["tokens"]
  assert (batch.shape, batch.dtype) == ((16, 129), np.int32)
  assert len(list(data.eval())) == 3


def test_split_and_fingerprint_follow_the_content_and_not_the_place(corpus, tmp_path):
  lists = [["part0", "part1"], ["part0/*.txt", "part2/*"], ["part1", "part0/0.txt"], [""]]
  loaded = lambda root: [load("text", path=[f"{root}/{path}" for path in paths]) for paths in lists]
  before = loaded(corpus)
  assert load("text", path=[f"{corpus}/"], seq_len=9).info.fingerprint != before[-1].info.fingerprint
  elsewhere = corpus.rename(tmp_path / "elsewhere")
  for paths, old, new in zip(lists, before, loaded(elsewhere), strict=True):
    assert new.info.fingerprint == old.info.fingerprint, paths
    assert letters(new, "eval") == letters(old, "eval"), paths
  file = elsewhere / "part0" / "0.txt"
  file.write_bytes(b"B" + file.read_bytes()[1:])
  assert loaded(elsewhere)[-1].info.fingerprint != before[-1].info.fingerprint


def test_digits_are_standardised_and_split_the_same_way_always():
  one, other = load("digits", batch_size=64), load("digits", batch_size=64, seed=5)
  assert one.info.image_shape == (8, 8, 1)
  assert one.info.num_classes == 10
  assert one.info.train_examples + one.info.eval_examples == 1797
  images = np.stack([one.train_rows[i]["images"] for i in range(one.info.train_examples)])
  np.testing.assert_allclose([images.mean(), images.std()], [0, 1], atol=1e-3)
  batch = next(one.train())
  assert (batch["images"].dtype, batch["labels"].dtype) == (np.float32, np.int32)
  for a, b in zip(one.eval(), other.eval(), strict=True):
    np.testing.assert_array_equal(a["images"], b["images"])


def save(tmp_path, **arrays):
  path = tmp_path / "data.npz"
  np.savez(path, **arrays)
  return str(path)


def test_arrays_of_the_users_own(tmp_path):
  for channels, dtype in [(None, np.uint8), (1, np.float32), (3, np.float64)]:
    images = IMAGES if channels is None else np.repeat(IMAGES[..., None], channels, -1)
    data = load("npz", path=save(tmp_path, images=images.astype(dtype), labels=LABELS))
    assert (data.info.image_shape, data.info.num_classes) == ((6, 6, channels or 1), 3)
    assert (data.info.train_examples, data.info.eval_examples) == (30, 10)
    batch = next(data.train())["images"]
    assert (batch.shape, batch.dtype) == ((4, 6, 6, channels or 1), np.float32)
  path = save(tmp_path, images=IMAGES, labels=LABELS, eval_images=IMAGES[:8] + 1, eval_labels=LABELS[:8])
  data = load("npz", path=path)
  assert (data.info.train_examples, data.info.eval_examples) == (40, 8)


BOTH = {"images": IMAGES, "labels": LABELS}
UNFIT = [
  ({"images": IMAGES}, ["'labels'", "images"]),
  ({"pictures": IMAGES, "labels": LABELS}, ["'images'", "pictures"]),
  (BOTH | {"images": np.where(IMAGES, IMAGES, np.nan)}, ["images are float32[6, 6]", "finite"]),
  (BOTH | {"images": IMAGES[0]}, ["labels are int64[40]", "each of 6 images"]),
  (BOTH | {"labels": LABELS[:7]}, ["40", "7"]),
  (BOTH | {"labels": LABELS.astype(float)}, ["labels are float64", "an integer for each of 40 images"]),
  (BOTH | {"labels": LABELS - 1}, ["labels are -1 to 1", "from 0"]),
  (BOTH | {"eval_images": IMAGES}, ["'eval_labels'"]),
  (BOTH | {"eval_images": IMAGES[:, :5], "eval_labels": LABELS}, ["eval_images", "[5, 6]", "[6, 6]"]),
  (BOTH | {"images": np.asarray(["a"] * 40)}, ["images are <U1[]", "[height, width]"]),
  (BOTH | {"eval_images": IMAGES / 255, "eval_labels": LABELS}, ["eval_images are float32", "images uint8"]),
  (BOTH | {"eval_images": IMAGES, "eval_labels": LABELS - 1}, ["eval_labels: labels are -1 to 1"]),
  (
    BOTH | {"labels": np.where(LABELS == 1, 50_000_000, LABELS)},
    ["labels are 0 to 50000000", "below 1024 (data.num_classes)"],
  ),
  ({"images": IMAGES[:0], "labels": LABELS[:0]}, ["0 images to train on", "expected some"]),
  ({"images": IMAGES[:1], "labels": LABELS[:1]}, ["0 images to train on, 1 held out"]),
  (BOTH | {"images": IMAGES[:, :0]}, ["images are", "[0, 6]"]),
  (BOTH | {"images": IMAGES * 1e300}, ["images are float32[6, 6]", "finite"]),
]


def test_unfit_arrays_are_named(tmp_path):
  for arrays, words in UNFIT:
    raises_one_line(DataError, words, load, "npz", path=save(tmp_path, **arrays))


def test_labels_are_below_the_number_of_classes_that_is_given(tmp_path):
  path = save(tmp_path, images=IMAGES, labels=LABELS)
  assert load("npz", path=path, num_classes=5000).info.num_classes == 5000
  assert load("npz", path=path).info.num_classes == 3
  words = ["labels are 0 to 2: ", "below 2"]
  raises_one_line(DataError, words, load, "npz", path=path, num_classes=2)


def test_a_folder_that_cannot_be_entered_is_named(corpus, monkeypatch):
  denied = PermissionError(13, "Permission denied", str(corpus / "part1"))
  scan = os.scandir

  def refuse(path):
    if "part1" in str(path):
      raise denied
    return scan(path)

  monkeypatch.setattr(os, "scandir", refuse)
  with pytest.raises(DataError, match=r"part1.*: Permission denied"):
    load("text", path=str(corpus))


UNREADABLE = [
  ("text", {"path": ""}, ["data.path=''", "no such file"]),
  ("text", {"path": "CORPUS/../blank.txt"}, ["data.seq_len=8", "0 tokens"]),
  ("text", {"path": "/no/such/file"}, ["/no/such/file"]),
  ("text", {"path": "CORPUS/../empty"}, ["no text files"]),
  ("text", {"path": "CORPUS", "seq_len": 10_000}, ["data.seq_len=10000", "tokens"]),
  ("text", {"path": "CORPUS", "batch_size": 10_000}, ["batch_size=10000", "rows"]),
  ("npz", {"path": "/no/such.npz"}, ["/no/such.npz"]),
  ("npz", {"path": "CORPUS/part0/0.txt"}, ["not a readable .npz"]),
  ("huggingface", {"path": "x", "text_column": "t"}, ["pip install datasets"]),
]


def test_what_cannot_be_read_is_named(corpus, tmp_path, monkeypatch):
  monkeypatch.setitem(sys.modules, "datasets", None)
  (tmp_path / "empty").mkdir()
  (tmp_path / "blank.txt").touch()
  for kind, options, words in UNREADABLE:
    if isinstance(options.get("path"), str):
      options = options | {"path": options["path"].replace("CORPUS", str(corpus))}
    raises_one_line(DataError, words, load, kind, **options)
