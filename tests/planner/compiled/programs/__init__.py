"""Programs that compilers of several releases made, kept as messages, with what those compilers say of them."""

import functools
import json
import lzma
import pathlib

from mpjax.planner.compiled._compile import CompiledProgram
from mpjax.planner.compiled._hlo import parse
from tests.planner.compiled.programs._steps import CROSSINGS, STEPS, Step

__all__ = ["CROSSINGS", "KEPT", "STEPS", "VERSIONS", "Step", "kept", "parsed"]

_FOLDER = pathlib.Path(__file__).parent
VERSIONS = sorted(file.stem for file in _FOLDER.glob("*.json"))
# (version of JAX, name of the function, target).
KEPT = [(v, name, target) for v in VERSIONS for name, (_, targets) in STEPS.items() for target in targets]


def kept(version, name, target="here"):
  """Returns the program that the compiler of a target made of a function, with the JAX of a version."""
  return programs_of(version)[f"{name} {target}"]


@functools.cache
def parsed(version, name, target="here"):
  """Returns the module of a program that is kept."""
  return parse(kept(version, name, target).proto)


@functools.cache
def programs_of(version):
  """Returns the programs that are kept for a version of JAX, by function and target."""
  figures = json.loads((_FOLDER / f"{version}.json").read_text())
  protos = lzma.decompress((_FOLDER / f"{version}.pb.xz").read_bytes())
  found = {}
  for key, row in figures.items():
    size = row.pop("size")
    for old in ("flops", "seconds"):
      row.pop(old, None)
    found[key], protos = CompiledProgram(**row, proto=protos[:size]), protos[size:]
  return found
