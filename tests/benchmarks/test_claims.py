"""Figures that pages say are those of the committed reports."""

import json
import re

import pytest

from benchmarks import report
from benchmarks._runner import ROOT


@pytest.mark.parametrize("page", report.PAGES, ids=lambda page: page.parent.name)
def test_a_table_is_what_its_report_says(page):
  assert report.written(page) == page.read_text()


def test_every_report_has_a_table_a_commit_and_a_date():
  files = {file.stem for file in report.RESULTS.glob("*.json")}
  shown = re.findall(r"<!-- (\w+) -->", report.PAGES[0].read_text())
  assert set(shown) - {"end"} == files
  for name in files:
    found = json.loads((report.RESULTS / f"{name}.json").read_text())
    assert re.fullmatch(r"[0-9a-f]{7,}", found["commit"]), name
    assert re.fullmatch(r"\d{4}-\d{2}-\d{2}", found["date"]), name
    assert all("error" not in row for row in found.get("rows", ())), name
