"""The notebooks: each runs from top to bottom, and shows what is stored in it."""

import importlib.util
import json
import pathlib
import re

import jax
import pytest

ROOT = pathlib.Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))
SPEC = importlib.util.spec_from_file_location("notebooks", ROOT / "scripts" / "notebooks.py")
notebooks = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(notebooks)

by_name = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def code_cells(notebook):
  return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def kinds(cell):
  """What a cell shows, without the content: figures depend on versions."""
  return [(o["output_type"], sorted(o.get("data", ()))) for o in cell["outputs"]]


@pytest.mark.slow
@by_name
def test_it_runs_and_shows_what_is_stored(path, tmp_path, monkeypatch):
  pytest.importorskip("matplotlib")
  monkeypatch.chdir(tmp_path)
  monkeypatch.setattr("subprocess.check_call", lambda *_: pytest.fail("a notebook installs something"))
  stored = json.loads(path.read_text())
  found = notebooks.execute(stored)
  jax.clear_caches()
  assert [kinds(cell) for cell in code_cells(found)] == [kinds(cell) for cell in code_cells(stored)]
  assert list(tmp_path.iterdir()) == []


@by_name
def test_it_is_stored_whole_and_small(path):
  notebook = json.loads(path.read_text())
  assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
  assert len({cell["id"] for cell in notebook["cells"]}) == len(notebook["cells"])
  cells = code_cells(notebook)
  assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
  assert sum(bool(cell["outputs"]) for cell in cells) > 3
  assert path.stat().st_size < 150_000
  first, second = notebook["cells"][:2]
  assert first["source"][0].startswith("# ")
  assert second["source"][0].startswith("# Set-up.")
  for name in re.findall(r"\]\((\w+\.ipynb)\)", path.read_text()):
    assert (path.parent / name).exists()
