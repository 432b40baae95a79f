"""The set-up says what it installs while it does, and what pip said where it fails."""

import importlib.util
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]
SPEC = importlib.util.spec_from_file_location("bootstrap", ROOT / "scripts" / "bootstrap.py")
bootstrap = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(bootstrap)


def a_python(folder, said, status):
  """A Python whose pip says some lines."""
  python = folder / "python"
  python.write_text(f"#!/bin/sh\ncat <<'END'\n{said}\nEND\nexit {status}\n")
  python.chmod(0o755)
  return python


def test_large_downloads_and_the_installation_are_shown(tmp_path, capsys):
  said = """Collecting jax>=0.10
  Downloading jax-0.12.0.1-py3-none-any.whl.metadata (13 kB)
  Downloading jaxlib-0.12.0-cp313-cp313-manylinux_2_27_x86_64.whl (85.1 MB)
  Using cached scipy-1.17.1-cp313-cp313-manylinux_2_27_x86_64.whl (35 MB)
Installing collected packages: scipy, jaxlib, jax
Successfully installed jax-0.12.0.1 jaxlib-0.12.0 scipy-1.17.1"""
  bootstrap.install(a_python(tmp_path, said, 0), "-e", ".[train]")
  lines = [line.split(" s  ")[1] for line in capsys.readouterr().out.splitlines()]
  assert lines == ["jaxlib, 85.1 MB", "scipy, 35 MB", "installing 3 packages"]


def test_a_failure_shows_what_pip_said(tmp_path, capsys):
  said = "Collecting jax>=0.10\nERROR: No matching distribution found for jax>=0.10"
  with pytest.raises(subprocess.CalledProcessError):
    bootstrap.install(a_python(tmp_path, said, 1), "-e", ".[train]")
  assert "No matching distribution" in capsys.readouterr().err


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
  ran, status = [], []
  monkeypatch.setattr(bootstrap, "environment", lambda base, extra, constraints=None: "python")
  monkeypatch.setattr(bootstrap, "newer_python", lambda: "newer")
  monkeypatch.setattr(bootstrap, "INTERNALS", ("jaxpr",))
  monkeypatch.setattr(bootstrap, "run", lambda python, *line: ran.append(list(line)) or len(ran) in status)
  monkeypatch.setattr("sys.argv", ["bootstrap.py", "test", *arguments])
  assert bootstrap.main() == 0
  assert [line for line in ran if line[0] == "pytest"] == suites
  assert ("on two free cores" in capsys.readouterr().out) == ("-k" not in arguments)
  checked = [line[0] for line in ran if line[0] != "pytest"]
  assert checked == ([] if "-k" in arguments else ["ruff", "ruff", "mypy", "mkdocs"])
  status.append(len(ran) + 1)  # the first check fails
  assert bootstrap.main() == 1


def test_what_a_process_compiles_is_kept_in_its_environment(tmp_path, monkeypatch):
  monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
  given = bootstrap.variables(str(tmp_path / "venv" / "bin" / "python"))
  code = "import sys; print(sys.dont_write_bytecode, sys.pycache_prefix)"
  done = subprocess.run([sys.executable, "-c", code], env=given, capture_output=True, text=True, check=True)
  assert done.stdout.split() == ["False", str(tmp_path / "venv" / "bytecode")]
