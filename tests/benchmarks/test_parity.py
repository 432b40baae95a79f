"""What parity says of two checkouts' programs and plans."""

import argparse

import pytest

from benchmarks import parity


def run(*words):
  parser = argparse.ArgumentParser()
  parity.add_arguments(parser)
  return parity.run(parser.parse_args(list(words)))


@pytest.mark.slow
def test_one_changed_figure_is_all_that_differs_from_the_same_checkout(tmp_path, capsys):
  file, chosen = tmp_path / "before.json", ("--match", "kept training, v5e, 0.12", "--jobs", "1")
  assert run("write", str(file), *chosen) == 0
  file.write_text(file.read_text().replace('"peak": ', '"peak": 1'))
  assert run("compare", str(file), *chosen) == 1
  differs, number = capsys.readouterr().out.splitlines()[-2:]
  assert differs.startswith("differs: plans, kept training, v5e, 0.12.0.1, compiled, peak: 1")
  assert number == "1 differences"
