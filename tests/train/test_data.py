"""Datasets: what is read, how it is split, the order of batches, exact resume, and bad data."""

import json
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpjax.train.data import DataError, _text
from tests.train._datasets import IMAGES, LABELS, letters, load, spec


def take(iterator, count):
  return [next(iterator) for _ in range(count)]


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


def test_text_is_split_by_file(corpus):
  data = load("text", path=str(corpus))
  train, held_out = letters(data, "train"), letters(data, "eval")
  assert train.isdisjoint(held_out)
  assert len(held_out) == 5
  assert train | held_out <= set(range(65, 85))
  assert data.info.vocab_size == 256


@pytest.mark.parametrize("how", ["folder", "glob", "list"])
def test_files_are_named_by_folder_glob_or_list(corpus, how):
  path = {
    "folder": str(corpus),
    "glob": f"{corpus}/**/*.txt",
    "list": [str(corpus / f"part{i}") for i in range(3)],
  }[how]
  data = load("text", path=path)
  assert len(letters(data, "train") | letters(data, "eval")) >= 18


@pytest.mark.parametrize(
  "paths",
  [
    ["{corpus}", "{corpus}"],
    ["{corpus}", "{corpus}/**/*.txt"],
    ["{corpus}", "{corpus}/part0/../part1"],
    ["{corpus}/part0/0.txt", "{corpus}"],
  ],
)
def test_a_file_that_several_paths_lead_to_is_in_one_split(corpus, paths):
  data = load("text", path=[path.format(corpus=corpus) for path in paths], seq_len=2)
  train, held_out = letters(data, "train"), letters(data, "eval")
  assert train.isdisjoint(held_out)
  assert train | held_out == set(range(65, 85))


def test_a_link_to_a_file_is_the_file(corpus):
  for i in range(20):
    (corpus / f"link{i}.txt").symlink_to(corpus / f"part{i % 3}" / f"{i}.txt")
  data = load("text", path=str(corpus), seq_len=2)
  assert letters(data, "train").isdisjoint(letters(data, "eval"))


def test_a_binary_file_is_read_where_it_is_named(corpus):
  with pytest.raises(DataError, match="no text files"):
    load("text", path=f"{corpus}/*.bin")
  for path in (str(corpus / "image.bin"), [str(corpus), str(corpus / "image.bin")]):
    data = load("text", path=path, seq_len=2)
    assert {1, 2} <= letters(data, "train") | letters(data, "eval")


def test_a_large_file_is_mapped_and_its_rows_are_the_same(corpus, monkeypatch):
  file = corpus / "part0" / "0.txt"
  file.write_bytes(bytes(range(1, 200)) * 5)
  in_memory, folder = load("text", path=str(file)), load("text", path=str(corpus))
  monkeypatch.setattr(_text, "_MAPPED", 1)
  mapped = load("text", path=str(file))
  assert isinstance(_text._read(file), memoryview)
  assert mapped.info.fingerprint == in_memory.info.fingerprint
  rows = [take(data.train(range(4)), 3) for data in (mapped, in_memory)]
  np.testing.assert_equal(*rows)
  assert load("text", path=str(corpus)).info.fingerprint == folder.info.fingerprint


@settings(max_examples=30, deadline=None)
@given(
  lengths=st.lists(st.integers(1, 60), min_size=2, max_size=8),
  seq_len=st.integers(1, 12),
  fraction=st.floats(0.01, 0.9),
)
def test_every_window_of_several_files_lies_where_it_should(tmp_path_factory, lengths, seq_len, fraction):
  folder = tmp_path_factory.mktemp("files")
  contents = [bytes([65 + i]) * (length + seq_len) for i, length in enumerate(lengths)]
  for i, content in enumerate(contents):
    (folder / f"{i}.txt").write_bytes(content)
  data = load("text", path=str(folder), seq_len=seq_len, batch_size=1, valid_fraction=fraction)
  members = {split: letters(data, split) for split in ("train", "eval")}
  assert members["train"].isdisjoint(members["eval"])
  assert members["train"] | members["eval"] == {content[0] for content in contents}
  for split, inside in members.items():
    whole = b"\0".join(content for content in contents if content[0] in inside)
    assert getattr(data.info, f"{split}_examples") == (len(whole) - 1) // seq_len
    for i in range(getattr(data.info, f"{split}_examples")):
      row = getattr(data, f"{split}_rows")[i]["tokens"]
      assert bytes(row.tolist()) == whole[i * seq_len : (i + 1) * seq_len + 1]


@settings(max_examples=30, deadline=None)
@given(text=st.binary(min_size=60, max_size=300), seq_len=st.integers(1, 12))
def test_every_window_lies_where_it_should(tmp_path_factory, text, seq_len):
  file = tmp_path_factory.mktemp("text") / "a.txt"
  file.write_bytes(b"x" + text.replace(b"\0", b" "))
  content = np.frombuffer(file.read_bytes(), np.uint8)
  data = load("text", path=str(file), seq_len=seq_len, batch_size=1, valid_fraction=0.25)
  cut = len(content) - round(len(content) * 0.25)
  for split, part in (("train", content[:cut]), ("eval", content[cut:])):
    count = getattr(data.info, f"{split}_examples")
    assert count == (len(part) - 1) // seq_len
    for i in range(count):
      row = getattr(data, f"{split}_rows")[i]["tokens"]
      np.testing.assert_array_equal(row, part[i * seq_len : (i + 1) * seq_len + 1])


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


def test_an_epoch_has_every_row_once_and_the_next_another_order(corpus):
  data = load("text", path=str(corpus), batch_size=4)
  per_epoch = data.info.train_examples // 4
  batches = [b["tokens"].tobytes() for b in take(data.train(), 2 * per_epoch)]
  first, second = batches[:per_epoch], batches[per_epoch:]
  assert first != second
  rows = sorted(b["tokens"][i].tobytes() for b in take(data.train(), per_epoch) for i in range(4))
  every = sorted(data.train_rows[i]["tokens"].tobytes() for i in range(data.info.train_examples))
  missing = list(every)
  for row in rows:
    missing.remove(row)
  assert len(missing) == data.info.train_examples % 4


def test_the_seed_changes_the_order_and_not_the_split(corpus):
  one, same, other = (load("text", path=str(corpus), seed=seed) for seed in (0, 0, 1))
  batches = [np.stack([b["tokens"] for b in take(data.train(), 5)]) for data in (one, same, other)]
  np.testing.assert_array_equal(batches[0], batches[1])
  assert (batches[0] != batches[2]).any()
  assert letters(one, "eval") == letters(other, "eval")
  assert one.info == other.info


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("consumed", [0, 1, 7, 40])
def test_an_iterator_continues_from_its_state(corpus, consumed, workers):
  spec = {"path": str(corpus), "workers": workers}
  whole = load("text", **spec).train()
  take(whole, consumed)
  state = json.loads(json.dumps(whole.get_state()))
  expected = take(whole, 30)
  resumed = load("text", **spec).train()
  resumed.set_state(state)
  for a, b in zip(expected, take(resumed, 30), strict=True):
    np.testing.assert_array_equal(a["tokens"], b["tokens"])


@pytest.mark.slow
def test_an_iterator_continues_in_another_process(corpus):
  iterator = load("text", path=str(corpus)).train()
  take(iterator, 9)
  state = json.dumps(iterator.get_state())
  code = f"""
import json
from mpjax.train.data import DataConfig, load_data
spec = DataConfig(**{spec("text", path=str(corpus)).model_dump()!r})
iterator = load_data(spec, seed=0).train()
iterator.set_state(json.loads({state!r}))
print(json.dumps([next(iterator)["tokens"].tolist() for _ in range(12)]))
"""
  out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
  assert json.loads(out) == [batch["tokens"].tolist() for batch in take(iterator, 12)]


def test_the_order_and_the_state_do_not_depend_on_the_number_of_threads(corpus):
  one, other = (load("text", path=str(corpus), workers=workers).train() for workers in (0, 3))
  for a, b in zip(take(one, 25), take(other, 25), strict=True):
    np.testing.assert_array_equal(a["tokens"], b["tokens"])
  assert one.get_state() == other.get_state()


@pytest.mark.parametrize("eval_batches", [None, 1, 3, 1000])
def test_evaluation_is_the_first_whole_batches_at_every_call(corpus, eval_batches):
  data = load("text", path=str(corpus), batch_size=5, eval_batches=eval_batches)
  whole = data.info.eval_examples // 5
  first, second = list(data.eval()), list(data.eval())
  assert len(first) == len(second) == min(whole, eval_batches or whole)
  for i, (a, b) in enumerate(zip(first, second, strict=True)):
    expected = np.stack([data.eval_rows[5 * i + j]["tokens"] for j in range(5)])
    np.testing.assert_array_equal(a["tokens"], expected)
    np.testing.assert_array_equal(b["tokens"], expected)


@pytest.mark.parametrize("paths", [["part0", "part1"], ["part0/*.txt", "part2/*"], ["part1", "part0/0.txt"]])
def test_the_split_of_a_list_does_not_depend_on_the_place(corpus, tmp_path, paths):
  before = load("text", path=[f"{corpus}/{path}" for path in paths])
  corpus.rename(tmp_path / "elsewhere")
  after = load("text", path=[f"{tmp_path}/elsewhere/{path}" for path in paths])
  assert after.info.fingerprint == before.info.fingerprint
  assert letters(after, "eval") == letters(before, "eval")


def test_the_fingerprint_follows_the_content_and_not_the_place(corpus, tmp_path):
  before = load("text", path=str(corpus)).info.fingerprint
  assert load("text", path=str(corpus), seq_len=9).info.fingerprint != before
  corpus.rename(tmp_path / "elsewhere")
  assert load("text", path=str(tmp_path / "elsewhere")).info.fingerprint == before
  file = tmp_path / "elsewhere" / "part0" / "0.txt"
  file.write_bytes(b"B" + file.read_bytes()[1:])
  assert load("text", path=str(tmp_path / "elsewhere")).info.fingerprint != before


@pytest.mark.slow
def test_the_fingerprint_is_the_same_in_another_process(corpus):
  code = f"""
from mpjax.train.data import DataConfig, load_data
print(load_data(DataConfig(**{spec("text", path=str(corpus)).model_dump()!r}), seed=0).info.fingerprint)
"""
  out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
  assert out.strip() == load("text", path=str(corpus)).info.fingerprint


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


@pytest.mark.parametrize("channels", [None, 1, 3])
@pytest.mark.parametrize("dtype", [np.uint8, np.float32, np.float64])
def test_arrays_of_the_users_own(tmp_path, channels, dtype):
  images = IMAGES if channels is None else np.repeat(IMAGES[..., None], channels, -1)
  data = load("npz", path=save(tmp_path, images=images.astype(dtype), labels=LABELS))
  assert data.info.image_shape == (6, 6, channels or 1)
  assert data.info.num_classes == 3
  assert (data.info.train_examples, data.info.eval_examples) == (30, 10)
  assert next(data.train())["images"].shape == (4, 6, 6, channels or 1)


def test_arrays_with_an_evaluation_split_of_their_own(tmp_path):
  path = save(tmp_path, images=IMAGES, labels=LABELS, eval_images=IMAGES[:8] + 1, eval_labels=LABELS[:8])
  data = load("npz", path=path)
  assert (data.info.train_examples, data.info.eval_examples) == (40, 8)


def with_value(value, index=(3, 2, 1)):
  images = IMAGES.astype(np.float64)
  images[index] = value
  return images


@pytest.mark.parametrize(
  ("arrays", "words"),
  [
    ({"images": with_value(np.nan), "labels": LABELS}, ["images", "1 values", "[3, 2, 1]"]),
    ({"images": with_value(np.inf), "labels": LABELS}, ["images", "infinite"]),
    ({"images": with_value(1e300), "labels": LABELS}, ["images", "infinite"]),  # not in float32
    ({"images": IMAGES}, ["'labels'", "images"]),
    ({"pictures": IMAGES, "labels": LABELS}, ["'images'", "pictures"]),
    ({"images": IMAGES[0], "labels": LABELS}, ["[6, 6]", "[N, H, W]"]),
    ({"images": IMAGES, "labels": LABELS[:7]}, ["40", "7"]),
    ({"images": IMAGES, "labels": LABELS.astype(float)}, ["labels", "float64", "integers"]),
    ({"images": IMAGES, "labels": LABELS - 1}, ["negative", "first at 0"]),
    ({"images": IMAGES, "labels": LABELS, "eval_images": IMAGES}, ["'eval_labels'"]),
    (
      {"images": IMAGES, "labels": LABELS, "eval_images": IMAGES[:, :5], "eval_labels": LABELS},
      ["eval_images", "(5, 6)", "(6, 6)"],
    ),
    ({"images": np.asarray(["a"] * 40), "labels": LABELS}, ["images", "[40]"]),
    (
      {"images": IMAGES, "labels": LABELS, "eval_images": IMAGES / 255, "eval_labels": LABELS},
      ["eval_images are float32", "images uint8"],
    ),
    ({"images": IMAGES[:, :0], "labels": LABELS}, ["images", "[40, 0, 6]", "[N, H, W]"]),
    ({"images": IMAGES, "labels": np.where(LABELS == 1, 2**40, LABELS)}, [f"labels[1]={2**40}", "int32"]),
    (
      {"images": IMAGES, "labels": np.where(LABELS == 1, 50_000_000, LABELS)},
      ["labels[1]=50000000", "data.num_classes"],
    ),
    ({"images": IMAGES[:0], "labels": LABELS[:0]}, ["0 training"]),
  ],
)
def test_unfit_arrays_are_named(tmp_path, arrays, words):
  with pytest.raises(DataError) as error:
    load("npz", path=save(tmp_path, **arrays))
  assert all(word in str(error.value) for word in words), error.value


def test_labels_are_below_the_number_of_classes_that_is_given(tmp_path):
  path = save(tmp_path, images=IMAGES, labels=LABELS)
  most = int(LABELS.max())
  assert load("npz", path=path, num_classes=5000).info.num_classes == 5000
  assert load("npz", path=path).info.num_classes == most + 1
  with pytest.raises(DataError, match=rf"labels\[\d+\]={most}: .*num_classes={most}"):
    load("npz", path=path, num_classes=most)


def test_a_few_images_held_out_may_be_of_many_classes(tmp_path):
  many = 2000
  arrays = {"images": np.zeros((many, 2, 2), np.float32), "labels": np.arange(many)}
  arrays |= {"eval_images": arrays["images"][-4:], "eval_labels": arrays["labels"][-4:]}
  assert load("npz", path=save(tmp_path, **arrays)).info.num_classes == many


@pytest.mark.parametrize("at", ["walk", "is_file"])
def test_a_folder_that_cannot_be_entered_is_named(corpus, at, monkeypatch):
  denied = PermissionError(13, "Permission denied", str(corpus / "part1"))
  real_scan, real_is_file = os.scandir, pathlib.Path.is_file

  def refuse(real):
    def look(path, *args, **keywords):
      if "part1" in str(path):
        raise denied
      return real(path, *args, **keywords)

    return look

  if at == "walk":
    monkeypatch.setattr(os, "scandir", refuse(real_scan))
  else:
    monkeypatch.setattr(pathlib.Path, "is_file", refuse(real_is_file))
  with pytest.raises(DataError, match=r"part1.*: Permission denied"):
    load("text", path=str(corpus))


@pytest.mark.parametrize(
  ("kind", "options", "words"),
  [
    ("text", {}, ["data.path", "missing"]),
    ("text", {"path": []}, ["data.path", "missing"]),
    ("text", {"path": ""}, ["data.path", "missing"]),
    ("text", {"path": "CORPUS/../blank.txt"}, ["blank.txt", "no text files"]),
    ("text", {"path": "/no/such/file"}, ["/no/such/file"]),
    ("text", {"path": "/no/such/*.txt"}, ["/no/such/*.txt"]),
    ("text", {"path": "EMPTY"}, ["no text files"]),
    ("text", {"path": "CORPUS", "seq_len": 10_000}, ["seq_len=10000", "bytes"]),
    ("text", {"path": "CORPUS", "batch_size": 10_000}, ["batch_size=10000", "rows"]),
    ("npz", {}, ["data.path"]),
    ("npz", {"path": "/no/such.npz"}, ["/no/such.npz"]),
    ("npz", {"path": "CORPUS/part0/0.txt"}, ["not a readable .npz", "has Python objects"]),
    ("huggingface", {"path": "x", "text_column": "t"}, ["pip install datasets"]),
  ],
)
def test_what_cannot_be_read_is_named(corpus, tmp_path, kind, options, words, monkeypatch):
  monkeypatch.setitem(sys.modules, "datasets", None)
  (tmp_path / "empty").mkdir()
  (tmp_path / "blank.txt").touch()
  if isinstance(options.get("path"), str):
    path = options["path"].replace("CORPUS", str(corpus)).replace("EMPTY", str(tmp_path / "empty"))
    options = options | {"path": path}
  with pytest.raises(DataError) as error:
    load(kind, **options)
  assert "\n" not in str(error.value)
  assert all(word in str(error.value) for word in words), error.value
