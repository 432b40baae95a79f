"""What the set-up runs, and where its processes keep what they compile."""

import importlib.util
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]
SPEC = importlib.util.spec_from_file_location("bootstrap", ROOT / "scripts" / "bootstrap.py")
bootstrap = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(bootstrap)


@pytest.mark.parametrize(
  ("arguments", "suites"),
  [
    ([], [["pytest", "-n", "2"]]),
    (["--all"], [["pytest", "-n", "2", "--all"], ["pytest", "-n", "2", "-m", "not slow", "tests/jaxpr"]]),
    (["-k", "skip", "tests/step"], [["pytest", "-k", "skip", "tests/step"]]),
  ],
  ids=str,
)
def test_what_is_run_after_test(arguments, suites, monkeypatch, capsys):
  ran, made, status = [], [], []
  monkeypatch.setattr(bootstrap, "newest_python", lambda: "newest")
  monkeypatch.setattr(bootstrap, "environment", lambda base, *_: made.append(base) or "python")
  monkeypatch.setattr(bootstrap, "INTERNALS", ("jaxpr",))
  monkeypatch.setattr(bootstrap, "run", lambda python, *line: ran.append(list(line)) or len(ran) in status)
  monkeypatch.setattr("sys.argv", ["bootstrap.py", "test", *arguments])
  assert bootstrap.main() == 0
  assert [line for line in ran if line[0] == "pytest"] == suites
  assert (
    made == ["newest", sys.executable][: len(suites)]
  )  # the oldest versions are not on every newer Python
  assert ("on two free cores" in capsys.readouterr().out) == ("-k" not in arguments)
  checked = [line[0] for line in ran if line[0] != "pytest"]
  assert checked == ([] if "-k" in arguments else ["ruff", "ruff", "mypy", "mkdocs"])
  status.append(len(ran) + 1)  # the first check fails
  assert bootstrap.main() == 1


def test_the_newest_python_that_starts_is_used(tmp_path, monkeypatch):
  for version, starts in (("3.13.0", False), ("3.13.1", True), ("3.12.4", True)):
    python = tmp_path / "versions" / version / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f"#!/bin/sh\nexit {int(not starts)}\n")
    python.chmod(0o755)
  monkeypatch.setenv("PYENV_ROOT", str(tmp_path))
  monkeypatch.setattr(bootstrap.shutil, "which", lambda name: None)
  monkeypatch.setattr(sys, "version_info", (3, 11, 7))
  assert bootstrap.newest_python() == str(tmp_path / "versions" / "3.13.1" / "bin" / "python")
  monkeypatch.setattr(sys, "version_info", (3, 13, 0))
  assert bootstrap.newest_python() == sys.executable


def test_an_environment_has_one_python(tmp_path, monkeypatch):
  made = {}

  def run(line):
    if line[1:3] == ["-m", "venv"]:
      folder = pathlib.Path(line[3])
      folder.mkdir()
      made[folder.name] = line[0]

  monkeypatch.setenv("MPJAX_VENV", str(tmp_path / "venv"))
  monkeypatch.setattr(bootstrap.subprocess, "check_call", run)
  for base, constraints in ((sys.executable, None), ("python3.99", None), (sys.executable, bootstrap.OLDEST)):
    bootstrap.environment(base, "test", constraints)
  assert made == {"venv": sys.executable, "venv-newest": "python3.99", "venv-oldest": sys.executable}


def test_what_a_process_compiles_is_kept_in_its_environment(tmp_path, monkeypatch):
  monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
  given = bootstrap.variables(str(tmp_path / "venv" / "bin" / "python"))
  code = "import sys; print(sys.dont_write_bytecode, sys.pycache_prefix)"
  done = subprocess.run([sys.executable, "-c", code], env=given, capture_output=True, text=True, check=True)
  assert done.stdout.split() == ["False", str(tmp_path / "venv" / "bytecode")]
