"""The tables of decisions and of kinds, in code and in the reference."""

import itertools
import pathlib

import numpy as np

# The tables are the subject: from outside, each cell takes a program.
from mpjax.casting._decision_table import table_of_decisions
from mpjax.casting._kinds import FLOAT32, KIND_RULES, Condition, Held, Kind, Where, meet, table_of_kinds

HALF = np.dtype("float16")
GUIDE = pathlib.Path(__file__).parents[2] / "docs" / "reference" / "autocast_rules.md"


def held(kind):
  return Held(kind, HALF if kind is Kind.HALF else FLOAT32)


def test_the_guide_has_the_tables_of_the_code():
  rows = ["| " + " | ".join(row) + " |" for row in [*table_of_decisions(), *table_of_kinds()]]
  conditions = [f"- *{condition.name.lower()}*: {condition.value}" for condition in Condition]
  guide = GUIDE.read_text()
  assert [line for line in [*rows, *conditions] if line not in guide] == []


def test_there_is_one_rule_for_each_kind():
  assert [rule.kind for rule in KIND_RULES] == list(Kind)
  assert all(rule.results.keys() == set(Where) for rule in KIND_RULES)


def test_order_does_not_matter():
  for where, a, b in itertools.product(Where, list(Kind)[1:], list(Kind)[1:]):
    assert meet([held(a), held(b)], where, half=HALF) == meet([held(b), held(a)], where, half=HALF), (
      where,
      a,
      b,
    )


def test_half_precision_does_not_pull_these_down():
  for kind, where in itertools.product(
    (Kind.PINNED, Kind.RUNNING, Kind.STATISTIC), (Where.FOLLOW, Where.FULL, Where.BRANCHES)
  ):
    assert meet([held(kind), held(Kind.HALF)], where).dtype == FLOAT32, (kind, where)
  wide = Held(Kind.FLEXIBLE, FLOAT32, wide=True)
  for where in (Where.FOLLOW, Where.BRANCHES):
    assert meet([wide, held(Kind.HALF)], where) == Held(Kind.ISLAND, FLOAT32, wide=True)
