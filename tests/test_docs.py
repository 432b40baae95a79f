"""The snippets of README and docs run as they stand, each page from top to bottom."""

import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parents[1]
PAGES = sorted((ROOT / "docs").glob("*.md"))


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_snippets_of_a_page_run(page, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)  # some write files
  text = page.read_text()
  # A language with a library's name behind it (python torch) shows what is to be replaced.
  blocks = list(re.finditer(r"```python\n(.*?)```", text, re.DOTALL))
  assert blocks
  names = {}
  for block in blocks:
    line = text[: block.start()].count("\n") + 1
    exec(compile("\n" * line + block[1], str(page), "exec"), names)


@pytest.mark.parametrize("page", [*PAGES, ROOT / "README.md"], ids=lambda page: page.name)
def test_every_name_of_mpjax_on_a_page_exists(page):
  import mpjax

  for name in set(re.findall(r"\bmpjax\.([A-Za-z_]\w*)", page.read_text())):
    assert hasattr(mpjax, name), name


@pytest.mark.parametrize(
  "page", [*PAGES, ROOT / "README.md", ROOT / "benchmarks" / "README.md"], ids=lambda page: page.name
)
def test_every_file_on_a_page_exists(page):
  text = page.read_text()
  named = re.findall(r"\b((?:docs|benchmarks|scripts|configs)/[\w./-]+\.\w+)", text)
  linked = [page.parent / link for link in re.findall(r"\]\(([\w./-]+)\)", text)]
  for path in [*(ROOT / name for name in named), *linked]:
    assert path.exists(), path
