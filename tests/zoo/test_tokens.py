"""Files of token numbers: every row where it should lie, read where it is asked for, and bad files named."""

import numpy as np

from mpjax.train import DataError
from tests.train._runs import raises_one_line
from tests.zoo._datasets import load

SEQ_LEN = 8


def write(file, tokens, dtype="uint16", head=b""):
  file.write_bytes(head + np.asarray(tokens, np.dtype(dtype).newbyteorder("<")).tobytes())
  return str(file)


def tokens_of(path, **options):
  return load(
    "tokens", path=path, **({"vocab_size": 1000, "seq_len": SEQ_LEN, "valid_fraction": 0.25} | options)
  )


def rows(split):
  return [split[i]["tokens"].tolist() for i in range(len(split))]


def test_every_row_lies_where_it_should(tmp_path):
  for dtype, vocab_size, head in [("uint16", 1000, 0), ("uint32", 100_000, 24)]:
    numbers = np.random.default_rng(0).integers(0, vocab_size, 200)
    path = write(tmp_path / "a.bin", numbers, dtype, bytes(head))
    data = tokens_of(path, vocab_size=vocab_size, skip_bytes=head)
    expected = [numbers[i : i + SEQ_LEN + 1].tolist() for i in range(0, 192, SEQ_LEN)]
    assert rows(data.train_rows) + rows(data.eval_rows) == expected
    assert len(data.eval_rows) == 6
    assert data.train_rows[0]["tokens"].dtype == np.int32
    assert (data.info.vocab_size, data.info.seq_len) == (vocab_size, SEQ_LEN)


def test_no_row_reaches_from_one_file_into_the_next(tmp_path):
  parts = [np.arange(0, 30), np.arange(100, 150), np.arange(200, 205), np.arange(300, 340)]
  for i, part in enumerate(parts):
    write(tmp_path / f"{i}.bin", part)
  data = tokens_of(str(tmp_path / "*.bin"), valid_fraction=0.3)
  found = rows(data.train_rows) + rows(data.eval_rows)
  starts = [0, 8, 16, 100, 108, 116, 124, 132, 140, 300, 308, 316, 324]
  assert found == [list(range(start, start + SEQ_LEN + 1)) for start in starts]


def test_files_of_their_own_are_held_out(tmp_path):
  train, held_out = write(tmp_path / "train.bin", range(100)), write(tmp_path / "val.bin", range(500, 560))
  data = tokens_of(train, eval_path=held_out)
  assert len(data.train_rows) == 12
  assert min(map(min, rows(data.eval_rows))) == 500


def test_rows_are_read_from_the_file_and_not_before(tmp_path):
  path = write(tmp_path / "large.bin", np.zeros(1_000_000))
  data = tokens_of(path)
  with open(path, "r+b") as file:
    file.seek(2 * SEQ_LEN * 1001)
    file.write(np.full(SEQ_LEN, 7, "<u2").tobytes())
  assert rows(data.train_rows.part(1001, 1002)) == [[7] * SEQ_LEN + [0]]


def test_the_fingerprint_follows_the_content_and_not_the_place(tmp_path):
  (tmp_path / "there").mkdir()
  here = tokens_of(write(tmp_path / "a.bin", range(200)))
  there = tokens_of(write(tmp_path / "there" / "b.bin", range(200)))
  other = tokens_of(write(tmp_path / "c.bin", [1, *range(1, 200)]))
  assert here.info.fingerprint == there.info.fingerprint != other.info.fingerprint


BAD = {  # name -> (content, options, words of the error)
  "missing": (None, {}, ["no such file"]),
  "empty": (b"", {}, ["cannot be read", "empty"]),
  "cut off": (b"\0" * 201, {}, ["cannot be read with data.dtype=uint16", "multiple"]),
  "all skipped": (b"\0" * 200, {"skip_bytes": 300}, ["cannot be read", "data.skip_bytes=300"]),
  "one row": (b"\0" * 20, {}, ["1 rows", "none to train on"]),
  "too short": (b"\0" * 12, {}, ["data.seq_len=8", "6 tokens"]),
  "an array file": (b"\x93NUMPY" + b"\0" * 200, {}, ["NumPy", "tofile"]),
  "a token too large": (b"\xff\xff" * 200, {}, ["token 0 is 65535", "data.vocab_size=1000", "data.dtype"]),
}


def test_a_bad_file_is_one_line(tmp_path):
  for name, (content, options, words) in BAD.items():
    file = tmp_path / f"{name}.bin"
    if content is not None:
      file.write_bytes(content)
    raises_one_line(DataError, words, tokens_of, str(file), **options)
  (tmp_path / "folder").mkdir()
  for path in ("", [], str(tmp_path / "folder"), f"{tmp_path}/*.none"):
    raises_one_line(DataError, ["data.path", "no such file, or no files there"], tokens_of, path)


def test_a_bad_token_is_named_when_it_is_read(tmp_path):
  pattern = np.tile(np.arange(50), 400)
  pattern[5019] = 900  # in no row that is looked at before
  path = write(tmp_path / "a.bin", pattern)
  data = tokens_of(path, vocab_size=50)
  told = f"{path}: token 5019 is 900: expected less than data.vocab_size=50"
  raises_one_line(DataError, [told], data.train_rows.__getitem__, 5019 // SEQ_LEN)
