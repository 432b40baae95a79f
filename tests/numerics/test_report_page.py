"""The page of a report: whole, strict, and without a request to anywhere."""

import base64
import copy
import hashlib
import html.parser
import json
import math
import re

import numpy as np
import pytest

# A report holds no names that break out of a page, and none of another version.
from mpjax.numerics.render import save_html
from tests.numerics._by_hand import report_of

KINDS = ("activation", "activation gradient", "parameter", "weight gradient", "update")
NASTY = "</script><script>alert(1)</script><!--<b>&amp;\u2028\u2029{{data}}\ud800"


class _Page(html.parser.HTMLParser):
  """Elements with their attributes, and the text inside of each script and style, as a browser cuts them."""

  def __init__(self, text):
    super().__init__()
    self.elements, self.blocks = [], []
    self.feed(text)
    self.close()

  def handle_starttag(self, tag, attributes):
    self.elements.append((tag, dict(attributes)))
    if tag in ("script", "style"):
      self.blocks.append([tag, dict(attributes), ""])

  def handle_data(self, data):
    if self.get_starttag_text() and self.elements[-1][0] in ("script", "style"):
      self.blocks[-1][2] += data

  def handle_endtag(self, tag):
    self.elements.append((f"/{tag}", {}))

  @property
  def data(self):
    (text,) = [text for _, attributes, text in self.blocks if attributes.get("id") == "data"]

    def refuse(name):
      raise ValueError(name)

    return json.loads(text, parse_constant=refuse)


@pytest.fixture(scope="module")
def report():
  """The report on a small model, as if that were each of four blocks, with an overflow in the third."""
  one = report_of("fp16").to_dict()
  tensors = [
    {**t, "module": f"GPT/blocks/{block}/{t['module']}", "order": 10 * block + t["order"]}
    for kind in KINDS
    for block in range(4)
    for t in one["tensors"]
    if t["kind"] == kind
  ]
  for t in tensors:
    if t["kind"].startswith("activation") and t["module"] == "GPT/blocks/2/two":
      t |= {"error": math.inf, "cosine": math.nan}
  text = "The forward error grows 60 times here."
  finding = {"kind": "error", "severity": "problem", "module": "GPT/blocks/2/two", "text": text}
  return {**one, "title": "gpt", "tensors": tensors, "findings": [finding, *one["findings"]]}


def page_of(report, folder):
  save_html(report, folder / "report.html")
  return _Page((folder / "report.html").read_text(encoding="utf-8"))


def _finite(tree):
  if isinstance(tree, dict):
    return {key: _finite(value) for key, value in tree.items()}
  if isinstance(tree, list):
    return [_finite(value) for value in tree]
  return str(tree) if isinstance(tree, float) and not math.isfinite(tree) else tree


ASKING = ("http:", "https:", "src=", "@import", "url(", "fetch(", "XMLHttpRequest", "WebSocket", "import(")


def test_a_page_asks_nothing_of_the_network_and_its_policy_forbids_it(tmp_path, report):
  page = page_of(report, tmp_path)
  text = (tmp_path / "report.html").read_text()
  assert not [reference for reference in ASKING if reference in text]
  assert all(a["href"].startswith(("#", "data:,")) for _, a in page.elements if "href" in a)
  assert {tag for tag, _ in page.elements} & {"link", "img", "iframe", "object"} == {"link"}  # the empty icon
  (policy,) = [a["content"] for _, a in page.elements if a.get("http-equiv") == "Content-Security-Policy"]
  allowed = dict(part.strip().split(" ", 1) for part in policy.split(";"))
  assert allowed["default-src"] == "'none'"
  assert "connect-src" not in allowed
  assert "unsafe" not in policy
  for tag, attributes, text in page.blocks:
    if attributes.get("type") != "application/json":
      digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
      assert allowed[f"{tag}-src"] == f"'sha256-{digest}'"


def test_the_data_in_a_page_is_the_report(tmp_path, report):
  data = page_of(report, tmp_path).data
  assert data == _finite(report)
  assert any(tensor["error"] == "inf" and tensor["cosine"] == "nan" for tensor in data["tensors"])
  arrays = {"counts": np.asarray(report["tensors"][0]["counts"]), "error": np.float32(np.nan)}
  tensor = report["tensors"][0] | arrays
  found = page_of({**report, "tensors": [tensor]}, tmp_path).data["tensors"]
  assert found == [{**_finite(report["tensors"][0]), "error": "nan"}]


def test_no_name_breaks_out_of_its_place(tmp_path, report):
  plain, named = page_of(report, tmp_path), copy.deepcopy(report)
  named["title"] = named["tensors"][3]["module"] = named["findings"][0]["text"] = NASTY
  page = page_of(named, tmp_path)
  assert page.data == _finite(named)
  assert [tag for tag, _ in page.elements] == [tag for tag, _ in plain.elements]
  assert not re.search("[\u2028\u2029]", page.blocks[-2][2])


def test_a_write_that_fails_leaves_what_was_there(tmp_path, report, monkeypatch):
  path = tmp_path / "folder" / "report.html"
  save_html(report, str(path))
  before = path.read_bytes()
  with pytest.raises(ValueError, match="expected version 1"):
    save_html({**report, "version": 2}, path)

  def fail(*_):
    raise OSError("disk full")

  monkeypatch.setattr("os.replace", fail)
  with pytest.raises(OSError, match="disk full"):
    save_html({**report, "title": "another"}, path)
  assert path.read_bytes() == before
  assert list(path.parent.iterdir()) == [path]
