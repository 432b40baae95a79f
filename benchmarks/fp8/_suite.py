"""Which matrix products of a GPT's gradient are FP8 GEMMs when compiled for an H200, without the device.

    python scripts/bench.py fp8 [--no-triton] [--recipe current|delayed] [--fp8 KEY=VALUE] [--layers N]
      [--dim N] [--heads N] [--seq N] [--batch N] [--vocab N] [--json FILE]

The gradient of `mpjax.zoo.models.GPT` under `mpjax.autocast` with an FP8 policy, every recipe beside bf16.
What should be FP8 is what `mpjax.explain` says, its FLOPs once forward and twice backward; what is FP8 is
read from the optimised HLO: a call of cuBLAS's FP8 product, or a product in a Triton fusion, with operands
in E4M3 (forward) or in E4M3 and E5M2 (backward). Exits with status 1 if less than 95% of it is. Products
that the compiler makes beyond what `explain` counts earn nothing. Needs the packages of the extra plan-cuda.
"""

from __future__ import annotations

import argparse
import collections
import os
import shlex
import sys
from collections.abc import Callable
from typing import Any

# Read when the compiler starts.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_gpu_autotune_level=0 " + os.environ.get("XLA_FLAGS", "")
if "--no-triton" in sys.argv:
  os.environ["XLA_FLAGS"] += " --xla_gpu_enable_triton_gemm=false"

import jax
import jax.numpy as jnp
import numpy as np
import optax
import yaml
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import mpjax
from benchmarks._described import described
from benchmarks._record import compiler_figures, origin, write
from mpjax.planner.compiled import KernelProduct, kernel_products, module_proto, parse
from mpjax.planner.compiled._hlo import numpy_name
from mpjax.zoo.models import GPT

RECIPES = ("current", "delayed")
LEAST_SHARE = 0.95


def loss(model: GPT, tokens: jax.Array) -> jax.Array:
  """Mean cross entropy of [B, T + 1] tokens."""
  logits = model(tokens[:, :-1])
  return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def gradient(policy: Any, graphdef: Any, delayed: bool) -> Callable[..., Any]:
  """`(params, tokens) -> (loss, gradients)`; with a delayed recipe `(params, tokens, state)`."""

  def of(params: Any, tokens: jax.Array, state: Any = None) -> jax.Array:
    cast = mpjax.autocast(loss, policy, fp8_state=state) if delayed else mpjax.autocast(loss, policy)
    return cast(nnx.merge(graphdef, params), tokens)

  return jax.value_and_grad(of, argnums=(0, 2) if delayed else 0)


def measure(model: Any, tokens: Any, policy: Any, device: Any) -> dict[str, Any]:
  """The compiler's figures of a policy, and its matrix products beside those that should be FP8."""
  graphdef, params = nnx.split(model)
  delayed = isinstance(policy, dict) and policy["fp8"]["recipe"] == "delayed"
  state = (jax.eval_shape(mpjax.init_fp8_state(loss, policy), model, tokens),) if delayed else ()
  sharding = NamedSharding(Mesh(np.array([device]), ("x",)), PartitionSpec())
  put = lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=sharding)
  arguments = jax.tree.map(put, (params, tokens, *state))
  compiled = jax.jit(gradient(policy, graphdef, delayed)).lower(*arguments).compile()
  found = kernel_products(parse(module_proto(compiled)))
  rows = mpjax.explain(loss, model, tokens, policy=policy).rows
  eligible = [row.flops for row in rows if row.flops and mpjax.formats.narrow_bits(row.after)]
  return {
    "eligible": {"products": len(eligible), "flops": sum(eligible)},
    "all_forward_flops": sum(row.flops for row in rows),
    "found": by_dtypes(found),
    "share": shares(found, sum(eligible)) if eligible else None,
  } | compiler_figures(compiled)


def by_dtypes(found: list[KernelProduct]) -> dict[str, dict[str, int]]:
  """Returns FLOPs and number of products by `kernel: dtypes`, the most FLOPs first."""
  table: dict[str, dict[str, int]] = collections.defaultdict(lambda: {"flops": 0, "products": 0})
  for product in sorted(found, key=lambda product: -product.flops):
    row = table[f"{product.kernel}: {' x '.join(product.dtypes)}"]
    row["flops"] += product.flops
    row["products"] += 1
  return dict(table)


def is_narrow(product: KernelProduct) -> bool:
  """Whether it is a GEMM with both operands below 16 bits."""
  return product.kernel != "loop" and all(
    mpjax.formats.narrow_bits(numpy_name(dtype)) for dtype in product.dtypes
  )


def shares(found: list[KernelProduct], forward: int) -> dict[str, float]:
  """FP8 GEMMs over what should be: forward, backward (twice the FLOPs of forward) and in all."""
  backward = lambda product: any("e5m2" in dtype for dtype in product.dtypes)  # the format of gradients
  fp8 = [product for product in found if is_narrow(product)]
  ahead = sum(product.flops for product in fp8 if not backward(product)) / forward
  back = sum(product.flops for product in fp8 if backward(product)) / (2 * forward)
  return {"forward": ahead, "backward": back, "all": (min(ahead, 1) + 2 * min(back, 1)) / 3}


def setting(text: str) -> tuple[str, Any]:
  """A key and a value of the policy's `fp8` mapping."""
  key, equals, value = text.partition("=")
  if not equals:
    raise argparse.ArgumentTypeError(f"{text!r}: expected KEY=VALUE, as in saved_activations=fp8")
  return key, yaml.safe_load(value)


def add_arguments(parser: argparse.ArgumentParser) -> None:
  parser.add_argument("--no-triton", action="store_true", help="products by cuBLAS alone")
  parser.add_argument("--recipe", choices=RECIPES, action="append", help="leave the other out")
  parser.add_argument("--fp8", type=setting, action="append", default=[], metavar="KEY=VALUE")
  for name, default in (
    ("layers", 4),
    ("dim", 768),
    ("heads", 12),
    ("seq", 1024),
    ("batch", 8),
    ("vocab", 50304),
  ):
    parser.add_argument(f"--{name}", type=int, default=default)


def run(options: argparse.Namespace) -> int:
  make = lambda: GPT(
    vocab_size=options.vocab,
    max_len=options.seq,
    dim=options.dim,
    layers=options.layers,
    heads=options.heads,
    rngs=nnx.Rngs(0),
  )
  model = nnx.eval_shape(make)
  tokens = jax.ShapeDtypeStruct((options.batch, options.seq + 1), jnp.int32)
  device = described("cuda").devices[0]
  policies: dict[str, Any] = {"bf16": "bf16"}
  for recipe in options.recipe or RECIPES:
    fp8 = {"emulate": True, **dict(options.fp8), "recipe": recipe}
    policies[f"fp8, {recipe}"] = {"base": "fp8", "fp8": fp8}

  shown = f"{device.device_kind}, described and not there"
  command = shlex.join(without_json(sys.argv[1:]))
  report = origin(command, "flax", "optax", device=shown) | {
    "products_by": "cuBLAS" if options.no_triton else "Triton"
  }
  rows = report["policies"] = {}
  print(f"{shown}; products by {report['products_by']}")
  for name, policy in policies.items():
    row = rows[name] = measure(model, tokens, policy, device)
    row["temp_ratio"] = row["temp_bytes"] / rows["bf16"]["temp_bytes"]
    show(name, row)
  write(report, options.json)
  short = [
    name for name in rows if name != "bf16" and (rows[name]["share"] or {"all": 0})["all"] < LEAST_SHARE
  ]
  if short:
    sys.exit(f"less than {LEAST_SHARE:.0%} of the eligible FLOPs are FP8 GEMMs: {'; '.join(short)}")
  return 0


def show(name: str, row: dict[str, Any]) -> None:
  """Prints a policy's figures."""
  print(f"{name}: temporaries {row['temp_bytes'] / 1e6:.1f} MB, {row['temp_ratio']:.3f} of bf16's")
  if name != "bf16":
    eligible = row["eligible"]
    part = eligible["flops"] / row["all_forward_flops"]
    print(f"  eligible: {eligible['products']} products, {part:.1%} of the forward pass's FLOPs")
  if row["share"]:
    print("  FP8 GEMMs of that: " + ", ".join(f"{key} {share:.2%}" for key, share in row["share"].items()))
  for kind, found in row["found"].items():
    print(f"  {found['products']:5} {kind:32}{found['flops'] / 1e12:9.3f} TFLOP")
  sys.stdout.flush()


def without_json(arguments: list[str]) -> list[str]:
  """A command line without where its report went."""
  if "--json" in arguments:
    at = arguments.index("--json")
    return arguments[:at] + arguments[at + 2 :]
  return [argument for argument in arguments if not argument.startswith("--json=")]
