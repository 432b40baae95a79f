"""Sets up a virtual environment, then trains or tests: python3 scripts/bootstrap.py train|test [arguments].

The environment is `.venv` next to this folder, or `MPJAX_VENV`. It is made once, and updated when
pyproject.toml changes. `MPJAX_EXTRAS` names more extras of the package, such as plan-tpu. Needs only Python
3.11 or later with pip.

`test` uses the newest Python on this machine, and with it the newest JAX. It runs the checks and the tests.
`test --all` also runs slow tests (compiling for other devices, training, killing and joining processes), and
then the tests that depend on JAX's internals with the oldest supported versions (scripts/oldest.txt). Other
arguments go to pytest.
"""

import hashlib
import os
import pathlib
import shutil
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
NEWER = (13, 12)  # minor versions of Python 3 to look for, newest first
OLDEST = ROOT / "scripts" / "oldest.txt"
# Code that prints the versions in an environment before it is used.
VERSIONS = """
import importlib.metadata, sys
found = [f"{name} {importlib.metadata.version(name)}" for name in ("jax", "flax", "optax")]
print(f"on Python {sys.version.split()[0]}, {', '.join(found)}, in {sys.argv[1]}", flush=True)
"""
# Folders of tests/ that depend on JAX's internals.
INTERNALS = ("jaxpr", "casting", "loss_scale", "step", "planner")


def main() -> int:
  """Sets up, runs the command and returns its exit status."""
  if sys.version_info < (3, 11):  # noqa: UP036 (run by whatever Python the user has)
    sys.exit(f"mpjax needs Python 3.11 or later; this is {sys.version.split()[0]}")
  if len(sys.argv) < 2 or sys.argv[1] not in ("train", "test"):
    usage = "train [CONFIG.yaml] [key=value ...] | test [--all | pytest arguments]"
    sys.exit(f"usage: python3 scripts/bootstrap.py {usage}")
  command, arguments = sys.argv[1], sys.argv[2:]
  if command == "train":
    if not arguments or "=" in arguments[0]:  # a third of its steps; `mpjax train gpt_stdlib` takes the rest
      first = ["train.steps=200", "train.eval_every=100", "train.checkpoint_every=100"]
      arguments[:0] = [str(ROOT / "configs" / "gpt_stdlib.yaml"), *first]
    python = environment(sys.executable, "train")
    status = subprocess.call([python, str(ROOT / "scripts/train.py"), *arguments], env=variables(python))
    if not status:
      print(f"next: {pathlib.Path(python).with_name('mpjax')} explain gpt_stdlib policy=bf16,fp16")
    return status
  python = environment(newest_python(), "test")
  if arguments not in ([], ["--all"]):
    return run(python, "pytest", *arguments)
  minutes = "up to 90 minutes" if arguments else "about 9 minutes at first, 4 later"
  print(f"checks and tests: {minutes} on two free cores", flush=True)
  checks = ["ruff", "check"], ["ruff", "format", "--check"], ["mypy"], ["mkdocs", "build", "--strict"]
  for check in (*checks, ["pytest", "-n", "2", *arguments]):
    if status := run(python, *check):
      return status
  if not arguments:
    return 0
  oldest = environment(sys.executable, "test-core", OLDEST)
  return run(oldest, "pytest", "-n", "2", "-m", "not slow", *(f"tests/{name}" for name in INTERNALS))


def run(python: str, *arguments: str) -> int:
  """Runs a module in the project's root and prints the time that it took; returns its exit status."""
  start = time.monotonic()
  status = subprocess.call([python, "-m", *arguments], cwd=ROOT, env=variables(python))
  print(f"{arguments[0]}: {time.monotonic() - start:.0f} s", flush=True)
  return status


def variables(python: str) -> dict[str, str]:
  """Returns variables that make an environment's Python keep its bytecode there for the next process.

  With `PYTHONDONTWRITEBYTECODE`, every process would compile JAX's 2,000 modules.
  """
  kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
  return {**kept, "PYTHONPYCACHEPREFIX": str(pathlib.Path(python).absolute().parents[1] / "bytecode")}


def newest_python() -> str:
  """Returns the newest working Python on the path or in pyenv; this one if none is newer."""
  pyenv = pathlib.Path(os.environ.get("PYENV_ROOT", pathlib.Path.home() / ".pyenv"))
  for minor in (minor for minor in NEWER if (3, minor) > sys.version_info[:2]):
    of_pyenv = map(str, sorted(pyenv.glob(f"versions/3.{minor}.*/bin/python")))
    # A shim of pyenv may be on the path and not start, if pyenv does not select that version.
    for found in filter(None, (shutil.which(f"python3.{minor}"), *of_pyenv)):
      if subprocess.call([found, "-c", "import venv"], stderr=subprocess.DEVNULL) == 0:
        return found
  return sys.executable


def environment(base: str, extra: str, constraints: pathlib.Path | None = None) -> str:
  """Makes or updates a virtual environment with an extra of the package; returns its Python.

  Args:
    base: the Python that makes it; another one than this gets an environment of its own.
    extra: an extra of the package; the extras in `MPJAX_EXTRAS` are added.
    constraints: a file of versions; it gets an environment of its own.
  """
  folder = pathlib.Path(os.environ.get("MPJAX_VENV", ROOT / ".venv"))
  if constraints or base != sys.executable:
    folder = folder.with_name(f"{folder.name}-{constraints.stem if constraints else 'newest'}")
  extras = ",".join(filter(None, (extra, os.environ.get("MPJAX_EXTRAS", ""))))
  python = folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
  stamp = folder / f"mpjax-{extras}.stamp"
  wanted = hashlib.sha256((ROOT / "pyproject.toml").read_bytes())
  wanted.update(constraints.read_bytes() if constraints else b"")
  if not stamp.exists() or stamp.read_text() != wanted.hexdigest():
    print(f"setting up {folder} (once)", flush=True)
    if not python.exists():
      subprocess.check_call([base, "-m", "venv", str(folder)])
    # Modules are compiled when first imported; compiling them all would take half of the time.
    install = [str(python), "-m", "pip", "install", "--no-compile", "--disable-pip-version-check"]
    install += ["--progress-bar", "off", *(["--constraint", str(constraints)] if constraints else [])]
    subprocess.check_call([*install, "-e", f"{ROOT}[{extras}]"])
    stamp.write_text(wanted.hexdigest())
  subprocess.check_call([str(python), "-c", VERSIONS, str(folder)])
  return str(python)


if __name__ == "__main__":
  try:
    sys.exit(main())
  except subprocess.CalledProcessError as error:
    sys.exit(f"set-up failed: {' '.join(map(str, error.cmd))} (exit status {error.returncode})")
  except KeyboardInterrupt:
    sys.exit(130)
