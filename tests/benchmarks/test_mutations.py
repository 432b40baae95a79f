"""The table of faults: each is one edit of the code as it is."""

import ast
import pathlib

from benchmarks.mutations._faults import read_faults

ROOT = pathlib.Path(__file__).parents[2]


def test_each_fault_is_one_edit_that_compiles():
  faults = read_faults()
  assert len({fault.name for fault in faults}) == len(faults) >= 92
  for fault in faults:
    source = (ROOT / fault.file).read_text()
    assert ast.dump(ast.parse(fault.applied(source))) != ast.dump(ast.parse(source)), fault.name
