"""Compiles the functions of `_steps.py` with the JAX that is installed, and keeps their programs here.

    python -m tests.planner.compiled.programs.make [NAME ...]

Needs the compilers of mpjax[plan-tpu,plan-cuda]. Writes two files for the version of JAX: `VERSION.json`, what the
compilers say of memory and arithmetic, and `VERSION.texts.xz`, the programs; both by function and target.
"""

from __future__ import annotations

import dataclasses
import json
import lzma
import pathlib
import re
import sys
from typing import Any

import jax

from mpjax.planner import get_target
from mpjax.planner.compiled import compile_step
from tests.planner.compiled.programs._steps import STEPS

FOLDER = pathlib.Path(__file__).parent
_FILE = re.compile(r'^(\d+) "([^"]*/[^"]*)"$', re.MULTILINE)


def without_folders(text: str) -> str:
  """Returns a text whose files are named from `site-packages` on, or by their last name."""

  def shorter(line: re.Match[str]) -> str:
    _, packages, inside = line[2].rpartition("site-packages/")
    return f'{line[1]} "/lib/{packages}{inside}"' if packages else f'{line[1]} "{line[2].rpartition("/")[2]}"'

  return _FILE.sub(shorter, text)


def main(names: list[str]) -> None:
  figures: dict[str, Any] = {}
  texts: dict[str, str] = {}
  about, programs = FOLDER / f"{jax.__version__}.json", FOLDER / f"{jax.__version__}.texts.xz"
  if names and about.exists():
    figures = json.loads(about.read_text())
    texts = json.loads(lzma.decompress(programs.read_bytes()))
  for name in names or STEPS:
    make, targets = STEPS[name]
    step = make()
    for target in targets:
      program = compile_step(step.function, step.args, step.donated_leaves, get_target(target))
      key = f"{name} {target}"
      texts[key] = without_folders(program.text)
      figures[key] = {**dataclasses.asdict(program), "seconds": 0.0}
      del figures[key]["text"], figures[key]["proto"]
      print(key, len(texts[key]), flush=True)
  lines = (f"{json.dumps(key)}: {json.dumps(figures[key], sort_keys=True)}" for key in sorted(figures))
  about.write_text("{\n" + ",\n".join(lines) + "\n}\n")
  programs.write_bytes(lzma.compress(json.dumps(texts, sort_keys=True).encode(), preset=9))


if __name__ == "__main__":
  main(sys.argv[1:])
