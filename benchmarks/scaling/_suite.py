"""Weak scaling on paper: what a training step needs and sends on 1 to 256 chips that need not be there.

    python scripts/bench.py scaling [--policies fp32,bf16,...] [--chips 1,8,64,256]
      [--meshes data,fsdp,block,both] [--json FILE] [--markdown FILE]

`mpjax.zoo.models.GPT` with 124M parameters, AdamW, `--batch` sequences of 1024 tokens on each chip,
compiled for slices of a TPU v5e by its own compiler (the package libtpu, and no such device). `data`: each
chip has a copy of the state. `fsdp`: parameters and the optimiser's state are divided over all chips.
`block`: so, too, and gathered where they are read, with bf16. `both`: divided over 8 chips, with copies over
the rest. Memory is of one chip, padding included. Collectives are those of a
step; their bytes are those of the results on one chip. Sent: about what one chip sends for them, were each
on a ring. A TPU adds float16 as words of 32 bits with two numbers each, and reduces some arrays whole that a
program asks to scatter, or gathers by a sum, where its compiler expects that to be faster. Rows that are in
the JSON already are not compiled again.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import pathlib
import sys
import time
from typing import Any

# Read when JAX starts: programs for described devices are compiled in processes of their own.
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import AbstractMesh, AxisType

import mpjax
from benchmarks._record import origin, write
from mpjax.planner import Collective, CompileError, get_target, missing
from mpjax.zoo.models import GPT, gpt_sharding

SLICES = {1: "v5e:1x1", 8: "v5e:2x4", 64: "v5e:8x8", 256: "v5e:16x16"}
FSDP = 8  # chips of a group, with `both`
SEQ, VOCAB = 1024, 50304
MODEL: dict[str, Any] = {"vocab_size": VOCAB, "max_len": SEQ, "dim": 768, "layers": 12, "heads": 12}
POLICIES: dict[str, Any] = {
  "fp32": "fp32",
  "bf16": "bf16",
  "bf16, reduced in bfloat16": {"base": "bf16", "reduce_dtype": "bfloat16"},
  "fp16, reduced in float16": {"base": "fp16", "reduce_dtype": "float16"},
}
SHORT = {"fp32": 0, "bf16": 1, "bf16r": 2, "fp16r": 3}
OPERATIONS = ("all-reduce", "reduce-scatter", "all-gather", "all-to-all", "collective-permute")


def mesh_of(kind: str, chips: int) -> dict[str, int] | None:
  """Sizes of a mesh's axes; `None` where it would be that of another kind."""
  if chips == 1:
    return {"data": 1, "fsdp": 1} if kind == "data" else None
  if kind == "both":
    return {"data": chips // FSDP, "fsdp": FSDP} if chips > FSDP else None
  return {"data": chips, "fsdp": 1} if kind == "data" else {"data": 1, "fsdp": chips}


def a_step(
  policy: Any, sizes: dict[str, int], batch: int, gather: str = "step"
) -> tuple[Any, tuple[Any, Any]]:
  """A training step and the shapes of its arguments, laid out on a mesh."""
  resolved = mpjax.get_policy(policy, backend="tpu")
  chips = math.prod(sizes.values())

  def loss(model: GPT, rows: dict[str, jax.Array]) -> jax.Array:
    tokens = rows["tokens"]
    logits = model(tokens[:, :-1]).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

  tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(3e-4, b2=0.95, weight_decay=0.1))
  mesh = AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))
  # On one chip nothing crosses, in no dtype.
  placed: dict[str, Any] = {"mesh": mesh, "sharding": gpt_sharding, "gather": gather} if chips > 1 else {}
  if chips == 1:
    resolved = mpjax.get_policy({**resolved.to_dict(), "reduce_dtype": None}, backend="tpu")
  step = mpjax.make_train_step(loss, tx, resolved, **placed)
  state = jax.eval_shape(lambda: step.init(GPT(**MODEL, rngs=nnx.Rngs(0))))
  rows = {"tokens": jax.ShapeDtypeStruct((batch * chips, SEQ + 1), jnp.int32)}
  layout = step.layout
  if layout is None:
    return step, (state, rows)
  put = lambda x, at: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at)
  state = jax.tree.map(put, state, layout.shardings(state))
  return step, (state, jax.tree.map(lambda x: put(x, layout.batch_sharding), rows))


def sent(found: Collective, sizes: dict[str, int]) -> float:
  """Bytes that a chip sends for a collective on a ring.

  Gathers and scatters go over `fsdp`. What is reduced is whole on each chip or, with `both`, its part of
  `fsdp`, and goes over the other axis.
  """
  group = sizes["fsdp"] if found.operation in ("all-gather", "reduce-scatter") else sizes["data"]
  if group == 1:  # norms' scales, on all of them
    group = math.prod(sizes.values())
  share = {"all-reduce": 2 * (group - 1) / group, "reduce-scatter": group - 1.0}
  return found.nbytes * share.get(found.operation, (group - 1) / group)


def measure(name: str, kind: str, chips: int, batch: int) -> dict[str, Any]:
  """The row of a policy and a mesh."""
  sizes = mesh_of(kind, chips)
  assert sizes is not None
  row: dict[str, Any] = {
    "policy": name,
    "mesh": kind,
    "chips": chips,
    "sizes": sizes,
    "target": SLICES[chips],
  }
  start = time.perf_counter()
  step, args = a_step(POLICIES[name], sizes, batch, "block" if kind == "block" else "step")
  try:
    plan = mpjax.plan(step, *args, target=SLICES[chips], compile=True)
  except CompileError as error:
    return row | {"error": str(error)}
  compiled = plan.compiled
  assert compiled is not None
  return row | {
    "parameters": plan.parameters,
    "arguments": compiled.arguments,
    "temporaries": compiled.temporaries,
    "peak": compiled.peak,
    "parts": compiled.memory.parts,
    "collectives": [
      {"operation": c.operation, "dtype": c.dtype, "bytes": c.nbytes, "count": c.count}
      for c in plan.collectives
    ],
    "collective_bytes": sum(c.nbytes for c in plan.collectives),
    "sent": sum(sent(c, sizes) for c in plan.collectives),
    "compile_seconds": compiled.seconds,
    "seconds": time.perf_counter() - start,
  }


def cells(row: dict[str, Any]) -> list[str]:
  """A row of the table."""
  sizes = row["sizes"]
  mesh = ", ".join(f"{axis}={n}" for axis, n in sizes.items() if n > 1) or "-"
  mesh += ", gather: block" if row["mesh"] == "block" else ""
  title = [str(row["chips"]), row["policy"], mesh]
  if "error" in row:
    return [*title, row["error"], *[""] * 4]
  memory = [f"{row[key] / 1e6:.0f}" for key in ("arguments", "temporaries", "peak")]
  large = [c for c in row["collectives"] if c["bytes"] >= 1e5]
  large.sort(key=lambda c: OPERATIONS.index(c["operation"]))
  crossing = ", ".join(f"{c['operation']} {c['dtype']} {c['bytes'] / 1e6:.1f}" for c in large)
  return [*title, *memory, crossing or "-", f"{row['sent'] / 1e6:.0f}"]


HEADER = ["chips", "policy", "mesh", "arguments MB", "temporaries MB", "peak MB", "crossing, MB", "sent MB"]


def markdown(report: dict[str, Any]) -> str:
  """The report as a table."""
  lines = [HEADER, ["---"] * len(HEADER), *(cells(row) for row in report["rows"])]
  table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
  versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
  return f"{table}\n\n`{report['command']}` on {report['device']}; {versions}.\n"


def add_arguments(parser: argparse.ArgumentParser) -> None:
  parser.add_argument("--policies", default=",".join(SHORT), help="of fp32, bf16, bf16r, fp16r")
  parser.add_argument("--chips", default=",".join(map(str, SLICES)))
  parser.add_argument("--meshes", default="data,fsdp,block,both")
  parser.add_argument("--batch", type=int, default=8, help="sequences on each chip")
  parser.add_argument("--markdown", metavar="FILE")


def run(options: argparse.Namespace) -> int:
  if lacks := missing(get_target(SLICES[1])):
    print(lacks, file=sys.stderr)
    return 2
  device = f"{get_target(SLICES[1]).device}, described and not there"
  report = origin("scaling", "flax", "optax", "libtpu", device=device)
  report |= {"model": MODEL, "batch": options.batch, "rows": []}
  if options.json and pathlib.Path(options.json).exists():
    before = json.loads(pathlib.Path(options.json).read_text())
    if before["versions"] == report["versions"] and before["batch"] == options.batch:
      report["rows"] = before["rows"]
  names = [list(POLICIES)[SHORT[short]] for short in options.policies.split(",")]
  for name in names:
    for chips in map(int, options.chips.split(",")):
      for kind in options.meshes.split(","):
        done = [(row["policy"], row["mesh"], row["chips"]) for row in report["rows"]]
        if mesh_of(kind, chips) is None or (name, kind, chips) in done or (chips == 1 and "," in name):
          continue
        if kind == "block" and name != "bf16":
          continue
        row = measure(name, kind, chips, options.batch)
        report["rows"].append(row)
        print(" | ".join(cells(row)), f"({row.get('compile_seconds', 0):.0f} s)", flush=True)
        write(report, options.json)
        jax.clear_caches()
  order = list(POLICIES)
  report["rows"].sort(
    key=lambda row: (row["chips"], order.index(row["policy"]), row["sizes"]["fsdp"], row["mesh"] == "block")
  )
  write(report, options.json)
  if options.markdown:
    pathlib.Path(options.markdown).write_text(markdown(report))
  return 0
