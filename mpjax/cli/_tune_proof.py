"""Trains a policy and float32 on the same data: do their losses differ by more than those of two seeds?"""

from __future__ import annotations

import math
import pathlib
import statistics
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import rich.console

from mpjax._render.plain_text import table
from mpjax.policy import Policy
from mpjax.train.config._config import Config
from mpjax.train.loop._run import run


def prove(
  config: Config, policy: Policy, label: str, *, steps: int, seeds: Sequence[int], say: Callable[[str], None]
) -> dict[str, Any]:
  """Trains a config under a policy and in float32, once for each seed.

  Args:
    config: the config; policy, seed and number of steps are replaced.
    policy: the policy to train.
    label: the policy's name.
    steps: number of steps of each run.
    seeds: seeds of the parameters and of the order of the data.
    say: called with a line before each run.

  Returns:
    Plain data: `eval_losses` and `final_losses` with a loss for each seed under `fp32` and the label; the
    mean `difference` of the policy's evaluation losses from float32's; a sentence, `conclusion`.

  Raises:
    ConfigError, DataError: if the config cannot be run.
  """
  policies = {"fp32": "fp32", label: policy.to_dict()}
  evals: dict[str, list[float]] = {name: [] for name in policies}
  finals: dict[str, list[float]] = {name: [] for name in policies}
  for seed in seeds:
    for name, spec in policies.items():
      say(f"training {steps} steps of {name}, seed {seed}")
      with tempfile.TemporaryDirectory() as directory:
        out = str(pathlib.Path(directory) / "run")
        tree = config.model_dump() | {"policy": spec, "seed": seed, "out": out}
        tree["train"] |= {"steps": steps, "eval_every": steps, "checkpoint_every": steps, "trackers": []}
        tree["train"] |= {"init_from": None, "init_optimizer": False, "export": None, "profile_steps": None}
        ended = run(tree, console=rich.console.Console(quiet=True))
        evals[name].append(ended.eval_loss)
        finals[name].append(ended.final_loss)
  difference = statistics.fmean(evals[label]) - statistics.fmean(evals["fp32"])
  spread = _spread(evals["fp32"])
  conclusion = f"{label} ends {abs(difference):.2g} {'above' if difference > 0 else 'below'} fp32"
  if math.isnan(spread):
    conclusion += "; run more seeds to judge this"
  else:
    within = "within" if abs(difference) <= spread else "beyond"
    conclusion += f", {within} the {spread:.2g} by which seeds differ"
  found = {"label": label, "steps": steps, "seeds": tuple(seeds), "difference": difference}
  return found | {"eval_losses": evals, "final_losses": finals, "conclusion": conclusion}


def proof_text(proof: dict[str, Any]) -> str:
  """Returns what `prove` found as a table and a sentence."""
  rows = [["policy", "eval loss", "spread", "final loss", "spread"]]
  for label in proof["eval_losses"]:
    parts = proof["eval_losses"][label], proof["final_losses"][label]
    figures = [figure for losses in parts for figure in (statistics.fmean(losses), _spread(losses))]
    rows.append([label, *("" if math.isnan(figure) else f"{figure:.5g}" for figure in figures)])
  many = f"{len(proof['seeds'])} seeds" if len(proof["seeds"]) > 1 else "1 seed"
  lines = [line for row in table(rows) for line in row]
  return "\n".join([f"after {proof['steps']} steps, {many}:", *lines, proof["conclusion"]])


def _spread(losses: Sequence[float]) -> float:
  """Returns the standard deviation over seeds; NaN for a single seed."""
  return statistics.stdev(losses) if len(losses) > 1 else math.nan
