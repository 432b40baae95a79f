"""Programs that compilers of several releases made, kept as text, with what those compilers say of them."""

import functools
import json
import lzma
import pathlib

from mpjax.planner.compiled import Program, parse
from tests.planner.compiled.programs._steps import CROSSINGS, STEPS, Step

__all__ = ["CROSSINGS", "KEPT", "STEPS", "VERSIONS", "Step", "kept", "parsed"]

_FOLDER = pathlib.Path(__file__).parent
VERSIONS = sorted(file.stem for file in _FOLDER.glob("*.json"))
# (version of JAX, name of the function, target).
KEPT = [(v, name, target) for v in VERSIONS for name, (_, targets) in STEPS.items() for target in targets]


def kept(version, name, target="here"):
  """Returns the program that the compiler of a target made of a function, with the JAX of a version."""
  figures, texts = _all(version)
  key = f"{name} {target}"
  return Program(**figures[key], text=texts[key], proto=b"")


@functools.cache
def parsed(version, name, target="here"):
  """Returns the module of a program that is kept."""
  return parse(kept(version, name, target).text)


@functools.cache
def _all(version):
  figures = json.loads((_FOLDER / f"{version}.json").read_text())
  return figures, json.loads(lzma.decompress((_FOLDER / f"{version}.texts.xz").read_bytes()))
