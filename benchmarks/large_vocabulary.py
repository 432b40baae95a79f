"""Memory and FLOPs of `mpjax.linear_cross_entropy` beside the loss of whole logits.

Loss and gradients by activations in the compute dtype and a float32 kernel, under autocast, of 8192 rows and
128,256 classes. Whole logits go through optax's cross entropy of integer labels. FLOPs are those of the
products in the jaxpr, loops counted by their trips.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax

import mpjax
from benchmarks._runner import Row, compile_for, markdown, memory, one
from mpjax.planner._from_jaxpr import from_jaxpr

PACKAGES = ("optax", "libtpu", "jax-cuda13-plugin")
TARGETS = ("h200", "v5e")
DTYPES = {"fp32": jnp.float32, "bf16": jnp.bfloat16, "fp16": jnp.float16}
ROWS, CLASSES, WIDTH = 8192, 128_256, 1024
WHOLE, CHUNKS = "whole logits", "linear_cross_entropy"


def whole(x: jax.Array, kernel: jax.Array, labels: jax.Array) -> jax.Array:
  """The loss of whole logits."""
  logits = (x @ kernel).astype(jnp.float32)
  return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


LOSSES: dict[str, Callable[..., jax.Array]] = {WHOLE: whole, CHUNKS: mpjax.linear_cross_entropy}


def rows() -> Iterator[Row]:
  """Both losses by device and policy."""
  for target, policy, loss in itertools.product(TARGETS, DTYPES, LOSSES):
    yield Row(
      {"target": target, "policy": policy, "loss": loss}, functools.partial(figures, target, policy, loss)
    )


def figures(target: str, policy: str, loss: str) -> dict[str, Any]:
  """Memory and FLOPs of loss and gradients."""
  under = mpjax.autocast(
    lambda x, kernel, labels: LOSSES[loss](x.astype(jnp.float32), kernel, labels), policy
  )
  shapes = ((ROWS, WIDTH), DTYPES[policy]), ((WIDTH, CLASSES), jnp.float32), ((ROWS,), jnp.int32)
  args = [jax.ShapeDtypeStruct(*shape) for shape in shapes]
  program = jax.jit(jax.value_and_grad(under, (0, 1)))
  traced = from_jaxpr(program.trace(*args).jaxpr)
  flops = int(sum(operation.flops * times for operation, times in traced.each()))
  return memory(compile_for(target, program, *args)) | {"flops": flops}


def table(report: dict[str, Any]) -> str:
  """Temporaries of both losses, and their FLOPs."""
  lines = []
  for target, policy in itertools.product(TARGETS, DTYPES):
    both = [one(report, target=target, policy=policy, loss=loss) for loss in LOSSES]
    sizes = [f"{row['temporaries'] / 1e9:.2f} GB" for row in both]
    ratio = both[1]["temporaries"] / both[0]["temporaries"]
    lines.append([target, policy, *sizes, f"{ratio:.2f}", f"{both[1]['flops'] / both[0]['flops']:.2f}"])
  return markdown(["compiled for", "policy", WHOLE, CHUNKS, "ratio", "FLOPs"], lines)
