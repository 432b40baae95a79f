"""Which tests a command of pytest runs."""

import pathlib
import types

import pytest

from tests import conftest

ROOT = pathlib.Path(__file__).parents[1]


class Item:
  path = ROOT / "tests" / "step" / "test_x.py"

  def __init__(self, name, marks):
    self.nodeid, self.get_closest_marker = f"tests/step/test_x.py::test_{name}[1]", marks.__contains__


@pytest.mark.parametrize(
  ("folder", "args", "options", "run"),
  [
    (".", ["tests/step"], {}, "a"),
    (".", ["tests/step"], {"all": True}, "abcd"),
    (".", ["tests/step"], {"markexpr": "slow"}, "abcd"),  # the mark is asked about elsewhere
    (".", ["tests/step/test_x.py::test_b", "tests/step"], {}, "ab"),
    (".", [f"{ROOT}/tests/step/test_x.py::test_c[1]"], {}, "ac"),
    ("tests", ["step/test_x.py::test_d"], {}, "ad"),
  ],
)
def test_long_tests_run_with_all_by_a_mark_or_by_their_names(folder, args, options, run):
  marks = {"a": [], "b": ["slow"], "c": ["aot"], "d": ["slow", "aot"]}
  config = types.SimpleNamespace(
    option=types.SimpleNamespace(**{"all": False, "markexpr": "", **options}),
    args=args,
    rootpath=ROOT,
    invocation_params=types.SimpleNamespace(dir=ROOT / folder),
    hook=types.SimpleNamespace(pytest_deselected=lambda items: None),
    stash={},
  )
  items = [Item(name, own) for name, own in marks.items()]
  conftest.pytest_collection_modifyitems(config, items)
  assert [item.nodeid[-4] for item in items] == list(run)
  said = conftest.pytest_report_collectionfinish(config)
  assert (f"{4 - len(run)} that are slow" in said) if len(run) < 4 else not said
