"""Wrong configs: each is refused in one line, or trains; none brings a traceback."""

from __future__ import annotations

import copy
import json
import pathlib
import random
import shutil
from typing import Any

import jax
import yaml

from benchmarks.chaos._starts import HUNG, OUT_OF_TIME, ended, fork, limit_time
from mpjax.cli import main
from mpjax.train import load_config

BASE = {
  "gpt_stdlib": {"dim": 16, "layers": 1, "heads": 2},
  "vit_digits": {"dim": 16, "layers": 1, "heads": 2},
  "resnet_digits": {"stages": [1], "width": 4},
}
SECONDS, TIMEOUT_S = 40, 600  # of processor time, and of waiting
_NUMBERS = (0, -1, 1, 2, 3, 7, 0.5, -0.0, 1e-30, 1e30, 2**31, 2**32, 2**63, 2**64, 10**40)
_ODD: list[Any] = [None, True, False, "", " ", "é\n", "\0", "null", "1e3", "0x10", "fp16", "bf16", "fp8"]
_ODD += ["float13", "auto", ".inf", float("inf"), float("-inf"), float("nan"), [], [1], [[]], {}, {"a": 1}]
_ODD += [
  {1: 2},
  [None],
  "a" * 300,
  *["/", "/dev/null", "/nowhere/x", "../..", "-", "~", "*", "{", "$HOME", "%s"],
]
_OVERRIDES = ["", "=", "x", "=1", "train=", "train.=1", ".steps=1", "train..steps=1", "train.steps"]
_OVERRIDES += ["a.b.c=1", "train.steps=[", "model={", "data=&a [*a]", "policy=!!python/object:os.system x"]
_OVERRIDES += ["out", "seed=1=2"]
_CHARACTERS = ("", "\t", ":", "&a ", "*b", "{", "- ", "\x07", "!!set ")
SLOW = "still tracing or training when its time was over"
# What a wrong config may come to, by the exit status.
RIGHT = {
  0: "trained",
  2: "refused in one line",
  3: "every step skipped",
  5: "given no time to do anything in",
}


def good_configs(root: pathlib.Path) -> dict[str, dict[str, Any]]:
  """Returns the example configs with all keys, as plain data; in another process, since it takes a device."""
  file = root / "configs.json"

  def work() -> int:
    file.write_text(json.dumps({name: load_config(name).model_dump(mode="json") for name in BASE}))
    return 0

  if ended(fork(work, root / "configs.log"), TIMEOUT_S):
    raise RuntimeError((root / "configs.log").read_text())
  trees: dict[str, dict[str, Any]] = json.loads(file.read_text())
  return trees


def mutated(
  root: pathlib.Path, trees: dict[str, dict[str, Any]], chance: random.Random
) -> tuple[pathlib.Path, list[str], list[str]]:
  """Writes a wrong config; returns its file, overrides to go with it, and what was done to it."""
  name = chance.choice(sorted(trees))
  tree = copy.deepcopy(trees[name])
  tree["model"] |= BASE[name]
  tree["train"] |= {"steps": 3, "eval_every": 3, "checkpoint_every": 3, "log_every": 1}
  tree["data"] |= {"batch_size": 8, **({"seq_len": 16, "eval_batches": 1} if "gpt" in name else {})}
  del tree["out"]
  overrides, told = [], [name]
  for _ in range(chance.choice((1, 1, 1, 2, 3))):
    if chance.random() < 0.12:
      overrides.append(chance.choice(_OVERRIDES))
    else:
      told.append(_mutate(tree, chance))
  text = yaml.safe_dump(tree, allow_unicode=True)
  if chance.random() < 0.08:
    at = chance.randrange(len(text))
    text = text[:at] + chance.choice(_CHARACTERS) + text[at + 1 :]
    told.append(f"text at {at}")
  file = root / "mutated.yaml"
  file.write_text(text, encoding="utf-8")
  return file, overrides, told


def _mutate(tree: dict[str, Any], chance: random.Random) -> str:
  """Changes one place of a config, as plain data, and says which."""
  sections = [name for name in tree if isinstance(tree[name], dict)]
  section = chance.choice(sections) if sections and chance.random() < 0.8 else None
  part = tree if section is None else tree[section]
  key = chance.choice(sorted(part, key=str)) if part else "x"
  way = chance.random()
  place = key if section is None else f"{section}.{key}"
  if way < 0.1:
    part.pop(key, None)
    return f"without {place}"
  if way < 0.2:
    part[f"{key}{chance.choice('sx_ ')}"] = copy.deepcopy(part.get(key))
    return f"more than {place}"
  value = chance.choice(_NUMBERS if chance.random() < 0.5 else _ODD)
  part[key] = copy.deepcopy(value)
  return f"{place}={value!r}"[:80]


def tried(root: pathlib.Path, file: pathlib.Path, overrides: list[str]) -> tuple[str, str]:
  """Starts the command with a config; returns the outcome and, where that is wrong, what was said."""
  log, out = root / "mutated.log", root / "mutated"
  log.unlink(missing_ok=True)
  shutil.rmtree(out, ignore_errors=True)

  def work() -> int:
    jax.config.update("jax_num_cpu_devices", 1)
    limit_time(SECONDS)
    return main(["train", str(file), *overrides, f"out={out}"])

  status = ended(fork(work, log), TIMEOUT_S)
  said = log.read_text(errors="replace")
  errors = sum(line.startswith("error: ") for line in said.splitlines())
  if "Traceback (most recent call last)" in said:
    return "a traceback", said[-2000:]
  if status in (HUNG, OUT_OF_TIME):
    return SLOW, ""
  if status in RIGHT and errors == (status != 0):
    return RIGHT[status], ""
  return f"status {status}", said[-2000:]
