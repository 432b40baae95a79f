"""The dotted keys of a config, known without JAX: for completion, and for what a wrong key may mean."""

from __future__ import annotations

import ast
import difflib
import functools
import pathlib
from collections.abc import Iterable

_FOLDER = pathlib.Path(__file__).parent
# What other trainers call a key of ours.
_ALIASES = {
  "lr": "learning_rate",
  "bs": "batch_size",
  "batch": "batch_size",
  "wd": "weight_decay",
  "warmup": "warmup_steps",
  "max_steps": "steps",
  "num_steps": "steps",
  "grad_clip": "clip_norm",
  "clip": "clip_norm",
  "gradient_accumulation_steps": "accumulate",
  "accum": "accumulate",
  "precision": "policy",
  "dtype": "policy",
  "output_dir": "out",
  "resume_from": "init_from",
}


@functools.cache
def config_keys() -> tuple[str, ...]:
  """Returns the dotted keys of a config, with those of every model and dataset of mpjax's own.

  They are read from the source of the classes and functions that define them, whose import takes as long as
  JAX's.
  """
  fields: dict[str, list[ast.AnnAssign]] = {}
  own: list[str] = []
  files = [_FOLDER / "_config.py", _FOLDER.parent / "policy" / "_policy.py"]
  files += [*sorted(_FOLDER.glob("models/*.py")), *sorted(_FOLDER.glob("data/*.py"))]
  for source in (file.read_text(encoding="utf-8") for file in files):
    if not ("\n@register_" in source or "Section):" in source or "Policy):" in source):
      continue
    for node in ast.parse(source).body:
      if isinstance(node, ast.ClassDef):
        fields[node.name] = [line for line in node.body if isinstance(line, ast.AnnAssign)]
      elif isinstance(node, ast.FunctionDef):
        own += [f"{_section(node)}.{argument.arg}" for argument in node.args.kwonlyargs if _section(node)]
  keys = ["model.kind", "data.kind"]
  for field in fields["Config"]:
    name, section = ast.unparse(field.target), fields.get(ast.unparse(field.annotation))
    keys += [name] if section is None else [f"{name}.{ast.unparse(inner.target)}" for inner in section]
  said = {"_", "name", "reason"}  # what a policy says of itself
  policy = [
    name for name in map(ast.unparse, (field.target for field in fields["Policy"])) if name not in said
  ]
  keys += [f"policy.{name}" for name in ("param_dtype", "compute_dtype", "output_dtype", *policy)]
  return tuple(dict.fromkeys([*keys, *own]))


def _section(function: ast.FunctionDef) -> str | None:
  """Returns the section whose keys a function's keywords are, where it is registered for one."""
  calls = (ast.unparse(call.func) for call in function.decorator_list if isinstance(call, ast.Call))
  return next((name.removeprefix("register_") for name in calls if name.startswith("register_")), None)


def keys_meant(word: str, keys: Iterable[str] | None = None) -> list[str]:
  """Returns the keys that a word may mean: those that end in it, or else in a word that is near.

  Args:
    word: a key as somebody guessed it: `learning_rate`, `lr`, `batch-size`, `train.stepz`.
    keys: to choose from; those of a config by default.
  """
  keys = config_keys() if keys is None else tuple(keys)
  word = word.replace("-", "_").lower()
  if word in keys:
    return [word]
  last = word.rpartition(".")[2]
  last = _ALIASES.get(last, last)
  ends: dict[str, list[str]] = {}
  for key in keys:
    ends.setdefault(key.rpartition(".")[2], []).append(key)
  if last in ends:
    return ends[last]
  return [key for end in nearest(last, ends) for key in ends[end]]


def nearest(word: str, choices: Iterable[str]) -> list[str]:
  """Returns the choice that is nearest to a word, in a list; an empty one where none is near."""
  return difflib.get_close_matches(word, list(choices), n=1, cutoff=0.7)
