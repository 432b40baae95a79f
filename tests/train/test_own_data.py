"""Data of a user's own: rows by position, batched, shuffled, divided and resumed as the built-in data is."""

import grain
import numpy as np
import pytest

import mpjax
from mpjax.train import DataError
from mpjax.train.config._config import DataConfig
from mpjax.train.data import load_data
from tests.train._runs import raises_one_line


class Rows:
  def __init__(self, count, **arrays):
    self.count, self.arrays = count, arrays

  def __len__(self):
    return self.count

  def __getitem__(self, index):
    return {"n": index, **{name: array[index] for name, array in self.arrays.items()}}


def load(function, *, seed=0, **common):
  mpjax.train.register_data("of_a_test")(function)
  return load_data(DataConfig(kind="of_a_test", **({"batch_size": 8} | common)), seed=seed)


@pytest.mark.parametrize("workers", [0, 2])
def test_rows_are_shuffled_batched_divided_and_resumed(workers):
  data = load(lambda: (Rows(50), Rows(20)), seed=3, workers=workers)
  expected = grain.MapDataset.range(50).seed(3).shuffle().batch(8, drop_remainder=True).repeat()
  parts = [data.train(), *map(data.train, (slice(0, 4), slice(4, 8), np.array([0, 5])))]
  whole = parts[0]
  for i in range(9):  # into the next epoch
    batch, first, second, some = (next(part)["n"] for part in parts)
    np.testing.assert_array_equal(batch, expected[i])
    np.testing.assert_array_equal(batch, np.concatenate([first, second]))
    np.testing.assert_array_equal(batch[[0, 5]], some)
  assert all(part.get_state() == whole.get_state() for part in parts)
  resumed = data.train()
  resumed.set_state(whole.get_state())
  np.testing.assert_array_equal(next(resumed)["n"], next(whole)["n"])
  assert [batch["n"].tolist() for batch in data.eval()] == [list(range(8)), list(range(8, 16))]
  assert [batch["n"].tolist() for batch in data.eval(slice(4, 8))] == [[4, 5, 6, 7], [12, 13, 14, 15]]


def test_rows_come_in_dtypes_that_jax_has():
  arrays = {"x": np.zeros((9, 2)), "half": np.zeros((9, 3), np.float16), "mask": np.ones(9, bool)}
  data = load(lambda: (Rows(9, **arrays), Rows(9, **arrays)))
  dtypes = {name: str(array.dtype) for name, array in next(data.train()).items()}
  assert dtypes == {"n": "int32", "x": "float32", "half": "float16", "mask": "bool"}
  shapes = data.info.batch_shapes(8)
  assert {name: str(leaf.dtype) for name, leaf in shapes.items()} == dtypes
  assert shapes["x"].shape == (8, 2)


def test_what_data_says_of_itself_reaches_the_model():
  facts = {"classes": np.int64(3), "shape": (2, 3), "name": "x"}
  facts |= {"description": "seven rows", "fingerprint": "abc"}
  info = load(lambda: (Rows(8), Rows(8), facts)).info
  assert (info.classes, info["classes"], info.shape, info.name) == (3, 3, (2, 3), "x")
  assert [name in info for name in ("classes", "description", "colour", 3)] == [True, True, False, False]
  assert (info.description, info.fingerprint) == ("seven rows", "abc")
  assert getattr(info, "colour", None) is None


def test_the_fingerprint_follows_the_rows():
  of = lambda array: load(lambda: (Rows(100, x=array), Rows(8, x=array))).info.fingerprint
  array = np.arange(100.0)
  assert of(array) == of(array.copy())
  assert of(array) != of(array + 1)
  assert of(array) != of(array.astype(np.float16))


class Noise(Rows):
  def __getitem__(self, index):
    return {"x": np.random.default_rng().random()}


class OneIsOther(Rows):
  """Row 40 is one number short, and is none of those that are looked at before a run."""

  def __getitem__(self, index):
    return {"x": np.zeros(2 if index == 40 else 3)}


class Broken(Rows):
  def __getitem__(self, index):
    raise KeyError("no row")


def fails():
  raise FileNotFoundError(2, "No such file", "tokens.bin")


NO_DATA = [
  (lambda: Rows(8), ["a Rows", "(train_rows, eval_rows)"]),
  (lambda: (Rows(8), None), ["the evaluation rows cannot be used", "NoneType", "len(rows)"]),
  (lambda: (iter([]), Rows(8)), ["the training rows", "rows[i]"]),
  (lambda: ({"x": np.zeros((8, 2))}, Rows(8)), ["the training rows cannot be used", "rows[i]"]),
  (lambda: (Rows(8), Rows(3)), ["data.batch_size=8", "the evaluation rows are 3 only"]),
  (lambda: (Rows(8), [3] * 8), ["the evaluation rows cannot be used: row 0", "'int'", "dict"]),
  (
    lambda: (Rows(8, s=["a"] * 8), Rows(8)),
    ["the training rows cannot be used", "'s': dtype('<U1')", "numbers"],
  ),
  (lambda: (Rows(8), Rows(8, x=np.zeros(8))), ["evaluation rows hold", "expected the same"]),
  (lambda: (Noise(8), Noise(8)), ["the training rows: row 0 is not the same twice", "default_rng(index)"]),
  (lambda: (Broken(8), Rows(8)), ["the training rows cannot be used: row 0", "KeyError: 'no row'"]),
  (lambda: (Rows(8), Rows(8), 3), ["info=3: expected numbers", "num_classes"]),
  (lambda: (Rows(8), Rows(8), {"f": max}), ["info=", "expected numbers, text"]),
  (fails, ["tokens.bin: No such file"]),
]


def test_what_is_no_data_is_one_line():
  for function, words in NO_DATA:
    raises_one_line(DataError, words, load, function)


def test_a_row_unlike_the_others_is_named_when_it_is_read():
  data = load(lambda: (OneIsOther(96), OneIsOther(96)))
  with pytest.raises(DataError, match=r"row 40 holds \{'x': \(2,\)\}, others \{'x': \(3,\)\}"):
    list(data.eval())
