"""Imports among the packages, what each may know of, and every suite's imports."""

import ast
import importlib
import pathlib
import re

import pytest

import benchmarks.__main__

ROOT = pathlib.Path(__file__).parents[1]
FILES = [file for top in ("mpjax", "tests", "benchmarks", "scripts") for file in (ROOT / top).rglob("*.py")]

# What a folder's files do not have, but for those named: a pattern of it.
NEVER = {
  "a lowering rule": ("mpjax", r"\bmlir\b", "products/_primitives"),
  "a transform in a policy": ("mpjax/policy", r"mpjax\.(optim|loss_scale|casting|products)", ""),
  # Layer-wise scaling has to know what its functions close over, and whether they communicate.
  "a program in a loss scale": ("mpjax/loss_scale", r"mpjax\.jaxpr", "loss_scale/_layerwise"),
  "the operands of a loop": (
    "mpjax",
    r"\b(scan_parts|while_parts|scan_counts|cond_nconsts|num_consts)\b",
    "_compat jaxpr/__init__ jaxpr/_bodies casting/_emit step/_gather_where_read",
  ),
  "a model or dataset by name": ("mpjax/train", r"\bzoo\b", "train/config/__init__"),
  "the trainer, below it": ("mpjax/zoo", r"^ *(from|import) mpjax\.train", ""),
  "an attribute set on what is not ours": (
    "mpjax",
    r"\bsetattr\(|__class__ = |\bvars\(\w+\)\[",
    "_own_autocast",
  ),
}


def imports(file):
  """(package, module, name) of what a file imports from a private module of another package."""
  here = ".".join(file.relative_to(ROOT).parent.parts)
  for node in ast.walk(ast.parse(file.read_text())):
    module = getattr(node, "module", None) or ""
    if not isinstance(node, ast.ImportFrom) or not module.startswith("mpjax.") or "._" not in module:
      continue
    package = module.partition("._")[0]
    if here != package and not here.startswith(package + "."):
      yield from ((package, module, alias.name) for alias in node.names)


def test_what_a_package_exports_is_imported_from_it():
  found = {
    f"{file.relative_to(ROOT)}: {module}.{name}"
    for file in FILES
    for package, module, name in imports(file)
    if hasattr(importlib.import_module(package), name)
  }
  assert not found, f"import these from the package: {sorted(found)}"


def reached(module):
  """The modules of mpjax that an import of one runs, packages on the way among them."""
  found, left = set(), [module]
  while left:
    name = left.pop()
    path = ROOT.joinpath(*name.split("."))
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    if name in found or name == "mpjax" or not file.exists():
      continue
    found.add(name)
    left.append(name.rpartition(".")[0])
    for node in ast.parse(file.read_text()).body:
      if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "mpjax":
        left += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
  return found


def test_policies_import_no_transform_of_an_optimiser():
  assert "mpjax.fp8._recipe" in reached("mpjax.policy")
  above = ("mpjax.optim", "mpjax.loss_scale", "mpjax.casting", "mpjax.step")
  assert not [name for name in reached("mpjax.policy") if name.startswith(above)]


def test_what_a_folder_must_not_know_of():
  for name, (folder, pattern, allowed) in NEVER.items():
    files = (
      file for file in (ROOT / folder).rglob("*.py") if re.search(pattern, file.read_text(), re.MULTILINE)
    )
    found = {str(file.relative_to(ROOT / "mpjax").with_suffix("")) for file in files}
    assert found == set(allowed.split()), name


@pytest.mark.slow
def test_every_suite_of_the_benchmarks_can_be_imported():
  for name in benchmarks.__main__.SUITES:
    suite = importlib.import_module(f"benchmarks.{name}")
    assert hasattr(suite, "rows") or hasattr(suite, "run"), name
