"""Runs the notebooks of docs/ and stores their outputs: python scripts/notebooks.py [NAME.ipynb ...].

Cells run in this process, one after the other, without Jupyter. A kernel would import JAX and compile again
for each notebook, and would hide warnings, which are errors here.
"""

import ast
import base64
import contextlib
import copy
import io
import json
import os
import pathlib
import sys
import tempfile
import warnings
from collections.abc import Iterator
from typing import Any

FOLDER = pathlib.Path(__file__).resolve().parents[1] / "docs" / "notebooks"


def main() -> None:
  """Runs the named notebooks, or all, and stores their outputs."""
  os.environ.setdefault("JAX_PLATFORMS", "cpu")
  sys.path.insert(0, str(FOLDER.parents[1]))  # the checkout's own mpjax
  warnings.simplefilter("error")
  for path in [pathlib.Path(name) for name in sys.argv[1:]] or sorted(FOLDER.glob("*.ipynb")):
    notebook = json.loads(path.read_text(encoding="utf-8"))
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
      executed = execute(notebook)
    path.write_text(json.dumps(executed, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print(f"{path}: {path.stat().st_size / 1e3:.0f} kB", flush=True)


def execute(notebook: dict[str, Any]) -> dict[str, Any]:
  """Runs the code of a notebook in a new namespace, and returns the notebook with its outputs.

  Raises:
    Exception: whatever a cell raises.
  """
  import matplotlib

  matplotlib.use("agg")
  executed, names = copy.deepcopy(notebook), {"__name__": "__main__"}
  cells = [cell for cell in executed["cells"] if cell["cell_type"] == "code"]
  for number, cell in enumerate(cells, 1):
    outputs = list(_run("".join(cell["source"]), names, number))
    cell.update(execution_count=number, outputs=outputs)
  return executed


def _run(source: str, names: dict[str, Any], number: int) -> Iterator[dict[str, Any]]:
  """Runs a cell and yields its outputs: printed text, figures, and the value of the last expression."""
  import matplotlib.pyplot as plt

  tree = ast.parse(source)
  file, last, value = f"cell_{number}", None, None
  if tree.body and isinstance(end := tree.body[-1], ast.Expr):
    last = ast.Expression(end.value)
    del tree.body[-1]
  with contextlib.redirect_stdout(io.StringIO()) as printed:
    exec(compile(tree, file, "exec"), names)
    if last is not None:
      value = eval(compile(last, file, "eval"), names)
  if printed.getvalue():
    yield {"output_type": "stream", "name": "stdout", "text": printed.getvalue().splitlines(keepends=True)}
  for figure in map(plt.figure, plt.get_fignums()):
    png = io.BytesIO()
    figure.savefig(png, format="png", dpi=80, bbox_inches="tight", metadata={"Software": None})
    plt.close(figure)
    data: dict[str, Any] = {"image/png": base64.b64encode(png.getvalue()).decode() + "\n"}
    yield {"output_type": "display_data", "metadata": {}, "data": data}
  # A semicolon at the end hides the value, as in Jupyter.
  if value is not None and not source.rstrip().endswith(";"):
    data = {"text/plain": repr(value).splitlines(keepends=True)}
    if hasattr(value, "_repr_html_"):
      data["text/html"] = value._repr_html_().splitlines(keepends=True)
    yield {"output_type": "execute_result", "execution_count": number, "metadata": {}, "data": data}


if __name__ == "__main__":
  main()
