"""What each mechanism of autocast's islands earns, on a dozen kinds of model.

Each model's gradient is compiled in float32, cast by hand, under autocast, and under autocast without one
mechanism: temporary memory and, where the compiler says them, bytes accessed. A mechanism is a private
function, which is replaced in this process alone.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import time
from collections.abc import Callable, Iterable
from typing import Any
from unittest import mock

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import mpjax
from benchmarks._record import compiler_figures, provenance
from benchmarks.autocast._kinds_of_models import EXAMPLES, Example
from mpjax.casting import _alike_islands, _copies, _decide, _emit, _islands

Patch = Callable[[], Any]
WHOLE = ("float32", "hand", "autocast", "grad_dtype=bfloat16")


def _without_barriers() -> Any:
  finished = _islands._Grouping._finished

  def unfenced(*arguments: Any) -> Any:
    return dataclasses.replace(finished(*arguments), fenced=False)

  return mock.patch.object(_islands._Grouping, "_finished", unfenced)


def _replaced(owner: Any, name: str, by: Callable[..., Any]) -> Patch:
  return lambda: mock.patch.object(owner, name, by)


# What can be switched off, and by which function in place of which.
MECHANISMS: dict[str, Patch] = {
  "pull-in": _replaced(_decide, "pull_in", lambda nodes, *_: list(nodes)),
  "products at islands' ends": _replaced(_islands, "_is_product", lambda node: False),
  "barriers": _without_barriers,
  "saved statistics": _replaced(_emit, "is_statistic", lambda *_: False),
  "what pays": _replaced(_islands._Grouping, "_pays", lambda *_: True),
  "copies": _replaced(_copies.Copies, "instead_of", lambda *_: ()),
  "operands again": _replaced(_islands._Grouping, "_alone", lambda *_: None),
  "losses by element": _replaced(_decide, "stores_gradient", lambda *_: False),
  "alike islands": _replaced(_alike_islands.AlikeIslands, "function", lambda self, *given: given[-1]),
}


def measure(
  device: Any, models: Iterable[str] | None, without: Iterable[str] | None
) -> dict[str, dict[str, Any]]:
  """Returns figures by model and variant, and prints them.

  Args:
    device: what to compile for.
    models: names of `EXAMPLES`; all by default.
    without: names of `MECHANISMS`; all by default.
  """
  figures: dict[str, dict[str, Any]] = {}
  for model in models or EXAMPLES:
    rows = figures[model] = {}
    known: dict[str, dict[str, Any]] = {}
    variants = [*WHOLE, *(f"without {name}" for name in (MECHANISMS if without is None else without))]
    print(f"{model:40}{'temp MB':>9}{'/ hand':>8}{'GB':>8}{'/ hand':>8}{'trace s':>9}", flush=True)
    for variant in variants:
      rows[variant] = row = _figures(EXAMPLES[model], variant, device, known)
      hand = rows.get("hand", row)
      ratios = [row[key] / hand[key] if hand[key] else 0.0 for key in ("temp_bytes", "bytes_accessed")]
      print(
        f"  {variant:38}{row['temp_bytes'] / 1e6:9.1f}{ratios[0]:8.3f}{row['bytes_accessed'] / 1e9:8.2f}"
        f"{ratios[1]:8.3f}{row['trace_s']:9.2f}",
        flush=True,
      )
  return figures


def gradient(example: Example, variant: str) -> Any:
  """Returns the gradient of a model's loss, `(params, statistics, batch) -> ((loss, statistics), grads)`."""
  if variant == "float32":
    loss = example.loss()
  elif variant == "hand":
    loss = example.loss("bfloat16")
  elif variant == "grad_dtype=bfloat16":
    loss = mpjax.autocast(example.loss(), {"base": "bf16", "grad_dtype": "bfloat16"})
  else:
    loss = mpjax.autocast(example.loss(), "bf16")
  return jax.value_and_grad(loss, has_aux=True)


def _figures(example: Example, variant: str, device: Any, known: dict[str, dict[str, Any]]) -> dict[str, Any]:
  """Returns the figures of one variant; a program that was compiled before is not compiled again."""
  name = variant.removeprefix("without ")
  patched = MECHANISMS[name]() if name != variant else contextlib.nullcontext()
  arguments = on_device(example, device)
  jax.clear_caches()
  start = time.perf_counter()
  with patched:
    traced = jax.jit(gradient(example, variant)).trace(*arguments)
    seconds = time.perf_counter() - start
    lowered = traced.lower()
  key = hashlib.sha256(lowered.as_text().encode()).hexdigest()
  if key not in known:
    known[key] = compiler_figures(lowered.compile())
  return known[key] | {"trace_s": seconds}


def on_device(example: Example, device: Any) -> tuple[Any, Any, Any]:
  """Returns the shapes of parameters, running statistics and a batch, on a device."""
  sharding = NamedSharding(Mesh(np.array([device]), ("x",)), PartitionSpec())
  variables = dict(example.variables())
  tree = (variables.pop("params"), variables, example.batch())
  return jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=sharding), tree)


def table(report: dict[str, Any]) -> str:
  """Returns autocast beside casts by hand, and what it takes more without a mechanism, as two tables."""
  models: dict[str, dict[str, Any]] = report["models"]
  accessed = all(row["bytes_accessed"] for rows in models.values() for row in rows.values())
  keys = ("temp_bytes", "bytes_accessed") if accessed else ("temp_bytes",)
  whole = [name for name in WHOLE if any(name in rows for rows in models.values())]
  beside = [name for name in whole if name not in ("float32", "hand")]
  heads = ["gradient of", *whole, *(f"{name} / hand" for name in beside)]
  lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
  for model, rows in models.items():
    cells = [_sizes(rows.get(name), accessed) for name in whole]
    cells += [_ratios(rows.get(name), rows["hand"], keys) for name in beside]
    lines.append(f"| {model} | {' | '.join(cells)} |")
  names = dict.fromkeys(name for rows in models.values() for name in rows if name not in WHOLE)
  if names:
    lines += ["", f"| % more | {' | '.join(models)} |", "|---" * (len(models) + 1) + "|"]
  for name in names:
    cells = [_more(rows.get(name), rows["autocast"], keys) for rows in models.values()]
    lines.append(f"| {name} | {' | '.join(cells)} |")
  return "\n".join([*lines, "", provenance(report)])


def _sizes(row: dict[str, Any] | None, accessed: bool) -> str:
  if row is None:
    return ""
  size = f"{row['temp_bytes'] / 1e6:.1f} MB"
  return f"{size}, {row['bytes_accessed'] / 1e9:.2f} GB" if accessed else size


def _ratios(row: dict[str, Any] | None, base: dict[str, Any], keys: Iterable[str]) -> str:
  return "" if row is None else ", ".join(f"{row[key] / base[key]:.3f}" for key in keys)


def _more(row: dict[str, Any] | None, base: dict[str, Any], keys: Iterable[str]) -> str:
  """Returns by how many percent each figure is larger; 0 where none differs, nothing where none is known."""
  if row is None:
    return ""
  changes = [100 * (row[key] / base[key] - 1) for key in keys]
  return ", ".join(f"{x:+.1f}" for x in changes) if any(changes) else "0"
