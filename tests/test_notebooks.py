"""The notebooks: each runs from top to bottom, and is stored with what it shows."""

import json
import pathlib
import re

import jax
import pytest

ROOT = pathlib.Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))
by_name = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def code_cells(notebook):
  return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


@pytest.mark.slow
@by_name
def test_it_runs(path, tmp_path, monkeypatch):
  matplotlib = pytest.importorskip("matplotlib")
  matplotlib.use("agg")
  monkeypatch.chdir(tmp_path)
  monkeypatch.setattr("subprocess.check_call", lambda *_: pytest.fail("a notebook installs something"))
  names = {"__name__": "__main__"}
  for number, cell in enumerate(code_cells(json.loads(path.read_text())), 1):
    exec(compile("".join(cell["source"]), f"cell_{number}", "exec"), names)
  matplotlib.pyplot.close("all")
  jax.clear_caches()
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
