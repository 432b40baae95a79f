"""A numerics report in colour: by kind, and by module with bars for the errors."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mpjax.numerics._tensors import INTEREST
from mpjax.numerics.render._report_text import advice_lines, stored_rows, summary_rows

if TYPE_CHECKING:
  import rich.console

  from mpjax.numerics._report import NumericsReport


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

  console.print("\n".join(report.heading()), highlight=False, markup=False, soft_wrap=True)
  # A narrow terminal has no room for more formats than those that the policy could compute in.
  narrow = console.width < 100 and not report.policy.fp8
  header, *body = summary_rows(report.tensors, report.loss_scale, INTEREST[:2] if narrow else INTEREST)
  table = rich.table.Table(box=rich.box.SIMPLE_HEAD, padding=(0, 1 if console.width >= 100 else 0, 0, 1))
  for i, name in enumerate(header):
    title = name.replace("lost in ", "lost in\n").replace(" scaled", ",\nscaled")
    table.add_column(title, justify="left" if i == 0 else "right", no_wrap=True)
  for row in body:
    table.add_row(*row)
  console.print(table)
  if report.stored:
    header, *body = stored_rows(report.stored)
    table = rich.table.Table(*header[:1], box=rich.box.SIMPLE_HEAD)
    for name in header[1:]:
      table.add_column(name, justify="right")
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
  console.print(
    "\n".join(advice_lines(report.advice, report.findings)), highlight=False, markup=False, soft_wrap=True
  )
  console.print(rich.syntax.Syntax(report.advice.yaml.rstrip(), "yaml", background_color="default"))


def _print_errors(report: NumericsReport, console: rich.console.Console, limit: int) -> None:
  """Prints the errors of activations and their gradients as bars, by module in the order of the program."""
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
