"""What each mechanism of autocast's islands earns, on kinds of model that differ in structure.

The gradient of each model is compiled as cast by hand, under autocast, and under autocast without one
mechanism. A mechanism is a private function, which is replaced in this process alone.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import jax

import mpjax
from benchmarks._kinds_of_models import EXAMPLES
from benchmarks._runner import Row, chosen, compile_for, markdown
from mpjax.casting import _decide, _emit, _islands

PACKAGES = ("flax", "optax", "libtpu", "jax-cuda13-plugin")
TARGETS = ("h200", "v5e")
FIGURES = ("temporaries", "accessed")

_island = _islands.Segments._island


def _unfenced(*arguments: Any) -> Any:
  island = _island(*arguments)
  return island and dataclasses.replace(island, fenced=False, parts=())


# The function of each mechanism, and what takes its place.
MECHANISMS: dict[str, tuple[Any, str, Callable[..., Any]]] = {
  "pull-in": (_decide, "pull_in", lambda nodes, *_: list(nodes)),
  "products at ends": (_islands, "_is_product", lambda _: False),
  "barriers": (_islands.Segments, "_island", _unfenced),
  "saved statistics": (_emit, "is_statistic", lambda *_: False),
  "operands again": (_islands.Segments, "_alone", lambda *_: None),
  "losses by element": (_islands, "is_by_element", lambda *_: False),
}


def rows() -> Iterator[Row]:
  """Every model on every target, with all variants: those of one program are compiled once."""
  for target, model in itertools.product(TARGETS, EXAMPLES):
    yield Row({"target": target, "model": model}, functools.partial(figures, target, model))


def without(mechanism: str) -> Any:
  """A context in which autocast does not have a mechanism."""
  return mock.patch.object(*MECHANISMS[mechanism])


def gradient(model: str, by_hand: bool = False) -> Any:
  """The gradient of a model's loss: `(params, statistics, batch) -> ((loss, statistics), gradients)`."""
  example = EXAMPLES[model]
  loss = example.loss("bfloat16") if by_hand else mpjax.autocast(example.loss(), "bf16")
  return jax.jit(jax.value_and_grad(loss, has_aux=True))


def figures(target: str, model: str) -> dict[str, Any]:
  """Temporaries, and the bytes that the compiler says are accessed, of each variant."""
  shapes = EXAMPLES[model].shapes()
  known: dict[str, dict[str, Any]] = {}

  def compiled(patched: Any = None, by_hand: bool = False) -> dict[str, Any]:
    jax.clear_caches()
    with patched or contextlib.nullcontext():
      program = gradient(model, by_hand)
      text = program.lower(*shapes).as_text()
      if text not in known:
        found = compile_for(target, program, *shapes)
        known[text] = {key: getattr(found, key) for key in FIGURES}
    return known[text]

  return {
    "by hand": compiled(by_hand=True),
    "autocast": compiled(),
    "without": {name: compiled(without(name)) for name in MECHANISMS},
  }


def table(report: dict[str, Any]) -> str:
  """By target: autocast beside casts by hand, and by how many percent a figure grows without a mechanism."""
  targets = dict.fromkeys(row["target"] for row in report["rows"])
  return "\n\n".join(_of_target(target, chosen(report, target=target)) for target in targets)


def _of_target(target: str, models: list[dict[str, Any]]) -> str:
  lines = []
  for row in models:
    hand, autocast = row["by hand"], row["autocast"]
    ratio = _compared(autocast, hand, lambda x: f"{x:.2f}")
    more = [_more(row["without"].get(name), autocast) for name in MECHANISMS]
    lines.append([row["model"], f"{hand['temporaries'] / 1e6:.0f}", ratio, *more])
  return markdown([target, "by hand, MB", "autocast / by hand", *MECHANISMS], lines)


def _more(figures: dict[str, Any] | None, base: dict[str, Any]) -> str:
  if figures is None:
    return "-"  # not measured
  return "" if figures == base else _compared(figures, base, lambda x: f"{100 * (x - 1):+.0f}")


def _compared(figures: dict[str, Any], base: dict[str, Any], text: Callable[[float], str]) -> str:
  return ", ".join(text(figures[key] / base[key]) for key in FIGURES if base[key])
