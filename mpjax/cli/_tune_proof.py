"""Trains a policy and float32 on the same data: do their losses differ by more than those of two seeds?"""

from __future__ import annotations

import dataclasses
import math
import pathlib
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import rich.console

from mpjax._render.plain_text import table
from mpjax.policy import Policy
from mpjax.train.config._config import Config
from mpjax.train.loop._run import run


@dataclasses.dataclass(frozen=True)
class Proof:
  """Losses of a policy and of float32 after the same steps on the same data.

  Attributes:
    label: the policy's name.
    steps: number of steps of each run.
    seeds: the seed of each run.
    eval_losses, final_losses: under `fp32` and the label, one loss for each seed.
  """

  label: str
  steps: int
  seeds: tuple[int, ...]
  eval_losses: Mapping[str, tuple[float, ...]]
  final_losses: Mapping[str, tuple[float, ...]]

  @property
  def difference(self) -> float:
    """Returns the policy's evaluation loss minus float32's, averaged over seeds."""
    pairs = zip(self.eval_losses[self.label], self.eval_losses["fp32"], strict=True)
    return statistics.fmean(mine - theirs for mine, theirs in pairs)

  @property
  def spread(self) -> float:
    """Returns the standard deviation of float32's evaluation loss over seeds; NaN for a single seed."""
    losses = self.eval_losses["fp32"]
    return statistics.stdev(losses) if len(losses) > 1 else math.nan

  @property
  def conclusion(self) -> str:
    """Returns the result in one sentence."""
    found = f"{self.label} ends {abs(self.difference):.2g} {'above' if self.difference > 0 else 'below'} fp32"
    if math.isnan(self.spread):
      return f"{found}; run more seeds to judge this"
    within = abs(self.difference) <= self.spread
    return f"{found}, {'within' if within else 'beyond'} the {self.spread:.2g} by which seeds differ"

  def __str__(self) -> str:
    rows = [["policy", "eval loss", "spread", "final loss", "spread"]]
    for label, losses in self.eval_losses.items():
      figures = [
        f for part in (losses, self.final_losses[label]) for f in (statistics.fmean(part), _spread(part))
      ]
      rows.append([label, *(f"{f:.5g}" if not math.isnan(f) else "" for f in figures)])
    many = f"{len(self.seeds)} seeds" if len(self.seeds) > 1 else "1 seed"
    lines = [line for row in table(rows) for line in row]
    return "\n".join([f"after {self.steps} steps, {many}:", *lines, self.conclusion])

  def to_dict(self) -> dict[str, Any]:
    """Returns plain data."""
    return dataclasses.asdict(self) | {"difference": self.difference, "conclusion": self.conclusion}


def prove(
  config: Config,
  policy: Policy,
  label: str,
  *,
  steps: int,
  seeds: Sequence[int],
  say: Callable[[str], None],
) -> Proof:
  """Trains a config under a policy and in float32, once for each seed.

  Args:
    config: the config; policy, seed and number of steps are replaced.
    policy: the policy to train.
    label: the policy's name.
    steps: number of steps of each run.
    seeds: seeds of the parameters and of the order of the data.
    say: called with a line before each run.

  Raises:
    ConfigError, DataError: if the config cannot be run.
  """
  evals: dict[str, list[float]] = {"fp32": [], label: []}
  finals: dict[str, list[float]] = {"fp32": [], label: []}
  for seed in seeds:
    for name, spec in (("fp32", "fp32"), (label, policy.to_dict())):
      say(f"training {steps} steps of {name}, seed {seed}")
      with tempfile.TemporaryDirectory() as directory:
        tree = config.model_dump() | {
          "policy": spec,
          "seed": seed,
          "out": str(pathlib.Path(directory) / "run"),
        }
        tree["train"] |= {"steps": steps, "eval_every": steps, "checkpoint_every": steps, "init_from": None}
        ended = run(tree, console=rich.console.Console(quiet=True))
        evals[name].append(ended.eval_loss)
        finals[name].append(ended.final_loss)
  return Proof(
    label=label,
    steps=steps,
    seeds=tuple(seeds),
    eval_losses={name: tuple(found) for name, found in evals.items()},
    final_losses={name: tuple(found) for name, found in finals.items()},
  )


def _spread(losses: Sequence[float]) -> float:
  return statistics.stdev(losses) if len(losses) > 1 else math.nan
