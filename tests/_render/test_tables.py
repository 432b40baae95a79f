"""Results as tables of text, in a file, on a terminal and in a notebook."""

import html
import io

import pytest
import rich.console

from mpjax._render.tables import Report, Table, print_shown

NASTY = "<script>alert('x')</script> & \"quoted\""


def test_columns_of_text_are_folded_and_figures_are_flush_right():
  rows = [["module", "bytes"], ["GPT/blocks/0/attention", "1.5 GB"], ["all", "12.25 GB"]]
  table = Table("", "Memory of one device", rows, ["peak: 2 GB"])
  assert (
    table.text()
    == """\
Memory of one device
module                     bytes
--------------------------------
GPT/blocks/0/attention    1.5 GB
all                     12.25 GB
peak: 2 GB"""
  )
  assert (
    table.text(20)
    == """\
Memory of one device
module        bytes
-------------------
GPT/         1.5 GB
blocks/0/
attention
all        12.25 GB
peak: 2 GB"""
  )
  assert Table("", "a", [["b"]]).text() == "a\nb"


def test_a_notebook_has_the_text_escaped_and_not_too_much_of_it():
  rows = [[NASTY], *([f"layer {i} {'x' * 100}"] for i in range(1000))]
  text = Report([NASTY], [Table("first", NASTY, rows)])._repr_html_()
  assert text.startswith("<pre>")
  assert "<script" not in text
  assert html.unescape(text).count(NASTY) == 3
  assert len(text.encode()) < 20_000
  assert text.endswith("... print(RESULT.table(&quot;all&quot;)) shows the rest</pre>")


LONG = "kernel: " + "float32, since its operands are " * 8
REPORT = Report(
  ("policy bf16: 98% of the matrix FLOPs in half precision", LONG),
  (
    Table("islands", "Islands of h0", [["module", "kept"], ["h0/attn", "1 kB"]]),
    Table("islands", "Islands of h1", [["module", "kept"], ["h1/attn", "2 kB"]]),
    Table("loops", "Loops", lines=["carry_0 is float32"]),
    Table("", "Notes", lines=["has no name"]),
  ),
)


def test_a_report_prints_its_answer_and_says_which_tables_it_has():
  first, *folded, last = str(REPORT).splitlines()
  assert repr(REPORT) == str(REPORT)
  assert first == REPORT.answer[0]
  assert " ".join(folded) == LONG.strip()
  assert max(map(len, folded)) <= 116
  assert last == 'more: .table("islands"), or "loops", "all"'
  assert REPORT.tables == ("islands", "loops")


def test_a_table_is_asked_for_by_name():
  islands = REPORT.table("islands")
  assert [line for line in islands.splitlines() if "Islands" in line] == ["Islands of h0", "Islands of h1"]
  assert "policy" not in islands
  everything = REPORT.table("all")
  assert everything.startswith(REPORT.answer[0])
  assert all(text in everything for text in (islands, REPORT.table("loops"), "has no name"))
  assert "more:" not in everything
  for name in "island", "", "Notes":
    with pytest.raises(ValueError, match=rf"no table '{name}': expected one of all, islands, loops"):
      REPORT.table(name)


def test_a_command_prints_the_answer_a_table_or_everything():
  def printed(name):
    stream = io.StringIO()
    print_shown(REPORT, rich.console.Console(file=stream, width=60, color_system=None), name)
    return stream.getvalue()

  assert printed(None).endswith("more: --table islands, or loops, all\n")
  assert max(map(len, printed(None).splitlines())) <= 60
  assert printed("loops") == "Loops\ncarry_0 is float32\n"
  assert printed("all").startswith(printed(None).partition("more:")[0])
