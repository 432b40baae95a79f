"""Sets up a virtual environment, then trains or tests: python3 scripts/bootstrap.py train|test [arguments].

The environment is `.venv` beside this folder, or `MPJAX_VENV`. It is made once, and brought up to date when
pyproject.toml changes. `MPJAX_EXTRAS` names further extras of the package, such as plan-tpu. Needs Python
3.11 or later with pip, and nothing else.
"""

import hashlib
import os
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
EXTRAS = {"train": "train", "test": "test"}


def main() -> int:
  """Sets up, runs the command and returns its exit status."""
  if sys.version_info < (3, 11):  # noqa: UP036 (run by whatever Python the user has)
    sys.exit(f"mpjax needs Python 3.11 or later; this is {sys.version.split()[0]}")
  if len(sys.argv) < 2 or sys.argv[1] not in EXTRAS:
    sys.exit(
      "usage: python3 scripts/bootstrap.py train [CONFIG.yaml] [key=value ...] | test [pytest arguments]"
    )
  command, arguments = sys.argv[1], sys.argv[2:]
  python = environment(EXTRAS[command])
  if command == "train":
    if not arguments or "=" in arguments[0]:
      arguments.insert(0, str(ROOT / "configs" / "gpt_stdlib.yaml"))
    return subprocess.call([python, str(ROOT / "scripts" / "train.py"), *arguments])
  checks = [["ruff", "check"], ["ruff", "format", "--check"], ["mypy"]]
  for check in [] if arguments else checks:
    status = subprocess.call([python, "-m", *check], cwd=ROOT)
    if status:
      return status
  return subprocess.call([python, "-m", "pytest", *(arguments or ["-n", "2"])], cwd=ROOT)


def environment(extra: str) -> str:
  """Makes or updates the virtual environment with an extra of the package; returns its Python."""
  folder = pathlib.Path(os.environ.get("MPJAX_VENV", ROOT / ".venv"))
  python = folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
  extra = ",".join(filter(None, (extra, os.environ.get("MPJAX_EXTRAS", ""))))
  stamp = folder / f"mpjax-{extra}.stamp"
  wanted = hashlib.sha256((ROOT / "pyproject.toml").read_bytes()).hexdigest()
  if stamp.exists() and stamp.read_text() == wanted:
    return str(python)
  print(f"setting up {folder} (once; a minute or two)", flush=True)
  if not python.exists():
    subprocess.check_call([sys.executable, "-m", "venv", str(folder)])
  install = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
  subprocess.check_call([*install, "-e", f"{ROOT}[{extra}]"])
  stamp.write_text(wanted)
  return str(python)


if __name__ == "__main__":
  try:
    sys.exit(main())
  except subprocess.CalledProcessError as error:
    sys.exit(f"set-up failed: {' '.join(map(str, error.cmd))} (exit status {error.returncode})")
  except KeyboardInterrupt:
    sys.exit(130)
