"""Sets up a virtual environment, then trains or tests: python3 scripts/bootstrap.py train|test [arguments].

The environment is `.venv` beside this folder, or `MPJAX_VENV`. It is made once, and brought up to date when
pyproject.toml changes. `MPJAX_EXTRAS` names further extras of the package, such as plan-tpu. Needs Python
3.11 or later with pip, and nothing else.

`test` runs the checks, the whole suite, and then what touches JAX's internals on the newest JAX that a newer
Python on this machine can install. `test --quick` runs some of every file; any other
arguments are pytest's.
"""

import hashlib
import os
import pathlib
import shutil
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
EXTRAS = {"train": "train", "test": "test"}
NEWER = (13, 12)  # the minor versions of Python 3 to look for, newest first
# Folders of tests/ whose subjects touch JAX's internals.
INTERNALS = ("jaxpr", "casting", "loss_scale", "step", "planner/analytic")


def main() -> int:
  """Sets up, runs the command and returns its exit status."""
  if sys.version_info < (3, 11):  # noqa: UP036 (run by whatever Python the user has)
    sys.exit(f"mpjax needs Python 3.11 or later; this is {sys.version.split()[0]}")
  if len(sys.argv) < 2 or sys.argv[1] not in EXTRAS:
    sys.exit(
      "usage: python3 scripts/bootstrap.py train [CONFIG.yaml] [key=value ...]"
      " | test [--quick | pytest arguments]"
    )
  command, arguments = sys.argv[1], sys.argv[2:]
  extras = ",".join(filter(None, (EXTRAS[command], os.environ.get("MPJAX_EXTRAS", ""))))
  python = environment(sys.executable, venv_folder(), extras)
  if command == "train":
    if not arguments or "=" in arguments[0]:
      arguments.insert(0, str(ROOT / "configs" / "gpt_stdlib.yaml"))
    return subprocess.call([python, str(ROOT / "scripts" / "train.py"), *arguments])
  if arguments:
    workers = ["-n", "2"] if arguments == ["--quick"] else []
    return subprocess.call([python, "-m", "pytest", *workers, *arguments], cwd=ROOT)
  whole = (["ruff", "check"], ["ruff", "format", "--check"], ["mypy"], ["pytest", "-n", "2"])
  for check in whole:
    if status := subprocess.call([python, "-m", *check], cwd=ROOT):
      return status
  return test_on_a_newer_python()


def test_on_a_newer_python() -> int:
  """Tests what touches JAX's internals on the JAX of a newer Python, if there is one.

  Returns:
    The exit status of the tests, 0 where there is no such Python.
  """
  newer = newer_python()
  if newer is None:
    print("no newer Python here: tested on one JAX alone", flush=True)
    return 0
  own = venv_folder()
  python = environment(newer, own.with_name(f"{own.name}-newer"), "test-core")
  versions = "import jax, sys; print(f'again on JAX {jax.__version__}, Python {sys.version.split()[0]}')"
  subprocess.check_call([python, "-c", versions])
  tests = ["-m", "not slow and not aot", *(f"tests/{name}" for name in INTERNALS)]
  return subprocess.call([python, "-m", "pytest", "-n", "2", *tests], cwd=ROOT)


def newer_python() -> str | None:
  """Returns the newest Python on the path or of pyenv that is newer than this one and starts."""
  pyenv = pathlib.Path(os.environ.get("PYENV_ROOT", pathlib.Path.home() / ".pyenv"))
  for minor in NEWER:
    if (3, minor) <= sys.version_info[:2]:
      break
    name = f"python3.{minor}"
    on_path = shutil.which(name)
    of_pyenv = sorted(pyenv.glob(f"versions/3.{minor}.*/bin/{name}"))
    # A shim of pyenv is on the path also where no such version is chosen; it does not start then.
    for found in filter(None, (on_path, *map(str, reversed(of_pyenv)))):
      if subprocess.call([found, "-c", "import venv"], stderr=subprocess.DEVNULL) == 0:
        return found
  return None


def venv_folder() -> pathlib.Path:
  """Returns where the virtual environment is, or will be."""
  return pathlib.Path(os.environ.get("MPJAX_VENV", ROOT / ".venv"))


def environment(base: str, folder: pathlib.Path, extras: str) -> str:
  """Makes or updates a virtual environment of the Python `base`, with extras of the package.

  Returns:
    The environment's Python.
  """
  python = folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
  stamp = folder / f"mpjax-{extras}.stamp"
  wanted = hashlib.sha256((ROOT / "pyproject.toml").read_bytes()).hexdigest()
  if stamp.exists() and stamp.read_text() == wanted:
    return str(python)
  print(f"setting up {folder} (once; a minute or two)", flush=True)
  if not python.exists():
    subprocess.check_call([base, "-m", "venv", str(folder)])
  install = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
  subprocess.check_call([*install, "-e", f"{ROOT}[{extras}]"])
  stamp.write_text(wanted)
  return str(python)


if __name__ == "__main__":
  try:
    sys.exit(main())
  except subprocess.CalledProcessError as error:
    sys.exit(f"set-up failed: {' '.join(map(str, error.cmd))} (exit status {error.returncode})")
  except KeyboardInterrupt:
    sys.exit(130)
