"""The texts are in plain words: no dialect, no long sentence or page, no heading twice on a page."""

import ast
import collections
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parents[1]
SCOPE = ("README.md", "CONTRIBUTING.md", "docs/**/*.md", "mpjax/**/*.py", "scripts/*.py", "examples/*.py")
FILES = sorted(path for pattern in SCOPE for path in ROOT.glob(pattern))
SENTENCE_WORDS, PAGE_WORDS = 40, 2500

_IRREGULAR = (
  "been|begun|broken|brought|built|chosen|come|cost|cut|done|drawn|fallen|fed|felt|fit|found|given|gone|"
  "got|grown|had|held|hit|kept|known|led|left|let|lost|made|meant|met|paid|put|read|run|said|seen|sent|"
  "set|shown|shrunk|spent|split|spread|stood|sunk|taken|thought|thrown|told|understood|won|written"
)
_MORE = (
  "more|less|longer|fewer|larger|smaller|greater|better|worse|higher|lower|later|earlier|faster|slower|such"
)
_END = r"(?=\s*(?:[.,;:)]|$))"
# What is hard to read: how it looks (case counts: `None` is no fault), and what to write.
DIALECT = {
  rf"\b(?:has|have|had) not\b(?! (?:yet |only |always |ever |\w+ly )?(?:\w+ed|{_IRREGULAR})\b)": "does not have",
  r"(?<![Tt]here )\b(?:is|are|was|were|be) none\b": "is not a ...",
  rf"(?<![Tt]here )\b(?:is|are|was|were) no (?!(?:{_MORE})\b)": "is not a ...",
  r"(?<!instead )(?<!ahead )(?<!\bas )\bof (?:before|now)\b": "earlier, present",
  r"(?<![\w-])[Bb]esides?(?![\w-])": "also; next to, with",
  r"^Of (?!course)|[;:] of (?:an?|the|each|every|all|those|these|what|two|its)\b": "begin with the subject",
  r"^So (?:is|are|has|have|does|do|was|were|can|will)\b(?! not)": "name the subject",
  r"^(?:Those|That) of\b": "repeat the noun",
  rf"\b(?:[Ss]uch an? one|[Ss]uch one|(?:another|one|two|many|most|all) such{_END})": "name it",
  rf"\b(?:that|which|whatever|what|as) there (?:are|is|was|were)\b(?: not\b)?{_END}": "leave it out, or: existing",
  r"\b(?:[WwTtHh]h?ere(?:of|in)|[Ll]est|[Aa]mongst|[Ww]hilst|[Aa]ught|[Nn]aught|for want of)\b": "the plain word",
}
_CODE = "\u2039code\u203a"
_BLOCK = r"\n\s*\n|\n\s*(?:[-*+]|\d+[.)])\s+|\n\s*#+ |\n?\s*\|\s*|\n\s+[\w*, `.]+: |\n\s*:::.*"
_SENTENCE_END = r"(?<!e\.g\.)(?<!i\.e\.)(?<!vs\.)(?<!cf\.)(?<=[.!?])[)\"'*_]*\s+(?=[A-Z\"'(*\[\u2039])"


def prose(path):
  """Yields the texts of a page, or the docstrings of a module, without fenced code."""
  text = path.read_text()
  texts = [text]
  if path.suffix == ".py":
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef)
    texts = [
      ast.get_docstring(node) or "" for node in ast.walk(ast.parse(text)) if isinstance(node, documented)
    ]
  for text in texts:
    text = re.sub(r"(?ms)^\s*(`{3,}|~{3,}).*?^\s*\1\s*$|<!--.*?-->|^(?: {4,}|>>>).*$", "", f"\n{text}")
    text = re.sub(r"(?s)(`+)(?:.+?)\1|<?https?://\S+", _CODE, text)
    yield re.sub(r"!?\[([^\]]*)\](?:\([^)]*\)|\[[^\]]*\])", r"\1", text)


def faults(text):
  """Returns the sentences of a text that are hard to read, each with what to write."""
  found = []
  for block in re.split(_BLOCK, text):
    for sentence in re.split(_SENTENCE_END, " ".join(block.split())):
      sentence = sentence.strip(" \"'(*_")
      if len(re.findall(r"\S*\w\S*", sentence)) > SENTENCE_WORDS:
        found.append((sentence, f"at most {SENTENCE_WORDS} words"))
      found += [(sentence, instead) for pattern, instead in DIALECT.items() if re.search(pattern, sentence)]
  return found


def test_a_fault_is_found_in_text_and_not_in_code():
  assert faults("# Title\n\n- It is a step. The second is none of them.\n") == [
    ("The second is none of them.", "is not a ...")
  ]
  assert not faults("Returns `(of a step)`: the value is `None` there.")


def test_a_long_sentence_is_found():
  assert faults("A " + "very " * SENTENCE_WORDS + "long sentence.")
  assert not faults("One sentence here. " * 30)


def test_the_texts_have_no_fault():
  found = {str(path.relative_to(ROOT)): [f for text in prose(path) for f in faults(text)] for path in FILES}
  assert not {path: hard for path, hard in found.items() if hard}


@pytest.mark.parametrize("page", [path for path in FILES if path.suffix == ".md"], ids=lambda path: path.name)
def test_a_page_is_short_and_has_each_heading_once(page):
  (text,) = prose(page)
  headings = collections.Counter(re.findall(r"(?m)^#+ +(.+?)\s*$", text.lower()))
  assert not [heading for heading, times in headings.items() if times > 1 and _CODE not in heading]
  assert len(page.read_text().split()) <= PAGE_WORDS
