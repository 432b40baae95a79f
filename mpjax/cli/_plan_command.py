"""`mpjax plan`: says what a config's training step costs on a device that need not be present."""

from __future__ import annotations

import argparse
import itertools
import re
from collections.abc import Iterable
from typing import Any

import jax

from mpjax._mistakes import config_errors
from mpjax._render.plain_text import bytes_text
from mpjax._render.tables import Report
from mpjax._types import PolicyLike
from mpjax.cli._shared import Screen, load_configs, split_policies
from mpjax.planner import Fit, Plan, Target, cheapest, get_target, largest_batch, presets_of
from mpjax.planner._report import NO_FIT, answer_of, sections_of
from mpjax.train import ConfigError, Planner
from mpjax.train.config._config import DEFAULT_RECOMPUTE
from mpjax.train.setup._saved_run import facts_of

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_UNITS |= {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_RECOMPUTE = (DEFAULT_RECOMPUTE, "blocks")


def run(options: argparse.Namespace) -> None:
  """Runs the command."""
  with config_errors():
    target = get_target(options.own.get("target"))
  if not target.is_here:
    # This process only traces, and the target's compiler has its own process: no device is needed here.
    jax.config.update("jax_platforms", "cpu")
  configs, screen = load_configs(options, target.kind), Screen()
  if options.memory and not (options.fit or options.cheapest):
    raise ConfigError(f"--memory {options.memory}: expected --fit or --cheapest, too")
  planner = Planner(configs[0], target, facts_of(configs[0], options.config))
  compile: bool | str = False if options.analytic else "auto"
  memory = _memory(options.memory, target) if options.fit or options.cheapest else 0
  policies: list[PolicyLike] = [each.policy for each in configs]
  report: dict[str, Any] = {}
  first: list[str] = []
  if options.fit:
    with screen.progress(lines=False) as advance, config_errors():

      def fit(policy: PolicyLike) -> Fit:
        of_batch = lambda batch, how: planner.plan(policy, batch=batch, compile=how)
        tell = lambda batch, low, high: advance(f"batch {batch}, between {low} and {high or '?'}")
        return largest_batch(of_batch, memory, multiple=planner.multiple, compile=compile, progress=tell)

      fits = [fit(policy) for policy in policies]
    plans = [found.plan for found in fits]
    first = [f"{found.plan.label}: {found}" for found in fits]
    keys = ("batch", "next_batch", "next_peak", "memory", "tried")
    report["fit"] = [{"label": fit.plan.label} | {key: getattr(fit, key) for key in keys} for fit in fits]
  elif options.cheapest:
    is_chosen = bool(split_policies(options.overrides)[0])
    asked = policies if is_chosen else presets_of(target)
    plans = _compare(planner, itertools.product(asked, _RECOMPUTE, planner.gathers), compile, screen)
    with config_errors():
      best = cheapest(plans, memory)
    first = [f"cheapest that fits {bytes_text(memory)}: {best.label}, {bytes_text(best.peak)}"]
    report["cheapest"] = best.label
  else:
    plans = _compare(planner, [(policy, None, None) for policy in policies], compile, screen)
  report = {"plans": [plan.to_dict() for plan in plans], **report}
  if not options.fit and all(plan.time for plan in plans):
    plans.sort(key=lambda plan: plan.time.seconds if plan.time else 0)
  if options.cheapest:
    plans.sort(key=lambda plan: plan is not best)
  said = answer_of(plans, first, rates=options.tokens)
  screen.show(Report(said, list(sections_of(plans))), options, alarm=NO_FIT)
  screen.write_json(options.json, report)


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
  tried: Iterable[tuple[PolicyLike, str | None, str | None]],
  compile: bool | str,
  screen: Screen,
) -> list[Plan]:
  """Plans each policy, recompute and gather; returns plans that are the same once."""
  plans: dict[str, Plan] = {}
  choices = list(tried)
  # --cheapest takes long: it says in a file, too, how far it is.
  with screen.progress(lines=choices[0][1] is not None) as advance:
    for i, (policy, how, gather) in enumerate(choices):
      words = [str(policy), f"recompute {how}", f"gather {gather}"][: 3 if how else 1]
      advance(f"plan {i + 1} of {len(choices)}: {', '.join(words)}")
      made = planner.plan(policy, recompute=how, gather=gather, compile=compile)
      plans.setdefault(made.label, made)
  return list(plans.values())
