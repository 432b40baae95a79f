"""Tables, pictures and targets of the reports of the overhead suite."""

from __future__ import annotations

import textwrap
from typing import Any

from benchmarks._record import provenance
from mpjax._render.picture_style import (
  BLACK,
  GREY,
  SMALL,
  TEXT,
  draw_limit,
  new_figure,
  picture_style,
  policy_colour,
)

COMPUTE_BOUND = 1.03  # of the hand-written step's time
MEMORY = 1.00  # of the hand-written bfloat16 step's temporaries
IMPORT = 1.3  # of the time that its dependencies take
SHORT = {
  "transformer": "transformer",
  "vit": "ViT",
  "mlp": "perceptron",
  "transformer_opt": "transformer, few tokens",
  "mlp_tiny": "tiny perceptron",
  "mlp_tiny_scan": "tiny, 500 steps in one program",
}


def show(title: str, dtype: str, rows: dict[str, Any]) -> None:
  """Prints what was found of a model and dtype."""
  print(f"{title}, {dtype}")
  print(
    f"  {'':46}{'ms':>9}{'ratio':>8}{'quartiles':>16}{'trace':>7}{'compile':>8}{'temp MB':>9}{'ratio':>7}"
  )
  for name, row in rows.items():
    if "error" in row:
      print(f"  {name:46}{row['error']}")
      continue
    timed = " " * 33
    if "step_s" in row:
      quartiles = f"{row['step_q25']:.3f}-{row['step_q75']:.3f}"
      timed = f"{row['step_s'] * 1e3:9.3f}{row['step_ratio']:8.3f}{quartiles:>16}"
    phases = "".join(
      f"{row[f'{phase}_ratio']:{width}.2f}" if f"{phase}_ratio" in row else " " * width
      for phase, width in (("trace", 7), ("compile", 8))
    )
    ratio = f"{row['temp_bytes_ratio']:7.3f}" if "temp_bytes_ratio" in row else ""
    print(f"  {name:46}{timed}{phases}{row['temp_bytes'] / 1e6:9.1f}{ratio}", flush=True)


def tables(report: dict[str, Any]) -> str:
  """Ratios to the hand-written step by dtype: variants down, models across."""
  here = any("step_ratio" in row for _, _, _, row in each(report))
  parts = []
  for dtype in dict.fromkeys(dtype for model in report["models"].values() for dtype in model["dtypes"]):
    models = {SHORT[name]: model["dtypes"][dtype] for name, model in report["models"].items()}
    if here:
      parts += [f"**{dtype}**, time of a step:", table(models, "step_ratio", "{:.2f}", spread="step")]
      traced = {name: rows for name, rows in models.items() if "trace_ratio" in next(iter(rows.values()))}
      columns = {
        f"{name}: {title}": (rows, figure)
        for name, rows in traced.items()
        for title, figure in (("trace", "trace_ratio"), ("compile", "compile_ratio"))
      }
      if columns:
        parts += [f"{dtype}, seconds of tracing and of compiling:", columns_table(columns)]
    costs = {
      f"{name}: {title}": (rows, figure)
      for name, rows in models.items()
      for title, figure in (("temporaries", "temp_bytes_ratio"), ("bytes accessed", "bytes_accessed_ratio"))
      if any(figure in row for row in rows.values())
    }
    parts += [f"{dtype}, what the compiler plans:", columns_table(costs)]
  bases = base_line(report)
  return "\n\n".join([*parts, *bases, targets(report), provenance(report)])


def table(models: dict[str, Any], figure: str, form: str, spread: str = "") -> str:
  """A figure by variant and model, with the quartiles of `spread`."""
  names = list(dict.fromkeys(name for rows in models.values() for name in rows))
  lines = ["| step | " + " | ".join(models) + " |", "|---|" + "---|" * len(models)]
  for name in names:
    cells = []
    for rows in models.values():
      row = rows.get(name, {})
      if figure not in row:
        cells.append("does not compile" if "error" in row else "-")
        continue
      low, high = row[f"{spread}_q25"], row[f"{spread}_q75"]
      cells.append(form.format(row[figure]) + (f" ({low:.2f} to {high:.2f})" if low != high else ""))
    lines.append(f"| {name} | " + " | ".join(cells) + " |")
  return "\n".join(lines)


def columns_table(columns: dict[str, tuple[dict[str, Any], str]]) -> str:
  """Ratios by variant, one column a pair of rows and figure."""
  names = list(dict.fromkeys(name for rows, _ in columns.values() for name in rows))
  lines = ["| step | " + " | ".join(columns) + " |", "|---|" + "---|" * len(columns)]
  for name in names:
    cells = [
      f"{rows[name][figure]:.3f}" if figure in rows.get(name, {}) else "-"
      for rows, figure in columns.values()
    ]
    lines.append(f"| {name} | " + " | ".join(cells) + " |")
  return "\n".join(lines)


def base_line(report: dict[str, Any]) -> list[str]:
  """What 1.00 stands for."""
  lines = []
  for name, model in report["models"].items():
    cells = []
    for dtype, rows in model["dtypes"].items():
      base = next(iter(rows.values()))
      time = f"{base['step_s'] * 1e3:.3g} ms, " if "step_s" in base else ""
      if "temp_bytes" in base:
        cells.append(f"{dtype} {time}{base['temp_bytes'] / 1e6:.3g} MB of temporaries")
    lines.append(f"- {SHORT[name]} ({model['title']}): {'; '.join(cells)}")
  return ["1.00 is the hand-written step:", "\n".join(lines)]


def targets(report: dict[str, Any]) -> str:
  """What is asked of mpjax, and what was found, as a list."""
  lines = [*fastest(report), *memory(report)]
  if "import" in report:
    found = report["import"]["mpjax"]
    others = next(name for name in report["import"] if name != "mpjax")
    seconds = f"{found['import_s']:.2f} s, {found['import_ratio']:.2f}x of {others}"
    lines.append(f"- `import mpjax`: {seconds}; {verdict(found['import_ratio'] <= IMPORT)} ({IMPORT}x)")
  return "\n".join(lines)


def fastest(report: dict[str, Any]) -> list[str]:
  """mpjax's steps in half precision beside the fastest of the others that do the same.

  In float16 those have a loss scale; in bfloat16 the hand-written step is one of them.
  """
  lines = []
  for name, model in report["models"].items():
    for dtype, rows in model["dtypes"].items():
      timed = {variant: row for variant, row in rows.items() if "step_ratio" in row}
      if dtype == "float32" or not timed:
        continue
      ours = [variant for variant in timed if variant.startswith("mpjax")]
      base = {next(iter(rows))} if dtype == "float16" else set()
      others = [variant for variant in timed if variant not in (*ours, *base)]
      if not ours or not others:
        continue
      ratio = lambda variant, timed=timed: timed[variant]["step_ratio"]
      mine, theirs = min(ours, key=ratio), min(others, key=ratio)
      # Level: neither median lies outside the other's quartiles.
      level = timed[mine]["step_q25"] <= ratio(theirs) and ratio(mine) <= timed[theirs]["step_q75"]
      met = "level" if level and ratio(mine) > ratio(theirs) else verdict(ratio(mine) <= ratio(theirs))
      lines.append(
        f"- {SHORT[name]}, {dtype}, time: {mine} {ratio(mine):.3f}, fastest other {theirs} "
        f"{ratio(theirs):.3f}: {met}"
      )
      if model["bound"] == "products":
        judged = (f"{v} {ratio(v):.3f} {verdict(ratio(v) <= COMPUTE_BOUND)}" for v in ours)
        lines.append(
          f"- {SHORT[name]}, {dtype}, at most {COMPUTE_BOUND} of hand-written: {'; '.join(judged)}"
        )
  return lines


def memory(report: dict[str, Any]) -> list[str]:
  """Temporaries of mpjax's steps in half precision beside the hand-written bfloat16 one's, to two digits."""
  lines = []
  for name, model in report["models"].items():
    in_bfloat16: dict[str, dict[str, Any]] = model["dtypes"].get("bfloat16", {})
    base = next((row.get("temp_bytes") for row in in_bfloat16.values()), None)
    ratios = {
      f"{dtype}, {variant}": row["temp_bytes"] / base
      for dtype in ("bfloat16", "float16")
      for variant, row in model["dtypes"].get(dtype, {}).items()
      if base and variant.startswith("mpjax") and "temp_bytes" in row
    }
    if ratios:
      judged = (f"{v} {ratio:.3f} {verdict(round(ratio, 2) <= MEMORY)}" for v, ratio in ratios.items())
      lines.append(f"- {SHORT[name]}, temporaries over hand-written bfloat16: {'; '.join(judged)}")
  return lines


def verdict(met: bool) -> str:
  return "met" if met else "**not met**"


def each(report: dict[str, Any]) -> Any:
  """Model, dtype, variant and row of all there is."""
  for name, model in report["models"].items():
    for dtype, rows in model["dtypes"].items():
      for variant, row in rows.items():
        yield name, dtype, variant, row


@picture_style()
def pictures(report: dict[str, Any]) -> dict[str, Any]:
  """Times (or temporaries) beside the hand-written step, a panel for each model and half precision."""
  here = any("step_ratio" in row for _, _, _, row in each(report))
  figure, what = ("step_ratio", "Time of a step") if here else ("temp_bytes_ratio", "Temporaries of a step")
  dtypes = {"bfloat16": policy_colour("bf16"), "float16": policy_colour("fp16")}
  models = [n for n, m in report["models"].items() if all(dtype in m["dtypes"] for dtype in dtypes)]
  models = [name for name in models if name != "mlp_tiny"]  # whose times tell of the thread pool
  if not models:
    return {}
  rows = {
    dtype: {
      name: {v: r for v, r in report["models"][name]["dtypes"][dtype].items() if figure in r}
      for name in models
    }
    for dtype in dtypes
  }
  variants = {dtype: list(dict.fromkeys(v for of in rows[dtype].values() for v in of)) for dtype in dtypes}
  lengths = [len(names) for names in variants.values()]
  longest = max(
    row["step_q75" if here else figure] for of in rows.values() for m in of.values() for row in m.values()
  )
  drawn = new_figure(1.4 + 0.33 * sum(lengths), f"{what} over the hand-written one's (grey: not mpjax)")
  axes = drawn.subplots(
    len(dtypes), len(models), squeeze=False, sharex=True, sharey="row", height_ratios=lengths
  )
  for i, (dtype, colour) in enumerate(dtypes.items()):
    names = variants[dtype]
    for panel, (name, found) in zip(axes[i], rows[dtype].items(), strict=True):
      for variant, row in found.items():
        y = names.index(variant)
        panel.barh(y, row[figure], height=0.75, color=colour if variant.startswith("mpjax") else GREY)
        end = max(row[figure], 1.0)  # right of the line
        if here:
          panel.plot([row["step_q25"], row["step_q75"]], [y, y], color=BLACK, linewidth=1.2)
          end = max(end, row["step_q75"])
        panel.text(end + 0.03 * longest, y, f"{row[figure]:.2f}", va="center", fontsize=SMALL)
      draw_limit(panel, 1.0, linewidth=0.8)
      panel.set_yticks(range(len(names)), [textwrap.fill(variant, 26) for variant in names])
      panel.set(xlim=(0, 1.35 * longest), ylim=(len(names) - 0.5, -0.5), xticks=range(int(longest) + 1))
      panel.tick_params(axis="y", length=0)
      if i == 0:
        panel.set_title(textwrap.fill(SHORT[name], 16), fontsize=SMALL)
    axes[i, 0].set_ylabel(dtype, fontsize=TEXT, fontweight="bold")
  return {"": drawn}
