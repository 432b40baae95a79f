"""The names that a command line may have, without importing JAX: keys of a config and examples."""

from __future__ import annotations

import ast
import difflib
import functools
import pathlib
from collections.abc import Iterable

_PACKAGE = pathlib.Path(__file__).parents[2]
# A wheel has the example configs inside the package, a checkout next to it.
_EXAMPLES = (_PACKAGE / "configs", _PACKAGE.parent / "configs")
# Other trainers' names of our keys.
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


def examples() -> dict[str, pathlib.Path]:
  """Returns the file of each example config that comes with mpjax, by name."""
  folder = next((folder for folder in _EXAMPLES if folder.is_dir()), None)
  return {} if folder is None else {file.stem: file for file in sorted(folder.glob("*.yaml"))}


@functools.cache
def config_keys() -> tuple[str, ...]:
  """Returns the dotted keys of a config, including those of mpjax's own models and datasets.

  Reads them from the source of the classes and functions that define them, because importing these would
  import JAX.
  """
  fields: dict[str, list[ast.AnnAssign]] = {}
  own: list[str] = []
  files = [_PACKAGE / "train" / "config" / "_config.py", _PACKAGE / "policy" / "_policy.py"]
  files += sorted((_PACKAGE / "zoo").glob("*/*.py"))
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
  said = {"_", "name", "reason"}  # fields of a policy that are not keys
  policy = [
    name for name in map(ast.unparse, (field.target for field in fields["Policy"])) if name not in said
  ]
  keys += [f"policy.{name}" for name in ("param_dtype", "compute_dtype", "output_dtype", *policy)]
  return tuple(dict.fromkeys([*keys, *own]))


def _section(function: ast.FunctionDef) -> str | None:
  """Returns the section that a function is registered for; its keywords are the section's keys."""
  calls = (ast.unparse(call.func) for call in function.decorator_list if isinstance(call, ast.Call))
  return next((name.removeprefix("register_") for name in calls if name.startswith("register_")), None)


def keys_meant(word: str, keys: Iterable[str] | None = None) -> list[str]:
  """Returns the keys that a word may mean: keys that end in the word, or else in a similar word.

  Args:
    word: a key as a user guessed it: `learning_rate`, `lr`, `batch-size`, `train.stepz`.
    keys: the keys to choose from; by default the keys of a config.
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
  """Returns a list with the choice most similar to a word; an empty list if none is similar."""
  return difflib.get_close_matches(word, list(choices), n=1, cutoff=0.7)
