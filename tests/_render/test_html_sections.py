"""What shows itself in notebooks: tables that are small, without scripts, with every text escaped."""

import html.parser
import io
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import rich.console

import mpjax
from mpjax._render.html_sections import Report, print_shown, sections_html
from mpjax._render.text_sections import TextColumn, TextRow, TextSection, of_rows

NASTY = "<script>alert('x')</script> & \"quoted\""


class Parsed(html.parser.HTMLParser):
  """Text and elements of a fragment; raises where an element is not closed."""

  def __init__(self, text):
    super().__init__()
    self.text, self.tags, self._open = [], set(), []
    self.feed(text)
    self.close()
    assert not self._open

  def handle_starttag(self, tag, attributes):
    self.tags.add(tag)
    self._open.append(tag)
    assert {name for name, _ in attributes} <= {"class"}

  def handle_endtag(self, tag):
    assert self._open.pop() == tag

  def handle_data(self, data):
    if self._open[-1] != "style":
      self.text.append(data)


def test_every_text_is_escaped():
  section = TextSection(NASTY, [TextColumn(NASTY)], [[TextRow([NASTY])]], [NASTY])
  parsed = Parsed(sections_html([section]))
  assert parsed.text == [NASTY] * 4
  assert "script" not in parsed.tags


def test_what_is_long_is_cut_and_says_so():
  rows = [["module", "count"], *([f"layer {i} {'x' * 100}", str(i)] for i in range(1000))]
  sections = [of_rows("first", rows), of_rows("second", rows), TextSection("third", lines=["more"])]
  text = sections_html(sections)
  assert len(text.encode()) < 20_000
  shown = text.count("<tr>") - 1
  assert f"{2000 - shown + 1} more rows: print() shows all." in text
  assert "second" not in text  # a title without its table
  assert len(sections_html([of_rows("&" * 10**5, [["&" * 10**5], ["&" * 10**6]])]).encode()) < 20_000


def test_figures_are_flush_right_and_strong_rows_marked():
  section = TextSection("", [TextColumn("a"), TextColumn("b", right=True)], [[TextRow(["1", "2"], True)]])
  assert '<tr class="s"><td>1</td><td class="r">2</td></tr>' in sections_html([section])


LONG = "kernel: " + "float32, since its operands are " * 8
REPORT = Report(
  ("policy bf16: 98% of the matrix FLOPs in half precision", LONG),
  (
    of_rows("Islands of h0", [["module", "kept"], ["h0/attn", "1 kB"]], name="islands"),
    of_rows("Islands of h1", [["module", "kept"], ["h1/attn", "2 kB"]], name="islands"),
    TextSection("Loops", lines=["carry_0 is float32"], name="loops"),
    TextSection("Notes", lines=["has no name"]),
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


def test_a_notebook_shows_the_answer_and_every_table():
  text = Parsed(REPORT._repr_html_()).text
  assert text[:2] == list(REPORT.answer)
  assert [word for word in text if word in ("h0/attn", "h1/attn", "Loops", "Notes")] == [
    "h0/attn",
    "h1/attn",
    "Loops",
    "Notes",
  ]


def loss_fn(params, batch):
  with jax.named_scope("up"):
    hidden = jnp.tanh(batch["x"] @ params["up"])
  return jnp.mean((hidden @ params["down"] - batch["y"]) ** 2)


@pytest.fixture(scope="module")
def shown():
  """Everything that shows itself, by name."""
  params = {"up": jnp.full((8, 16), 0.1), "down": jnp.full((16, 4), 0.1)}
  batch = {"x": np.ones((16, 8), np.float32), "y": np.ones((16, 4), np.float32)}
  step = mpjax.make_train_step(loss_fn, optax.adamw(1e-3), "fp16", donate=False)
  state = step.init(params)
  return {
    "explain": mpjax.explain(loss_fn, params, batch, policy="bf16"),
    "plan": mpjax.plan(step, state, batch, target="h100", compile=False),
    "report": mpjax.inspect_numerics(step, state, [batch], advise=False),
    "tune": mpjax.tune(loss_fn, params, [batch], target="h100", candidates=["bf16", "fp32"], tolerance=0.1),
  }


NAMES = {
  "explain": ["policy bf16", "tanh", "up"],
  "plan": ["target h100", "optimizer state", "Memory of one device"],
  "report": ["good as it is", "activations", "Error against float32"],
  "tune": ["policies tried", "chosen", "bf16", "policy: fp32"],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_it_shows_itself_in_a_small_table(name, shown):
  text = shown[name]._repr_html_()
  parsed = Parsed(text)
  assert len(text.encode()) < 20_000
  assert parsed.tags <= {"div", "style", "p", "table", "thead", "tbody", "tr", "th", "td"}
  assert not re.search(r"https?://|javascript:|url\(|@import", text)
  said = "\n".join(parsed.text)
  assert all(word in said for word in NAMES[name]), said


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_at_a_prompt_a_report_is_what_print_shows(name, shown):
  assert repr(shown[name]) == str(shown[name])


def test_a_report_without_tensors_shows_itself():
  report = mpjax.NumericsReport("<b>", mpjax.get_policy("bf16"), 1.0, 0, 1, 4, 1.0, None, ())
  assert "&lt;b&gt;" in report._repr_html_()
