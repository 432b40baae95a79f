"""The five figures of memory that docs/benchmarks.md begins with: their picture and their table."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from typing import Any

from benchmarks.memory._suite import peak
from mpjax._render.picture_style import BLACK, BLUE, GREY, HEADING, TEXT, new_figure, picture_style

RESULTS = pathlib.Path(__file__).parent / "results"


@dataclasses.dataclass(frozen=True)
class Headline:
  """What something takes without a means of mpjax, and with it.

  Attributes:
    title: what was compiled.
    without: a name and its figure.
    with_: the same for mpjax.
    unit: of both figures.
  """

  title: str
  without: tuple[str, float]
  with_: tuple[str, float]
  unit: str

  @property
  def ratio(self) -> float:
    """The figure with mpjax over that without."""
    return self.with_[1] / self.without[1]


def headlines() -> list[Headline]:
  """Reads the figures from the committed reports."""
  memory = _read("memory_h200_jax_0_12")
  step = {row["policy"]: peak(row) for row in memory["rows"] if _is(row, model="gpt", sweep="rows", rows=8)}
  casts = _read("autocast_memory_h200")
  gradient = {name: row["temp_bytes"] for name, row in casts["models"]["GPT"].items()}
  vocabulary = _read("large_vocabulary_memory_h200")
  loss = {row["name"]: row["temp_bytes"] for row in vocabulary["rows"] if _is(row, policy="bf16", width=1024)}
  gather = _read("gather_h200")
  llama = {row["gather"]: row["peak"] for row in gather["rows"] if _is(row, model="llama", accumulate=1)}
  few = _read("few_bytes_memory_h200")
  held = {row["name"]: row["held"] for row in few["rows"]}
  return [
    Headline(
      "Training step of a GPT, 124M\nparameters, 8 rows of 1024 tokens",
      ("fp32", step["fp32"] / 1e9),
      ("bf16", step["bf16"] / 1e9),
      "GB",
    ),
    Headline(
      "Gradient of a GPT in bfloat16,\n768 wide, 4 layers: temporaries",
      ("careful casts by hand", gradient["hand"] / 1e9),
      ("autocast", gradient["autocast"] / 1e9),
      "GB",
    ),
    Headline(
      "Loss of 128,256 classes,\n8192 tokens: temporaries",
      ("whole logits", loss["whole logits"] / 1e9),
      ("linear_cross_entropy", loss["1024 rows"] / 1e9),
      "GB",
    ),
    Headline(
      "Step of a Llama, 1.1B\nparameters, on 8 GPUs: each",
      ("parameters gathered once a step", llama["step"] / 1e9),
      ('gather="block"', llama["block"] / 1e9),
      "GB",
    ),
    Headline(
      "Weights and state of AdamW,\nheld all the time",
      ("float32", held["optax.adamw"]),
      ("bf16_lean", held["state int8, weights int8"]),
      "bytes a parameter",
    ),
  ]


def _read(name: str) -> dict[str, Any]:
  return json.loads((RESULTS / f"{name}.json").read_text())


def _is(row: dict[str, Any], **facts: Any) -> bool:
  return all(row[key] == value for key, value in facts.items())


@picture_style()
def picture(rows: list[Headline]) -> Any:
  """Two bars for each, the one without mpjax as long as the axis."""
  figure = new_figure(4.4, "Memory, compiled for NVIDIA H200 by XLA")
  axes = figure.subplots()
  for i, row in enumerate(rows):
    for offset, (name, value), colour in ((-0.19, row.without, GREY), (0.19, row.with_, BLUE)):
      axes.barh(i + offset, value / row.without[1], height=0.36, color=colour)
      label = f"{name}: {value:.3g} {row.unit}"
      inside = value / row.without[1] > 0.6
      x = value / row.without[1] + (-0.01 if inside else 0.01)
      paint = "white" if inside and colour == BLUE else BLACK
      axes.text(x, i + offset, label, ha="right" if inside else "left", va="center", color=paint)
    axes.text(1.01, i, f"{row.ratio:.2f}x", va="center", fontsize=HEADING, fontweight="bold", color=BLUE)
  axes.set_yticks(range(len(rows)), [row.title for row in rows], fontsize=TEXT)
  axes.tick_params(axis="y", length=0)
  axes.set(xlim=(0, 1.09), ylim=(len(rows) - 0.5, -0.5), xticks=[])
  axes.spines["bottom"].set_visible(False)
  return figure


def table(rows: list[Headline]) -> str:
  """The same figures as a table."""
  lines = ["| compiled for an H200 | without | with mpjax | ratio |", "|---|---|---|---|"]
  for row in rows:
    cells = (f"{name}: {value:.3g} {row.unit}" for name, value in (row.without, row.with_))
    lines.append(f"| {row.title.replace(chr(10), ' ')} | {' | '.join(cells)} | {row.ratio:.2f} |")
  return "\n".join(lines)
