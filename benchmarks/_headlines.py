"""The five figures of memory that docs/benchmarks.md begins with, as a picture."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

from benchmarks._picture_style import BLACK, BLUE, GREY, HEADING, TEXT, new_figure, picture_style
from benchmarks._runner import one


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


def headlines(read: Callable[[str], dict[str, Any]]) -> list[Headline]:
  """Finds the figures in the reports that `read` gives by name."""
  step = functools.partial(one, read("memory"), target="h200", model="gpt", rows=8)
  gradient = functools.partial(one, read("autocast"), target="h200", model="GPT")
  loss = functools.partial(one, read("large_vocabulary"), target="h200", policy="bf16")
  llama = functools.partial(one, read("gather"), target="h200:8", model="llama", accumulate=1)
  update = functools.partial(one, read("few_bytes"), target="h200")
  return [
    Headline(
      "Training step of a GPT, 124M\nparameters, 8 rows of 1024 tokens",
      ("fp32", step(policy="fp32")["peak"] / 1e9),
      ("bf16", step(policy="bf16")["peak"] / 1e9),
      "GB",
    ),
    Headline(
      "Gradient of a GPT in bfloat16,\n768 wide, 4 layers: temporaries",
      ("careful casts by hand", gradient(casts="by hand")["temporaries"] / 1e9),
      ("autocast", gradient(casts="autocast")["temporaries"] / 1e9),
      "GB",
    ),
    Headline(
      "Loss of 128,256 classes,\n8192 tokens: temporaries",
      ("whole logits", loss(loss="whole logits")["temporaries"] / 1e9),
      ("linear_cross_entropy", loss(loss="linear_cross_entropy")["temporaries"] / 1e9),
      "GB",
    ),
    Headline(
      "Step of a Llama, 1.1B\nparameters, on 8 GPUs: each",
      ("parameters gathered once a step", llama(gather="step")["peak"] / 1e9),
      ('gather="block"', llama(gather="block")["peak"] / 1e9),
      "GB",
    ),
    Headline(
      "Weights and state of AdamW,\nheld all the time",
      ("float32", update(kept="optax.adamw")["held"]),
      ("bf16_lean", update(kept="state int8, weights int8")["held"]),
      "bytes a parameter",
    ),
  ]


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
