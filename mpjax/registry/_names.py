"""The names that a command line may have, without importing JAX: keys of a config and examples."""

from __future__ import annotations

import ast
import difflib
import functools
import pathlib
import re
from collections.abc import Iterable

_PACKAGE = pathlib.Path(__file__).parents[1]
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
  sources = [_PACKAGE / "train" / "config" / "_config.py", _PACKAGE / "policy" / "_policy.py"]
  sources += sorted((_PACKAGE / "zoo").glob("*/*.py"))
  texts = [source.read_text(encoding="utf-8") for source in sources]
  nodes = [each for text in texts if _DEFINES.search(text) for each in ast.parse(text).body]
  classes = {each.name: _fields(each) for each in nodes if isinstance(each, ast.ClassDef)}
  keys = ["model.kind", "data.kind"]
  for name, section in classes["Config"].items():
    keys += [f"{name}.{key}" for key in classes[section]] if section in classes else [name]
  policy = [name for name in classes["Policy"] if name not in ("_", "name", "reason")]
  keys += [f"policy.{name}" for name in ("param_dtype", "compute_dtype", "output_dtype", *policy)]
  for function in (each for each in nodes if isinstance(each, ast.FunctionDef)):
    for section in _REGISTERED.findall(" ".join(map(ast.unparse, function.decorator_list))):
      keys += [f"{section}.{argument.arg}" for argument in function.args.kwonlyargs]
  return tuple(dict.fromkeys(keys))


_DEFINES = re.compile(r"^@register_|^class (Config|Policy)\(", re.MULTILINE)
_REGISTERED = re.compile(r"^register_(\w+)\(")


def _fields(node: ast.ClassDef) -> dict[str, str]:
  """Returns the fields of a class with their annotations."""
  lines = [line for line in node.body if isinstance(line, ast.AnnAssign)]
  return {ast.unparse(line.target): ast.unparse(line.annotation) for line in lines}


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
