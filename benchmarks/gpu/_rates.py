"""Measures what a GPU's kernels reach: products by dtype and shape, element-wise passes, attention, launches.

    python -m benchmarks.gpu._rates FILE.json

`mpjax.plan` estimates a GPU's time with the table that this writes. Each operation runs in a chain inside
one program, so that the figures are those of the device, without dispatch. Seconds are the least of five.
"""

from __future__ import annotations

import functools
import json
import math
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

CHAIN, ROUNDS = 8, 5
CUBES = (256, 512, 1024, 2048, 4096, 8192)
# M, N, K: the products of transformers of several widths, forward and backward, and a large vocabulary.
OBLONG = (
  (8192, 768, 768),
  (8192, 3072, 768),
  (8192, 768, 3072),
  (768, 3072, 8192),
  (16384, 4096, 4096),
  (16384, 14336, 4096),
  (4096, 14336, 16384),
  (8192, 50304, 768),
  (8192, 50257, 768),
  (128, 4096, 4096),
  (4096, 4096, 128),
)
PRODUCTS = {
  "bfloat16": (jnp.bfloat16, None),
  "float8": (jnp.float8_e4m3fn, None),
  "tensorfloat32": (jnp.float32, "tensorfloat32"),
  "float32": (jnp.float32, "highest"),
  "float16": (jnp.float16, None),
}
BATCHED = ((96, 1024, 1024, 64), (96, 1024, 64, 1024), (32, 2048, 2048, 128))
SIZES = tuple(1 << n for n in range(10, 31, 2))
ATTENTION = ((8, 1024, 12, 64), (4, 2048, 32, 128), (2, 8192, 32, 128))
CONVOLUTIONS = (
  (64, 56, 64, 64),
  (64, 28, 128, 128),
  (64, 14, 256, 256),
  (64, 7, 512, 512),
  (256, 56, 64, 64),
)


def seconds(fun: Callable[..., jax.Array], first: jax.Array, *others: jax.Array) -> float:
  """Returns the seconds of one run of a function on the device, without dispatch.

  Args:
    fun: the function.
    first: its first operand; each run of the chain has its own copy, so that no run is shared.
    others: its other operands.
  """

  @functools.partial(jax.jit, static_argnums=0)
  def chain(repeats: int, firsts: Any, others: Any) -> Any:
    def once(_: int, state: Any) -> Any:
      _, firsts = state
      outs: list[jax.Array] = []
      kept: list[jax.Array] = []
      for i, first in enumerate(firsts):
        if i:  # orders the runs
          outs[-1], first = jax.lax.optimization_barrier((outs[-1], first))
        outs.append(fun(first, *others))
        kept.append(first)
      return jax.lax.optimization_barrier((tuple(outs), tuple(kept)))

    shape = jax.eval_shape(fun, firsts[0], *others)
    empty = tuple(jnp.zeros(shape.shape, shape.dtype) for _ in firsts)
    return jax.lax.fori_loop(0, repeats, once, (empty, tuple(firsts)))[0]

  firsts = [jax.block_until_ready(first.copy()) for _ in range(CHAIN)]
  _timed(chain, 1, firsts, others)
  guess = _timed(chain, 1, firsts, others)
  repeats = max(2, min(200, int(0.02 / guess)))
  _timed(chain, repeats, firsts, others)
  several = min(_timed(chain, repeats, firsts, others) for _ in range(ROUNDS))
  once = min(_timed(chain, 1, firsts, others) for _ in range(ROUNDS))
  return (several - once) / (CHAIN * (repeats - 1))


def _timed(fun: Callable[..., Any], *args: Any) -> float:
  start = time.perf_counter()
  jax.block_until_ready(fun(*args))
  return time.perf_counter() - start


def array(shape: tuple[int, ...], dtype: Any, seed: int = 0) -> jax.Array:
  """Returns normal values of a dtype."""
  return jax.random.normal(jax.random.key(seed), shape, jnp.float32).astype(dtype)


def rows() -> Iterator[dict[str, Any]]:
  """Yields a row for each measurement."""
  yield from _element_wise()
  yield from _products()
  yield from _attention()
  yield from _others()
  yield from _convolutions()
  yield from _host()


def _products() -> Iterator[dict[str, Any]]:
  for dtype, (held, precision) in PRODUCTS.items():
    for m, n, k in (*((s, s, s) for s in CUBES), *OBLONG):
      if dtype == "float32" and m * n * k > 2**36:
        continue
      if (dtype == "float8" and n % 16) or (dtype == "float16" and m != n):
        continue
      out = jnp.bfloat16 if dtype == "float8" else None
      # The second operand is [N, K], which an FP8 product of cuBLAS wants.
      fun = functools.partial(
        jax.lax.dot_general,
        dimension_numbers=(((1,), (1,)), ((), ())),
        precision=precision,
        preferred_element_type=out,
      )
      taken = seconds(fun, array((m, k), held), array((n, k), held, 1))
      yield {"what": "product", "dtype": dtype, "shape": [1, m, n, k], "seconds": taken}
  for b, m, n, k in BATCHED:
    for dtype in ("bfloat16", "tensorfloat32"):
      held, precision = PRODUCTS[dtype]
      fun = functools.partial(
        jax.lax.dot_general, dimension_numbers=(((2,), (2,)), ((0,), (0,))), precision=precision
      )
      taken = seconds(fun, array((b, m, k), held), array((b, n, k), held, 1))
      yield {"what": "product", "dtype": dtype, "shape": [b, m, n, k], "seconds": taken}


def _element_wise() -> Iterator[dict[str, Any]]:
  for size in SIZES:
    x = array((size // 2,), jnp.bfloat16)
    yield {"what": "element-wise", "dtype": "bfloat16", "bytes": 2 * size, "seconds": seconds(jnp.tanh, x)}


def _attention() -> Iterator[dict[str, Any]]:
  attend = functools.partial(jax.nn.dot_product_attention, is_causal=True, implementation="cudnn")
  back = jax.grad(lambda q, k, v: attend(q, k, v).astype(jnp.float32).sum(), argnums=(0, 1, 2))
  for shape in ATTENTION:
    args = [array(shape, jnp.bfloat16, i) for i in range(3)]
    both = lambda *args: jax.tree.reduce(jnp.add, [g.ravel()[0] for g in back(*args)])
    for name, fun in (("forward", attend), ("forward and backward", both)):
      yield {"what": "attention", "pass": name, "shape": list(shape), "seconds": seconds(fun, *args)}


def _others() -> Iterator[dict[str, Any]]:
  x, table = array((16384, 4096), jnp.bfloat16), array((50304, 768), jnp.bfloat16)
  ids = jax.random.randint(jax.random.key(0), (16384,), 0, 50304)
  moved: dict[str, tuple[int, Callable[..., jax.Array], tuple[jax.Array, ...]]] = {
    "softmax": (2 * x.nbytes, lambda x: jax.nn.softmax(x.astype(jnp.float32)).astype(x.dtype), (x,)),
    "sum of rows": (x.nbytes, lambda x: x.astype(jnp.float32).sum(-1), (x,)),
    "sum of columns": (x.nbytes, lambda x: x.astype(jnp.float32).sum(0), (x,)),
    "transpose": (2 * x.nbytes, lambda x: x.T.copy(), (x,)),
    "gather": (2 * 16384 * 768 * 2, lambda table, ids: table[ids], (table, ids)),
    "scatter-add": (
      2 * table.nbytes,
      lambda table, ids: table.at[ids].add(jnp.ones((16384, 768), table.dtype)),
      (table, ids),
    ),
  }
  for name, (nbytes, fun, args) in moved.items():
    yield {"what": name, "bytes": nbytes, "seconds": seconds(fun, *args)}


def _convolutions() -> Iterator[dict[str, Any]]:
  for batch, side, channels, features in CONVOLUTIONS:
    for dtype in ("bfloat16", "tensorfloat32"):
      held, precision = PRODUCTS[dtype]
      fun = functools.partial(
        jax.lax.conv_general_dilated,
        window_strides=(1, 1),
        padding="SAME",
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
        precision=None if precision == "tensorfloat32" else precision,
      )
      args = array((batch, side, side, channels), held), array((3, 3, channels, features), held, 1)
      shape = [batch, side, channels, features]
      yield {"what": "convolution", "dtype": dtype, "shape": shape, "seconds": seconds(fun, *args)}


def _host() -> Iterator[dict[str, Any]]:
  device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
  host = device.with_memory_kind("pinned_host")
  x = jax.device_put(jnp.ones(1 << 28, jnp.float32), host)
  for name, source, place in (("to the device", x, device), ("to the host", jax.device_put(x, device), host)):
    put = lambda source=source, place=place: jax.block_until_ready(jax.device_put(source, place))
    put()
    yield {"what": f"transfer {name}", "bytes": x.nbytes, "seconds": min(_timed(put) for _ in range(ROUNDS))}


def table(report: dict[str, Any]) -> str:
  """Returns what products reach by shape and dtype in TFLOP/s, and passes over memory in GB/s."""
  products: dict[tuple[int, ...], dict[str, float]] = {}
  moved, kernels = [], []
  for row in report["rows"]:
    if row["what"] == "product":
      flops = 2 * math.prod(row["shape"])
      products.setdefault(tuple(row["shape"]), {})[row["dtype"]] = flops / row["seconds"] / 1e12
    elif "bytes" in row:
      size, rate = row["bytes"] / 1e6, row["bytes"] / row["seconds"] / 1e9
      moved.append(f"| {row['what']}, {size:.3g} MB | {rate:.0f} | {1e6 * row['seconds']:.1f} |")
    else:
      what = f"{row['what']}, {row.get('pass') or row['dtype']}, {' x '.join(map(str, row['shape']))}"
      kernels.append(f"| {what} | {1e6 * row['seconds']:.1f} |")
  dtypes = list(dict.fromkeys(dtype for rates in products.values() for dtype in rates))
  lines = [f"| product, TFLOP/s | {' | '.join(dtypes)} |", f"|---|{'---|' * len(dtypes)}"]
  for (batch, *sizes), rates in products.items():
    cells = [f"{rates[dtype]:.0f}" if dtype in rates else "-" for dtype in dtypes]
    many = f"{batch} of " if batch > 1 else ""
    lines.append(f"| {many}{' x '.join(map(str, sizes))} | {' | '.join(cells)} |")
  lines += ["", "| bytes read and written | GB/s | us |", "|---|---|---|", *moved]
  lines += ["", "| kernel | us |", "|---|---|", *kernels]
  ran = f"`{report['command']}` on {report['device']}; jax {report['versions']['jax']}."
  return "\n".join([*lines, "", ran])


def main(path: str) -> None:
  """Measures and writes all rows; what is measured is kept if the run is cut short."""
  report = {
    "command": "python -m benchmarks.gpu._rates FILE.json",
    "device": jax.devices()[0].device_kind,
    "versions": {"jax": jax.__version__},
    "rows": [],
  }
  found = rows()
  while True:
    try:
      row = next(found)
    except StopIteration:
      break
    report["rows"].append(row)
    print(json.dumps(row), flush=True)
    with open(path, "w") as file:
      json.dump(report, file, indent=1)
      file.write("\n")


if __name__ == "__main__":
  main(sys.argv[1])
