"""The table of kinds, in code and in the reference."""

import pathlib

import numpy as np

# The table is the subject: from outside, each cell takes a program.
from mpjax.casting._kinds import FLOAT32, Held, Kind, Where, Wide, meet

HALF = np.dtype("float16")
GUIDE = pathlib.Path(__file__).parents[2] / "docs" / "reference" / "autocast_rules.md"


def held(kind):
  return Held(kind, HALF if kind is Kind.HALF else FLOAT32)


def test_the_guide_says_what_each_kind_makes_of_a_meeting():
  table = GUIDE.read_text().partition("## Table of kinds")[2].splitlines()
  rows = [line.strip("| ").split(" | ") for line in table if line.startswith("| ")]
  heading, *rows = rows
  assert heading[2:] == [where.value for where in Where]
  assert [row[0] for row in rows] == [kind.value for kind in Kind]
  for name, _, *cells in rows:
    for where, cell in zip(Where, cells, strict=True):
      usual, _, other = cell.partition("; ")
      kind, _, condition = other.partition(" where ")
      alone = held(Kind(name))
      found = lambda h, condition: meet([h], where, condition, half=HALF).kind.value
      assert found(alone, False) == usual, (name, where)
      wide = alone._replace(wide=Wide.SATURATES)
      assert found(wide, False) == (kind if condition == "wide" else usual), (name, where)
      assert found(alone, True) == (kind if condition not in ("", "wide") else usual), (name, where)
