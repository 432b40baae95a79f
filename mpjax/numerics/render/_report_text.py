"""Tables of a numerics report: by kind for a text, by module for a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from mpjax.numerics._report import NumericsReport, advice_lines, heading, percent, power
from mpjax.numerics._tensors import FP8, GRADIENTS, INTEREST, KINDS, Tensor

if TYPE_CHECKING:
  import rich.console

_SHORT = {"float16": "f16", "bfloat16": "bf16", "float8_e4m3fn": "E4M3 scaled", "float8_e5m2": "E5M2 scaled"}


def summary_rows(report: NumericsReport, formats: Sequence[str] = INTEREST) -> list[list[str]]:
  """Cells of a table with a row for each kind of tensor, at scale 1 and at the loss scale; a header first."""
  header = ["tensors", "number", "range", "zero", *(f"lost in {_SHORT[name]}" for name in formats), "error"]
  rows = [header]
  for kind in KINDS:
    tensors = report.of(kind)
    if not tensors:
      continue
    scales = {1.0, report.loss_scale} if kind in GRADIENTS else {1.0}
    for scale in sorted(scales):
      title = f"{kind}s" if scale == 1 else f"  times {power(scale)}"
      count = sum(t.magnitudes.count for t in tensors)
      zero = sum(t.magnitudes.zero for t in tensors) / count
      errors = [t.error for t in tensors if t.error is not None]
      first = scale == 1
      rows.append(
        [
          title,
          str(len(tensors)) if first else "",
          _range(tensors) if first else "",
          percent(zero) if first else "",
          *(_lost(report, kind, name, scale) for name in formats),
          f"{max(errors):.2g}" if errors and first else "",
        ]
      )
  return rows


def _lost(report: NumericsReport, kind: str, name: str, scale: float) -> str:
  if name not in FP8:
    return percent(report.lost(kind, name, scale))
  return percent(report.lost(kind, name, None)) if scale == 1 else ""


def _range(tensors: list[Tensor]) -> str:
  ranges = [r for t in tensors if (r := t.magnitudes.range)]
  return (
    f"2^{min(r[0] for r in ranges)} to 2^{max(r[1] for r in ranges) + 1}"
    if ranges
    else "not finite"
    if any(t.magnitudes.nan + t.magnitudes.inf for t in tensors)
    else "all zero"
  )


def print_report(report: NumericsReport, console: rich.console.Console, limit: int = 12) -> None:
  """Prints a report: by kind, the modules with the largest errors, findings, and the advice.

  Args:
    report: the report.
    console: where to.
    limit: number of modules that are listed.
  """
  import rich.box
  import rich.syntax
  import rich.table

  console.print("\n".join(heading(report)), highlight=False, markup=False, soft_wrap=True)
  # A narrow terminal has no room for more formats than those that the policy could compute in.
  narrow = console.width < 100 and not report.policy.fp8
  header, *body = summary_rows(report, INTEREST[:2] if narrow else INTEREST)
  table = rich.table.Table(box=rich.box.SIMPLE_HEAD, padding=(0, 1 if console.width >= 100 else 0, 0, 1))
  for i, name in enumerate(header):
    title = name.replace("lost in ", "lost in\n").replace(" scaled", ",\nscaled")
    table.add_column(title, justify="left" if i == 0 else "right", no_wrap=True)
  for row in body:
    table.add_row(*row)
  console.print(table)
  _print_errors(report, console, limit)
  colors = {"problem": "bold red", "note": "cyan"}
  for finding in report.findings:
    console.print(f"[{colors[finding.severity]}]{finding.severity}[/] ", end="")
    console.print(finding.text, highlight=False, markup=False, soft_wrap=True)
  if report.advice is None:
    return
  console.print()
  console.print("\n".join(advice_lines(report)), highlight=False, markup=False, soft_wrap=True)
  console.print(rich.syntax.Syntax(report.advice.yaml.rstrip(), "yaml", background_color="default"))


def _print_errors(report: NumericsReport, console: rich.console.Console, limit: int) -> None:
  """The error of activations and of their gradients, as bars, by module in the order of the program."""
  import rich.box
  import rich.table

  forward = report.error_by_module("activation")
  backward = report.error_by_module("activation gradient")
  modules = list(dict.fromkeys([*forward, *backward]))
  if not modules:
    return
  worst = max((e for e in (*forward.values(), *backward.values()) if e < float("inf")), default=0.0)
  shown = modules
  if len(modules) > limit:
    key = lambda m: max(forward.get(m, 0.0), backward.get(m, 0.0))
    chosen = set(sorted(modules, key=key, reverse=True)[:limit])
    shown = [m for m in modules if m in chosen]
  title = "error against float32, by module in the order of the program"
  if len(shown) < len(modules):
    title += f" (the {len(shown)} largest of {len(modules)})"
  table = rich.table.Table(box=rich.box.SIMPLE_HEAD, title=title, title_justify="left", title_style="none")
  table.add_column("module", overflow="fold")
  for name in ("values", "gradients"):
    table.add_column(name, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
  cell = lambda e: "" if e is None else f"{e:.2g}"
  bar = lambda e: "" if not e or not worst else "█" * max(1, round(8 * min(e, worst) / worst))
  for module in shown:
    f, b = forward.get(module), backward.get(module)
    table.add_row(module or "(no module)", cell(f), bar(f), cell(b), bar(b))
  console.print(table)
