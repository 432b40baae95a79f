"""The table of faults: each is one edit of the code as it is."""

import ast
import pathlib

from benchmarks.mutations._faults import Fault, place_of, read_faults

ROOT = pathlib.Path(__file__).parents[2]


def test_each_fault_is_one_edit_that_compiles():
  faults = read_faults()
  assert len({fault.name for fault in faults}) == len(faults) >= 92
  assert sum(fault.mended for fault in faults) >= 35
  for fault in faults:
    source = (ROOT / fault.file).read_text()
    assert ast.dump(ast.parse(fault.applied(source))) != ast.dump(ast.parse(source)), fault.name


def test_the_place_of_a_fault_is_the_statement_that_it_changes(tmp_path):
  (tmp_path / "a.py").write_text(
    "A = (\n  1,\n  2,\n)\n\n\ndef f(x):\n  if x > 1:\n    return (\n      x\n      + 1\n    )\n  return x\n"
  )
  place = lambda old: place_of(Fault("a", "a.py", old, "", ""), tmp_path)
  assert place("2,").lines == {1, 2, 3, 4}
  assert place("2,").at_import
  assert place("+ 1").lines == {9, 10, 11, 12}
  assert not place("+ 1").at_import
  assert place("x > 1").lines == {8}
