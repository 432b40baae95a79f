"""Finds words and sentences that make the texts hard to read: `python -m tests.words [PATH ...]`.

It reads the prose of Markdown pages, notebooks and Python files (docstrings, comments, messages). Code blocks,
quoted output, inline code and link targets are not read.
"""

import argparse
import ast
import collections
import dataclasses
import io
import json
import pathlib
import re
import sys
import tokenize
from collections.abc import Callable, Iterator

ROOT = pathlib.Path(__file__).parents[1]
# What the test reads. Folders are searched for Markdown pages and Python files.
SCOPE = ("README.md", "CONTRIBUTING.md", "docs", "mpjax", "scripts", "examples")
SENTENCE_WORDS = 40
PAGE_WORDS = 2500
# A string of fewer words is a name, a key or a part of a table.
_MESSAGE_WORDS = 4

_IRREGULAR = (
  "been|begun|broken|brought|built|chosen|come|cost|cut|done|drawn|fallen|fed|felt|fit|found|given|gone|"
  "got|grown|had|held|hit|kept|known|led|left|let|lost|made|meant|met|paid|put|read|run|said|seen|sent|"
  "set|shown|shrunk|spent|split|spread|stood|sunk|taken|thought|thrown|told|understood|won|written"
)
_PARTICIPLE = rf"(?:yet |only |always |ever |\w+ly )?(?:\w+ed|{_IRREGULAR})\b"
_END = r"(?=\s*(?:[.,;:)]|$))"
# Kind of fault: what it looks like (case counts, so that `None` is no fault) and what to write.
DIALECT = {
  "has not": (rf"\b(?:has|have|had) not\b(?! {_PARTICIPLE})", "does not have"),
  "is none": (r"(?<![Tt]here )\b(?:is|are|was|were|be) none\b", "say what it is, or: is not a ..."),
  "is no": (
    r"(?<![Tt]here )\b(?:is|are|was|were) no "
    r"(?!(?:more|less|longer|fewer|larger|smaller|greater|better|worse|higher|lower|later|earlier|faster|slower|such)\b)",
    "is not a ...",
  ),
  "of before": (
    r"(?<!instead )(?<!ahead )(?<!\bas )\bof (?:before|now)\b",
    "earlier, older, previous, present",
  ),
  "beside": (r"(?<![\w-])[Bb]esides?(?![\w-])", "also, in addition; next to, with"),
  "Of ...": (
    r"^Of (?!course)|[;:] of (?:an?|the|each|every|all|those|these|what|two|its)\b",
    "begin with the subject",
  ),
  "name: of": (r"^[\w*, ]+(?: \([^)]*\))?: of\b", "name: the ... of"),
  "So is": (r"^So (?:is|are|has|have|does|do|was|were|can|will)\b(?! not)", "name the subject, then: also"),
  "Those of": (r"^(?:Those|That) of\b", "repeat the noun"),
  "such a one": (
    rf"\b(?:[Ss]uch an? one|[Ss]uch one|(?:another|one|two|many|most|all) such{_END})",
    "name it",
  ),
  "that there are": (
    rf"\b(?:that|which|whatever|what|as) there (?:are|is|was|were)\b(?: not\b)?{_END}",
    "leave it out, or: existing",
  ),
  "archaic": (
    r"\b(?:[Ww]hereof|[Tt]hereof|[Hh]ereof|[Ww]herein|[Tt]herein|[Ll]est|[Aa]mongst|[Ww]hilst|[Aa]ught|[Nn]aught|for want of)\b",
    "the plain word",
  ),
}


@dataclasses.dataclass(frozen=True)
class Fault:
  """One place that is hard to read."""

  path: str
  line: int
  kind: str
  phrase: str
  instead: str

  def __str__(self) -> str:
    """Returns `file:line: kind: phrase (what to write)`."""
    return f"{self.path}:{self.line}: {self.kind}: {self.phrase} ({self.instead})"


@dataclasses.dataclass
class Block:
  """A paragraph, list item, table cell, heading, docstring paragraph, comment or message."""

  lines: list[tuple[int, str]]
  heading: str = ""

  def sentences(self) -> Iterator[tuple[str, Callable[[int], int]]]:
    """Yields each sentence, and a function from a place in it to the number of its line."""
    text, starts = "", []
    for number, line in self.lines:
      starts.append((len(text), number))
      text += line.strip() + " "
    begin = 0
    for end in [*(m.end() for m in re.finditer(_SENTENCE_END, text)), len(text)]:
      sentence = text[begin:end].strip(_AROUND)
      first = text.index(sentence, begin)
      if sentence:
        yield sentence, lambda at, first=first: max(n for start, n in starts if start <= first + at)
      begin = end


_AROUND = " \"'(*_"  # what may come before a sentence or after it
_SENTENCE_END = r"(?<!e\.g\.)(?<!i\.e\.)(?<!vs\.)(?<!cf\.)(?<=[.!?])[)\"'*_]*\s+(?=[A-Z\"'(*\[\u2039])"
# What stands for code in a sentence; a sentence may begin with it.
_CODE = "\u2039code\u203a"


def _plain(line: str) -> str:
  """Returns a line of Markdown or of a docstring without code, link targets, pictures and HTML."""
  line = re.sub(r"(`+)(?:.+?)\1", _CODE, line)
  line = re.sub(r"!\[[^\]]*\]\([^)]*\)", "", line)
  line = re.sub(r"\[([^\]]*)\](?:\([^)]*\)|\[[^\]]*\])", r"\1", line)
  line = re.sub(r"<https?://[^>]*>|https?://\S+", _CODE, line)
  line = re.sub(r"</?[a-zA-Z][^>]*>|<!--.*?-->", "", line)
  return re.sub(r"\*\*|__(?=\w)|(?<=\w)__", "", line)


def _without_code(text: str) -> list[tuple[int, str]]:
  """Returns the numbered lines outside fenced code, doctests and HTML comments; code lines are empty."""
  text = re.sub(r"<!--.*?-->", lambda m: "\n" * m[0].count("\n"), text, flags=re.DOTALL)
  # Inline code may go over a line's end.
  lines, fence, doctest = [], "", False
  for number, line in enumerate(text.splitlines(), 1):
    mark = re.match(r"\s*(`{3,}|~{3,})", line)
    if fence:
      if mark and mark[1].startswith(fence) and line.strip() == mark[1]:
        fence = ""
      line = ""
    elif mark:
      fence, line = mark[1], ""
    doctest = line.strip() != "" and (doctest or line.lstrip().startswith(">>>"))
    lines.append((number, "" if doctest else line))
  return lines


def _inline_code(lines: list[tuple[int, str]]) -> list[tuple[int, str]]:
  """Replaces inline code, also where it goes over the end of a line."""
  result, i = [], 0
  while i < len(lines):
    number, line = lines[i]
    if line.count("`") % 2 and i + 1 < len(lines) and lines[i + 1][1].count("`") % 2:
      head, _, _ = line.rpartition("`")
      _, _, tail = lines[i + 1][1].partition("`")
      result.append((number, _plain(f"{head}{_CODE}")))
      lines = [*lines[: i + 1], (lines[i + 1][0], f"{' ' * 80}{tail}"), *lines[i + 2 :]]
    else:
      result.append((number, _plain(line)))
    i += 1
  return result


def markdown_blocks(text: str) -> Iterator[Block]:
  """Yields the prose of a Markdown page."""
  lines = _without_code(text)
  if lines and lines[0][1] == "---":  # front matter
    end = next(i for i, (_, line) in enumerate(lines[1:], 1) if line == "---")
    lines = [(number, "") for number, _ in lines[: end + 1]] + lines[end + 1 :]
  block: list[tuple[int, str]] = []
  in_list = False
  for number, line in _inline_code(lines):
    if line.strip() and not line.startswith(" "):
      in_list = False
    elif line.startswith("    ") and not block and not in_list:
      continue  # indented code
    item = re.match(r"\s*(?:[-*+]|\d+[.)])\s+|\s*>\s?|\s*(?:!!!|\?\?\?)\+? \w+", line)
    if line.startswith("#") or line.lstrip().startswith(("|", ":::")) or not line.strip() or item:
      if block:
        yield Block(block)
      block = []
    if line.startswith("#"):
      yield Block(
        [(number, line.lstrip("# "))],
        heading=re.sub(r"\s*\{[^}]*\}\s*$", "", lines[number - 1][1].lstrip("# ")),
      )
    elif line.lstrip().startswith("|"):
      for cell in re.split(r"(?<!\\)\|", line.strip().strip("|")):
        if re.search(r"[A-Za-z]", cell):
          yield Block([(number, cell)])
    elif item:
      block, in_list = [(number, line[item.end() :])], True
    elif line.strip() and not line.lstrip().startswith(":::"):
      block.append((number, line))
  if block:
    yield Block(block)


_SECTION = re.compile(
  r"\s*(?:Args|Arguments|Attributes|Returns|Yields|Raises|Warns|Note|Notes|Example|Examples):$"
)


def _docstring_blocks(text: str, first_line: int) -> Iterator[Block]:
  """Yields the paragraphs of a docstring; each argument is one of its own."""
  block: list[tuple[int, str]] = []
  section, item, code = False, -1, -1
  for number, line in _inline_code(_without_code(text)):
    indent = len(line) - len(line.lstrip())
    if code >= 0 and line.strip() and indent <= code:
      code = -1
    if not line.strip() or code >= 0 or line.lstrip().startswith("|"):
      starts, content = True, ""
    elif _SECTION.match(line):
      starts, content, section, item = True, "", True, -1
    else:
      item = indent if section and item < 0 else item
      marker = re.match(r"\s*(?:[-*+]|\d+[.)])\s+", line)
      starts, content = bool(marker) or (section and indent <= item), line[marker.end() if marker else 0 :]
      if section and indent < item:
        section = False
    if content and content.rstrip().endswith("::"):
      code = indent
    if starts and block:
      yield Block(block)
      block = []
    if content:
      block.append((first_line + number - 1, content))
  if block:
    yield Block(block)


def _string(node: ast.expr) -> str | None:
  """Returns the text of a string, with code in place of what is filled in; `None` for another node."""
  if isinstance(node, ast.Constant) and isinstance(node.value, str):
    return node.value
  if isinstance(node, ast.JoinedStr):
    return "".join(_string(v) or _CODE for v in node.values)
  return None


def _message_blocks(tree: ast.Module) -> Iterator[Block]:
  """Yields the strings of a module that read as sentences, docstrings left out."""
  inside: set[ast.AST] = set()
  for node in ast.walk(tree):
    if isinstance(node, ast.Expr) and _string(node.value) is not None:
      inside.update(ast.walk(node.value))
    elif isinstance(node, ast.JoinedStr):
      inside.update(child for child in ast.walk(node) if child is not node)
    elif isinstance(node, ast.Call) and re.match(r"re\.|_?pattern", ast.unparse(node.func)):
      inside.update(child for argument in node.args for child in ast.walk(argument))
  for node in ast.walk(tree):
    if node in inside or not isinstance(node, ast.expr):
      continue
    text = _string(node)
    if text is None or len(re.findall(r"(?<!\S)[A-Za-z]+(?=[\s.,;:)]|$)", text)) < _MESSAGE_WORDS:
      continue
    if re.search(r"</?\w+[ >]|[{};]\s*\n|^\s*(?:import|from) ", text):  # HTML, CSS, scripts, code
      continue
    for offset, line in enumerate(_inline_code(list(enumerate(text.split("\n"))))):
      if line[1].strip():
        yield Block([(node.lineno + (offset if "\n" in text else 0), line[1])])


def _comment_blocks(text: str) -> Iterator[Block]:
  """Yields the comments of a module; those on lines that follow each other are one."""
  block: list[tuple[int, str]] = []
  own = False
  for token in tokenize.generate_tokens(io.StringIO(text).readline):
    if token.type != tokenize.COMMENT or re.match(r"#(?:!|\s*(?:noqa|type:|ruff:|fmt:))", token.string):
      continue
    alone = token.line.lstrip().startswith("#")
    if block and not (alone and own and token.start[0] == block[-1][0] + 1):
      yield Block(_inline_code(block))
      block = []
    block.append((token.start[0], token.string.lstrip("# ")))
    own = alone
  if block:
    yield Block(_inline_code(block))


def python_blocks(text: str) -> Iterator[Block]:
  """Yields the prose of a module: docstrings, comments and messages."""
  tree = ast.parse(text)
  for node in ast.walk(tree):
    if isinstance(node, ast.Expr) and (docstring := _string(node.value)) is not None:
      yield from _docstring_blocks(docstring, node.lineno)
  yield from _comment_blocks(text)
  yield from _message_blocks(tree)


def notebook_text(text: str) -> str:
  """Returns the Markdown cells of a notebook, each line on the line of the file that has it."""
  lines, markdown = [], False
  for line in text.splitlines():
    if kind := re.match(r'\s*"cell_type": "(\w+)"', line):
      markdown = kind[1] == "markdown"
    source = re.fullmatch(r'\s*("(?:[^"\\]|\\.)*"),?', line)
    lines.append(json.loads(source[1]).rstrip("\n") if markdown and source else "")
  return "\n".join(lines)


def _words(sentence: str) -> int:
  return len([word for word in sentence.split() if re.search(r"\w", word)])


def faults_of(text: str, path: str) -> list[Fault]:
  """Returns the faults in a text; `path` says which kind of file it is."""
  page = path.endswith(".md")
  blocks = python_blocks if path.endswith(".py") else markdown_blocks
  found, headings = [], collections.Counter()
  for block in blocks(notebook_text(text) if path.endswith(".ipynb") else text):
    for sentence, line_of in block.sentences():
      for kind, (pattern, instead) in DIALECT.items():
        if kind == "Of ..." and re.match(DIALECT["name: of"][0], sentence):
          continue
        for match in re.finditer(pattern, sentence):
          around = re.search(r"(?:\S+ ){0,4}\S*$", sentence[: match.start()])[0] + match[0]
          around += re.match(r"\S*(?: \S+){0,4}", sentence[match.end() :])[0]
          found.append(Fault(path, line_of(match.start()), kind, f'"{around}"', instead))
      if (words := _words(sentence)) > SENTENCE_WORDS:
        begin = " ".join(sentence.split()[:8])
        found.append(
          Fault(
            path, line_of(0), "long sentence", f'"{begin} ..."', f"{words} words; at most {SENTENCE_WORDS}"
          )
        )
    if block.heading:
      if headings[block.heading.lower()]:
        line = block.lines[0][0]
        found.append(
          Fault(path, line, "repeated heading", f'"{block.heading}"', "say what is different here")
        )
      headings[block.heading.lower()] += 1
  if page and (words := len(text.split())) > PAGE_WORDS:
    found.append(Fault(path, 1, "long page", f"{words} words", f"at most {PAGE_WORDS}"))
  return sorted(found, key=lambda fault: fault.line)


def files(paths: list[str]) -> Iterator[pathlib.Path]:
  """Yields the Markdown pages, Python files and notebooks in paths and folders."""
  for path in map(pathlib.Path, paths):
    found = (
      [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.suffix in (".md", ".py", ".ipynb"))
    )
    if not found:
      raise SystemExit(f"{path}: no Markdown page, Python file or notebook")
    yield from found


def faults(paths: list[str]) -> list[Fault]:
  """Returns the faults in files and folders."""
  found = []
  for path in files(paths):
    absolute = path.resolve()
    name = absolute.relative_to(ROOT) if absolute.is_relative_to(ROOT) else path
    found += faults_of(path.read_text(), str(name))
  return found


def _table(found: list[Fault]) -> str:
  """Returns the number of faults by kind and by folder."""
  folder = lambda path: "/".join(pathlib.PurePath(path).parts[:-1][:2]) or path
  counts = collections.Counter((fault.kind, folder(fault.path)) for fault in found)
  folders = sorted({place for _, place in counts})
  kinds = [*DIALECT, "long sentence", "long page", "repeated heading"]
  kinds = [kind for kind in kinds if any(counts[kind, place] for place in folders)]
  rows = [["", *kinds, "all"]]
  for place in folders:
    row = [counts[kind, place] for kind in kinds]
    rows.append([place, *map(str, row), str(sum(row))])
  totals = [sum(counts[kind, place] for place in folders) for kind in kinds]
  rows.append(["all", *map(str, totals), str(sum(totals))])
  widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
  return "\n".join(
    "  ".join(w.rjust(n) if i else w.ljust(n) for i, (w, n) in enumerate(zip(r, widths, strict=True)))
    for r in rows
  )


def main() -> int:
  """Prints the faults in paths, or their number by kind and folder."""
  parser = argparse.ArgumentParser(prog="python -m tests.words", description=__doc__.splitlines()[0])
  parser.add_argument("paths", nargs="*", help="files and folders; all that the test reads if there are none")
  parser.add_argument("--count", action="store_true", help="only print the number of faults")
  options = parser.parse_args()
  found = faults(options.paths or [str(ROOT / path) for path in SCOPE])
  if found:
    print(_table(found) if options.count else "\n".join(map(str, found)))
  return min(len(found), 1)


if __name__ == "__main__":
  sys.exit(main())
