"""Records a run as a terminal shows it in docs/run.svg: python scripts/record_run.py [key=value ...].

Runs `mpjax train gpt_stdlib policy=fp16` in a pseudo-terminal and a temporary folder. Needs the extra
`train`, and a system with pseudo-terminals.
"""

import fcntl
import os
import pathlib
import pty
import re
import struct
import sys
import tempfile
import termios

import rich.console
import rich.text

ROOT = pathlib.Path(__file__).resolve().parents[1]
PICTURE = ROOT / "docs" / "run.svg"
COMMAND = ["mpjax", "train", "gpt_stdlib", "policy=fp16", "train.steps=200", "out=runs/first"]
WIDTH, HEIGHT = 96, 50
_FONT = "ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace"


def main() -> None:
  """Runs the command and writes the picture of its terminal."""
  shown = [*COMMAND, *sys.argv[1:]]
  PICTURE.write_text(picture(shown, screen(run(shown))), encoding="utf-8")
  print(f"{PICTURE}: {PICTURE.stat().st_size / 1e3:.0f} kB")


def run(command: list[str]) -> str:
  """Runs a command of mpjax in a pseudo-terminal, and returns its output.

  Raises:
    RuntimeError: if the command fails.
  """
  with tempfile.TemporaryDirectory() as folder:
    child, terminal = pty.fork()
    if child == 0:
      os.chdir(folder)
      size = struct.pack("HHHH", HEIGHT, WIDTH, 0, 0)
      fcntl.ioctl(sys.stdout.fileno(), termios.TIOCSWINSZ, size)
      own = {"TERM": "xterm-256color", "COLORTERM": "truecolor", "PYTHONPATH": str(ROOT)}
      line = [sys.executable, "-m", *command]
      os.execve(sys.executable, line, {**os.environ, "JAX_PLATFORMS": "cpu", **own})
    written = b""
    while piece := _read(terminal):
      written += piece
    _, status = os.waitpid(child, 0)
  text = written.decode()
  if status:
    raise RuntimeError(f"{' '.join(command)} failed:\n{text}")
  return text


def _read(terminal: int) -> bytes:
  try:
    return os.read(terminal, 65536)
  except OSError:  # on Linux, the other end is closed
    return b""


def screen(written: str) -> str:
  """Returns the terminal's final contents: each line as written since it was last erased."""
  lines = [line.rpartition("\x1b[2K")[2].replace("\r", "") for line in written.split("\n")]
  return re.sub(r"\x1b\[\?25[hl]", "", "\n".join(lines)).strip("\n")


def picture(command: list[str], text: str) -> str:
  """Returns an SVG of a terminal with a command and its output. The SVG downloads no fonts."""
  with open(os.devnull, "w") as nowhere:
    console = rich.console.Console(record=True, width=WIDTH, file=nowhere, force_terminal=True)
    console.print(rich.text.Text(f"$ {' '.join(command)}", style="bold"), soft_wrap=True)
    console.print(rich.text.Text.from_ansi(text))
  svg = console.export_svg(title="mpjax", unique_id="run")
  svg = re.sub(r"@font-face\s*{[^}]*}\s*|<!--.*?-->\s*", "", svg)
  return re.sub(r"font-family: *[^;]+;", f"font-family: {_FONT};", svg)


if __name__ == "__main__":
  main()
