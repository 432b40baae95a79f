"""`mpjax plan`: says what a config's training step costs on a device that need not be present."""

from __future__ import annotations

import argparse
import itertools
import json
import pathlib
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import rich.console
import rich.progress

from mpjax._render.html_sections import Report
from mpjax._render.install_text import pip_install
from mpjax._render.plain_text import bytes_text
from mpjax._types import PolicyLike
from mpjax.cli._config_arguments import require_file
from mpjax.cli._exit_status import guarded
from mpjax.cli._policy_arguments import split_policies, warn_of_policy
from mpjax.cli._show import report_console, show
from mpjax.planner import Fit, Plan, Target, cheapest, get_target, largest_batch, presets_of
from mpjax.planner.render import NO_FIT, answer, answer_beside, save_picture, sections_of
from mpjax.train import ConfigError, Planner, load_config, load_plugins
from mpjax.train.config._config import DEFAULT_RECOMPUTE

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_UNITS |= {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_RECOMPUTE = (DEFAULT_RECOMPUTE, "blocks")


def run(options: argparse.Namespace) -> int:
  """Runs the command and returns its exit status."""
  return guarded(lambda: _plan(options))


def _plan(options: argparse.Namespace) -> None:
  policies, target_name, overrides = _split(options.overrides)
  target = _target(target_name)
  if not target.is_here:
    # This process only traces, and the target's compiler has its own process: no device is needed here.
    jax.config.update("jax_platforms", "cpu")
  load_plugins(options.plugin)
  configs = [load_config(options.config, [f"policy={name}", *overrides]) for name in policies]
  config = configs[0] if configs else load_config(options.config, overrides)
  console = report_console()
  if options.memory and not (options.fit or options.cheapest):
    raise ConfigError(f"--memory {options.memory}: expected --fit or --cheapest, too")
  if options.multiple is not None and options.multiple < 1:
    raise ConfigError(f"--multiple {options.multiple}: expected a positive number")
  _check_files(options)
  for each in configs or [config]:
    warn_of_policy(each.policy, target.kind)
  planner = Planner(config, target)
  compile: bool | str = False if options.analytic else "auto"
  memory = _memory(options.memory, target) if options.fit or options.cheapest else 0
  chosen: list[PolicyLike | None] = [each.policy for each in configs] or [None]
  fits: list[Fit] = []
  if options.cheapest:
    named = chosen if policies else presets_of(target)
    plans = _compare(planner, named, compile, console, _RECOMPUTE, planner.gathers)
  elif options.fit:
    fits = [_fit(planner, policy, memory, compile, console, options.multiple) for policy in chosen]
    plans = [fit.plan for fit in fits]
  else:
    plans = _compare(planner, chosen, compile, console, (None,), (None,))
  report: dict[str, Any] = {"plans": [one.to_dict() for one in plans]}
  first = [f"{fit.plan.label}: {fit}" for fit in fits]
  if fits:
    report["fit"] = [
      {"label": f.plan.label, "batch": f.batch, "next_batch": f.next_batch, "next_peak": f.next_peak}
      | {"memory": f.memory, "tried": f.tried}
      for f in fits
    ]
  if options.cheapest:
    try:
      best = cheapest(plans, memory)
    except ValueError as error:
      raise ConfigError(str(error)) from error
    report["cheapest"] = best.label
    first = [f"cheapest that fits {bytes_text(memory)}: {best.label}, {bytes_text(best.peak)}"]
  if not fits and all(plan.time for plan in plans):
    plans.sort(key=lambda plan: plan.time.seconds if plan.time else 0.0)
  if options.cheapest:
    plans.sort(key=lambda plan: plan is not best)
  rates = options.tokens
  if len(plans) > 1:
    said = answer_beside(plans, first, rates=rates)
  else:
    said = [*first, *answer(plans[0], rates=rates)]
  show(Report(said, list(sections_of(plans, console.width))), console, options.table, alarm=NO_FIT)
  if options.json:
    pathlib.Path(options.json).write_text(json.dumps(report, indent=1) + "\n")
  if options.picture:
    save_picture(plans, options.picture)
    console.print(f"picture: {options.picture}", highlight=False, markup=False, soft_wrap=True)


def _split(overrides: Sequence[str]) -> tuple[list[str], str | None, list[str]]:
  """Returns the policies, the target and the config's own overrides."""
  policies, others = split_policies(overrides)
  targets = [override.partition("=")[2] for override in others if override.startswith("target=")]
  return policies, targets[-1] if targets else None, [o for o in others if not o.startswith("target=")]


def _target(name: str | None) -> Target:
  try:
    return get_target(name)
  except ValueError as error:
    raise ConfigError(str(error)) from error


def _memory(text: str | None, target: Target) -> int:
  if text is None:
    if not target.usable:
      raise ConfigError(
        f"target {target.name} does not say how much memory it has: give --memory, as in --memory 16GB"
      )
    return target.usable
  found = re.fullmatch(r"\s*(\d+\.?\d*|\.\d+)\s*((?:[kmgt]i?)?)b?\s*", text.lower())
  if found is None or float(found[1]) <= 0:
    raise ConfigError(f"--memory {text!r}: expected a size such as 80GB, 16GiB or 24000000000")
  return int(float(found[1]) * _UNITS[found[2]])


def _compare(
  planner: Planner,
  policies: Sequence[PolicyLike | None],
  compile: bool | str,
  console: rich.console.Console,
  recompute: Sequence[str | None],
  gathers: Sequence[str | None],
) -> list[Plan]:
  choices = list(itertools.product(policies, recompute, gathers))
  plans: dict[str, Plan] = {}
  several = len(recompute) > 1  # of --cheapest, which takes long: it says in a file, too, how far it is
  with _progress(console, len(choices)) as advance:
    for i, (policy, how, gather) in enumerate(choices):
      more = [f"{word} {value}" for word, value in (("recompute", how), ("gather", gather)) if value]
      line = f"plan {i + 1} of {len(choices)}: {', '.join([str(policy or planner.config.policy), *more])}"
      advance(line)
      if several and not console.is_terminal:
        console.print(line, highlight=False, markup=False, soft_wrap=True)
      made = planner.plan(policy, recompute=how, gather=gather, compile=compile)
      plans.setdefault(made.label, made)
  return list(plans.values())


def _fit(
  planner: Planner,
  policy: PolicyLike | None,
  memory: int,
  compile: bool | str,
  console: rich.console.Console,
  multiple: int | None,
) -> Fit:
  title = f"fit {policy or planner.config.policy}"
  with _progress(console, None) as advance:
    try:
      return largest_batch(
        lambda batch, how: planner.plan(policy, batch=batch, compile=how),
        memory,
        multiple=multiple or planner.multiple,
        compile=compile,
        progress=lambda batch, low, high: advance(f"{title}: batch {batch}, between {low} and {high or '?'}"),
      )
    except ConfigError:
      raise
    except ValueError as error:
      raise ConfigError(str(error)) from error


@contextmanager
def _progress(console: rich.console.Console, total: int | None) -> Iterator[Callable[[str], None]]:
  """Shows a progress bar on a terminal, and nothing elsewhere."""
  bar = rich.progress.Progress(
    rich.progress.TextColumn("{task.description}", markup=False),
    rich.progress.BarColumn(),
    rich.progress.TimeElapsedColumn(),
    console=console,
    transient=True,
    disable=not console.is_terminal,
  )
  with bar:
    task = bar.add_task("begins", total=total)
    begun = False

    def advance(status: str) -> None:
      nonlocal begun
      bar.update(task, advance=1 if begun else 0, description=status)
      begun = True

    yield advance


def _check_files(options: argparse.Namespace) -> None:
  """Raises for files that cannot be written, before anything is computed."""
  if options.picture:
    if pathlib.Path(options.picture).suffix.lower() not in (".png", ".svg"):
      raise ConfigError(f"--picture {options.picture}: expected a file that ends in .png or .svg")
    try:
      import matplotlib  # noqa: F401
    except ImportError:
      raise ConfigError(f"--picture needs matplotlib: {pip_install('plan')}") from None
  for name in ("json", "picture"):
    if getattr(options, name):
      require_file(f"--{name}", getattr(options, name))
