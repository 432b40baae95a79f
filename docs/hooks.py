"""Adds files of the repository that pages link, and notebooks, to the site.

A page may link to any file of the repository, as it does on a code host (`../benchmarks/README.md`).
The file becomes a page under `repository/`. A link to a file that is not there fails the strict build.
"""

import json
import pathlib
import posixpath
import re
from collections.abc import Iterator
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = pathlib.Path(__file__).resolve().parents[1]
PREFIX = "repository/"
LINK = re.compile(r"(\]\()(?!\w+:|#|/)([^)#\s]+)(#[^)\s]*)?(?=\))")
PICTURES = (".png", ".svg", ".jpg")
LANGUAGES = {
  ".py": "python",
  ".yaml": "yaml",
  ".yml": "yaml",
  ".toml": "toml",
  ".sh": "bash",
  ".sbatch": "bash",
}


def on_config(config: MkDocsConfig) -> MkDocsConfig:
  """Adds the notebooks to the last section of the navigation."""
  [section] = (config.nav or [])[-1].values()
  section += [f"notebooks/{path.stem}.md" for path in notebooks()]
  return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
  """Adds the notebooks, and each file of the repository that a page links to."""
  for path in notebooks():
    if source := files.get_file_from_path(f"notebooks/{path.name}"):
      files.remove(source)
    files.append(File.generated(config, f"notebooks/{path.stem}.md", content=notebook(path)))
  if notebooks():
    lines = "\n".join(f"- [{path.stem}]({path.stem}.md)" for path in notebooks())
    files.append(File.generated(config, "notebooks/index.md", content=f"# Notebooks\n\n{lines}\n"))
  waiting = [uri for uri in nav_pages(config.nav) if uri.startswith(PREFIX)]
  for file in files.documentation_pages():
    waiting += targets(file.content_string, file.src_uri)
  done: set[str] = set()
  while waiting:
    uri = waiting.pop()
    content = text_of(uri)
    if uri in done or content is None:
      continue
    done.add(uri)
    if uri.endswith(PICTURES):
      files.append(File.generated(config, uri, abs_src_path=str(ROOT / uri.removeprefix(PREFIX))))
    else:
      files.append(File.generated(config, uri, content=content))
      waiting += targets(content, uri)
  return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
  """Turns the links that leave docs/ into links to the pages that stand for the files."""
  uri = page.file.src_uri
  if is_source(uri):
    return markdown

  def replaced(match: re.Match[str]) -> str:
    if (found := target(match[2], uri)) is None:
      return match[0]
    return match[1] + posixpath.relpath(found, posixpath.dirname(uri) or ".") + (match[3] or "")

  markdown = LINK.sub(replaced, markdown)
  return markdown if uri.startswith("notebooks/") else indented_by_four(markdown)


def indented_by_four(markdown: str) -> str:
  """Returns a page whose lists are indented twice as far: Python-Markdown asks for four spaces."""
  lines = []
  in_list, fence, more = False, "", 0
  for line in markdown.split("\n"):
    text = line.lstrip(" ")
    opened = re.match(r"`{3,}", text)
    if not fence:
      if text and not line.startswith(" "):
        in_list = re.match(r"(-|\d+\.) ", text) is not None
      more = len(line) - len(text) if in_list else 0
      fence = opened[0] if opened else ""
    elif text.rstrip() == fence:
      fence = ""
    lines.append(" " * more + line if text else line)
  return "\n".join(lines)


def target(link: str, uri: str) -> str | None:
  """Returns the page that a link means, or None where MkDocs finds it by itself."""
  outside = uri.startswith(PREFIX)
  path = uri.removeprefix(PREFIX) if outside else f"docs/{uri}"
  found = posixpath.normpath(posixpath.join(posixpath.dirname(path), link))
  if found.startswith("docs/"):
    if (ROOT / found).is_dir():
      found += "/index.md"
    shown = re.sub(r"\.ipynb$", ".md", found.removeprefix("docs/"))
    return shown if outside or found.endswith(".ipynb") else None
  if (ROOT / found).is_dir():
    found += "/README.md"
  # Under its own name MkDocs would make it the index of a section.
  found = re.sub(r"README\.md$", "readme.md", found)
  return f"{PREFIX}{found}" + ("" if found.endswith((".md", *PICTURES)) else ".md")


def targets(text: str, uri: str) -> list[str]:
  """Returns the pages for files outside docs/ that a page links to."""
  if is_source(uri):
    return []
  found = (target(match[2], uri) for match in LINK.finditer(text))
  return [page for page in found if page is not None and page.startswith(PREFIX)]


def is_source(uri: str) -> bool:
  """Returns whether a page shows a file that is not Markdown, in which nothing is a link."""
  return uri.startswith(PREFIX) and pathlib.PurePath(uri).with_suffix("").suffix != ""


def text_of(uri: str) -> str | None:
  """Returns the Markdown of a page for a file or folder; None if there is none."""
  path = ROOT / re.sub(r"readme\.md$", "README.md", uri.removeprefix(PREFIX))
  if path.suffix in PICTURES:
    return "" if path.is_file() else None
  if path.is_file():
    return path.read_text()
  if path.name == "README.md" and path.parent.is_dir():
    named = sorted(item.name for item in path.parent.iterdir() if item.is_file())
    lines = [f"- [{name}]({name})" for name in named if not name.startswith(("_", "."))]
    return "\n".join([f"# {path.parent.relative_to(ROOT)}", "", *lines, ""])
  source = path.with_suffix("")
  if path.suffix == ".md" and source.is_file():
    language = LANGUAGES.get(source.suffix, "text")
    return f"# {source.relative_to(ROOT)}\n\n````{language}\n{source.read_text().rstrip()}\n````\n"
  return None


def nav_pages(items: Any) -> Iterator[str]:
  """Yields the files of a navigation."""
  if isinstance(items, str):
    yield items
  else:
    for item in items.values() if isinstance(items, dict) else items or ():
      yield from nav_pages(item)


def notebooks() -> list[pathlib.Path]:
  """Returns the notebooks of the site."""
  return sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))


def notebook(path: pathlib.Path) -> str:
  """Returns a notebook as Markdown, with the outputs that it was saved with."""
  parts = []
  for cell in json.loads(path.read_text())["cells"]:
    source = "".join(cell["source"])
    if cell["cell_type"] == "markdown":
      parts.append(source)
    elif cell["cell_type"] == "code" and source:
      parts.append(f"````python\n{source}\n````")
      parts += [shown for output in cell["outputs"] if (shown := output_of(output))]
  return "\n\n".join(parts) + "\n"


def output_of(output: dict[str, Any]) -> str:
  """Returns what a cell showed, in the richest of its forms that a page can have."""
  data = output.get("data", {"text/plain": output.get("text", "")})
  if "text/html" in data:
    return f'<div class="output">\n{"".join(data["text/html"])}\n</div>'
  if "image/svg+xml" in data:
    return f'<div class="output">\n{"".join(data["image/svg+xml"])}\n</div>'
  if "image/png" in data:
    return f"![output](data:image/png;base64,{''.join(data['image/png']).strip()})"
  text = "".join(data.get("text/plain", "")).rstrip()
  return f"````text\n{text}\n````" if text else ""
