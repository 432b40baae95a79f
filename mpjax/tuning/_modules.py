"""The modules that a policy can treat separately, their levels of precision, and the policy for them."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from mpjax.casting import Explanation
from mpjax.formats import narrow_bits
from mpjax.jaxpr import layer_pattern
from mpjax.patterns import component_regex
from mpjax.policy import Policy, get_policy

# Levels of precision for a module, the most exact first.
LEVELS = ("fp32", "fp16", "bf16", "fp8")
_DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16", "fp8": "bfloat16"}


@dataclasses.dataclass(frozen=True)
class Module:
  """Modules that are treated alike: layers whose paths differ only in numbers, or a single module.

  Attributes:
    name: `GPT/blocks/*/up`, or the path of a single module.
    paths: the module paths.
    fp8: the paths with products that the recipe `current` quantises.
  """

  name: str
  paths: tuple[str, ...]
  fp8: frozenset[str] = frozenset()


def list_modules(half: Explanation, fp8: Explanation) -> list[Module]:
  """Returns the modules in which a policy changes a dtype, in program order.

  Args:
    half: explanation of the program under a policy that computes in half precision.
    fp8: explanation of the program under a policy with FP8 products.
  """
  paths: dict[str, dict[str, None]] = {}
  for row in half.rows:
    if row.flops or (row.before == "float32" and row.after in ("bfloat16", "float16")):
      paths.setdefault(layer_pattern(row.path), {})[row.path] = None
  quantised = frozenset(row.path for row in fp8.rows if row.flops and narrow_bits(row.after))
  return [Module(name, tuple(found), frozenset(quantised & found.keys())) for name, found in paths.items()]


def mixed_policy(levels: Mapping[Module, str], among: Sequence[str]) -> Policy:
  """Returns the simplest policy under which each module has its level.

  Args:
    levels: one of `LEVELS` by module.
    among: all module paths of the program; a pattern must match only those of its module.
  """
  count = Counter(level for module, level in levels.items() for _ in module.paths)
  has_fp8 = "fp8" in count
  halves = {level: n for level, n in count.items() if level in ("bf16", "fp16")}
  base = "fp8" if has_fp8 else max(halves, key=lambda level: halves[level]) if halves else "fp32"
  if base == "fp32":
    return get_policy("fp32")
  rest = "bf16" if has_fp8 else base
  changed = {m: level for m, level in levels.items() if level != base and (level != rest or m.fp8)}
  spec: dict[str, Any] = {"base": base}
  if changed:
    # The deepest first, because the first matching pattern decides.
    ordered = sorted(changed, key=lambda m: -m.name.count("/"))
    spec["overrides"] = {pattern_of(m, among): _DTYPES[changed[m]] for m in ordered}
  if "fp16" in changed.values() and base != "fp16":
    spec["loss_scaling"] = "dynamic"
  return get_policy(spec)


def pattern_of(module: Module, among: Sequence[str]) -> str:
  """Returns the shortest regular expression that matches only the paths of a module."""
  parts = []  # of which those that differ, do so only in numbers
  for name, *others in zip(*(path.split("/") for path in module.paths), strict=True):
    part = re.escape(name)
    parts.append(re.sub(r"\d+", r"\\d+", part) if {*others} - {name} else part)
  for start in range(len(parts) - 1, -1, -1):
    pattern = "/".join(parts[start:])
    if pattern and set(filter(component_regex(pattern).search, among)) == set(module.paths):
      return pattern
  return "^" + "/".join(parts) + "$"
