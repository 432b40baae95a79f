"""Compiles the functions of `_steps.py` with the JAX that is installed, and keeps their programs here.

    python -m tests.planner.compiled.programs.make

Needs the compilers of mpjax[plan-tpu,plan-cuda]. Writes two files for the version of JAX: `VERSION.json`, what the
compilers say of memory and arithmetic, and `VERSION.pb.xz`, the programs in the same order.
"""

from __future__ import annotations

import dataclasses
import json
import lzma
import pathlib

import jax

from mpjax.planner import get_target
from mpjax.planner.compiled._compile import compile_step
from mpjax.planner.compiled._proto import module_class
from tests.planner.compiled.programs._steps import STEPS

FOLDER = pathlib.Path(__file__).parent


def without_folders(proto: bytes) -> bytes:
  """Returns a program whose files are named from `site-packages` on, or by their last name."""
  module = module_class().FromString(proto)
  names = module.stack_frame_index.file_names
  for i, name in enumerate(names):
    _, packages, inside = name.rpartition("site-packages/")
    names[i] = f"/lib/{packages}{inside}" if packages else name.rpartition("/")[2]
  return bytes(module.SerializeToString(deterministic=True))


def main() -> None:
  programs = {}
  for name, (make, targets) in STEPS.items():
    step = make()
    for target in targets:
      program = compile_step(step.function, step.args, step.donated_leaves, get_target(target))
      made = dataclasses.replace(program, proto=without_folders(program.proto))
      programs[f"{name} {target}"] = made
      print(name, target, len(made.proto), flush=True)
  lines = []
  for key, program in sorted(programs.items()):
    row = dataclasses.asdict(program) | {"size": len(program.proto)}
    del row["proto"]
    lines.append(f"{json.dumps(key)}: {json.dumps(row, sort_keys=True)}")
  (FOLDER / f"{jax.__version__}.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")
  together = b"".join(program.proto for _, program in sorted(programs.items()))
  (FOLDER / f"{jax.__version__}.pb.xz").write_bytes(lzma.compress(together, preset=9))


if __name__ == "__main__":
  main()
