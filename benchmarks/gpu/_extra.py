"""Measured on demand by the gpu suite: FP8 products by themselves, and the largest batch of each row."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

from benchmarks._worker import Worker

ROUNDS = 5


def products(
  report: dict[str, Any],
  models: list[dict[str, Any]],
  start: Callable[[dict[str, Any]], Worker],
  until: float,
  peak: dict[str, int],
) -> None:
  """FP8 products at the sizes of the transformers' and of two squares, beside bfloat16's."""
  square = peak["size"]
  shapes = {"square / 2": (square // 2,) * 3, "square": (square,) * 3}
  for model in models:
    if model["kind"] == "gpt":
      dim, tokens, title = model["sizes"]["dim"], model["batch"] * model["seq"], model["title"]
      shapes[f"{title}, qkv"] = (tokens, 3 * dim, dim)
      shapes[f"{title}, out"] = (tokens, dim, dim)
      shapes[f"{title}, up"] = (tokens, 4 * dim, dim)
      shapes[f"{title}, down"] = (tokens, dim, 4 * dim)
  tables = report["products"] = {}
  if "float8" not in report["peaks"]:
    report["products"] = {"error": "no FP8 peak could be measured on this device"}
    print(report["products"]["error"], flush=True)
    return
  print(f"{'product [M, K] x [K, N]':52}{'forward':>27}{'with backward':>27}")
  # All compile at once, and only then is one of them after the other measured.
  titles = {f"{name} {'x'.join(map(str, shape))}": shape for name, shape in shapes.items()}
  task = {"measure": "products", "calls": peak["calls"]}
  workers = {title: start(task | {"shape": shape}) for title, shape in titles.items()}
  ready = {title: worker.read(until - time.monotonic()) for title, worker in workers.items()}
  for title, shape in titles.items():
    table = _product_rows(workers[title], ready[title], until, shape, report["peaks"]["float8"])
    tables[title] = table
    if "error" in table:
      print(f"  {title}: {table['error']}", flush=True)
      continue
    for kind, row in table.items():
      cells = (
        f"{part['seconds'] * 1e6:9.1f} us{part['ratio']:6.2f}x{100 * part['share_of_peak']:7.1f}%"
        for part in row.values()
      )
      print(f"  {f'{title}, {kind}':50}" + "".join(cells), flush=True)


def _product_rows(
  worker: Worker, ready: dict[str, Any], until: float, shape: Any, peak: float
) -> dict[str, Any]:
  """Returns seconds, FLOP/s, how many times as fast as in bfloat16, and the share of the FP8 peak."""
  answers = [ready]
  for _ in range(ROUNDS):
    if "error" not in answers[-1]:
      answers.append(worker.ask(until - time.monotonic()))
  worker.close()
  if "error" in answers[-1]:
    return answers[-1]
  rows: dict[str, Any] = {kind: {} for kind in answers[1]}
  for at, (part, count) in enumerate((("forward", 1), ("with_backward", 3))):
    flops = 2 * count * shape[0] * shape[1] * shape[2]
    for kind, row in rows.items():
      seconds = statistics.median(answer[kind][at] for answer in answers[1:])
      row[part] = {
        "seconds": seconds,
        "flops_per_s": flops / seconds,
        "ratio": statistics.median(answer["bf16"][at] / answer[kind][at] for answer in answers[1:]),
        "share_of_peak": flops / seconds / peak,
      }
  return rows


def largest_batch(
  report: dict[str, Any],
  models: dict[str, dict[str, Any]],
  start: Callable[[dict[str, Any], str], Worker],
  until: float,
) -> None:
  """The largest batch that each row trains with: doubled from the model's own, and one step between."""
  tables: dict[str, dict[str, Any]] = {}
  report["largest_batch"] = tables
  for title, model in models.items():
    for name in model["rows"]:
      row: dict[str, Any] = {"batch": None, "units_per_s": None, "tried": {}}
      tables.setdefault(title, {})[name] = row
      batch = step = model["batch"]
      while batch and time.monotonic() < until:
        answer = _one_round(start(model | {"batch": batch}, name), until)
        reason = answer.get("error") or answer.get("skipped")
        row["tried"][batch] = reason or "trains"
        if reason is None:
          row |= {"batch": batch, "units_per_s": batch * model.get("seq", 1) / answer["seconds"]}
        if reason is None and step == batch:  # still doubling
          step = batch = 2 * batch
        elif reason is not None and step == batch and row["batch"]:
          batch, step = row["batch"] * 3 // 2, 0  # between the last that trains and the first that does not
        else:
          break
      print(f"{title}, {name}: largest batch {row['batch']}, tried {row['tried']}", flush=True)


def _one_round(worker: Worker, until: float) -> dict[str, Any]:
  answer = worker.read(until - time.monotonic())
  for word in ("compile", "begin", "round"):
    if not {"error", "skipped"} & {*answer}:
      answer = worker.ask(until - time.monotonic(), word)
  worker.close()
  return answer
