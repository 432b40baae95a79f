"""Reads a config from YAML with `key=value` overrides, or an example; says how two configs differ.

Every mistake is a `ConfigError` of one line that names the file or the key.
"""

from __future__ import annotations

import json
import pathlib
import re
from collections.abc import Mapping, Sequence
from types import NoneType
from typing import Any

import jmp
import yaml

from mpjax._gone import instead, without_old_keys
from mpjax._mistakes import ConfigError
from mpjax.dtypes import did_you_mean
from mpjax.policy import get_policy
from mpjax.registry import checked
from mpjax.train.config._config import Config, DistributedConfig

# A file, the name of an example, a mapping of keys or a config.
ConfigSource = str | pathlib.Path | Mapping[str, Any] | Config


def find_config(name: str | pathlib.Path) -> pathlib.Path:
  """Returns the file of a config: an existing path, that of a run directory, or an example's (`gpt_stdlib`).

  Raises:
    ConfigError: if there is neither a file nor an example of that name.
  """
  path = pathlib.Path(name)
  if path.is_dir() and (path / "config.yaml").exists():
    return path / "config.yaml"
  if path.exists():
    return path
  known = _examples()
  if str(path) in known:
    return known[str(path)]
  if len(path.parts) > 1 and path.suffix not in (".yaml", ".yml"):
    runs = sorted(str(config.parent) for config in path.parent.glob("*/config.yaml"))
    there = f"there are {', '.join(runs)}{did_you_mean(str(path), runs)}" if runs else "no runs there"
    raise ConfigError(f"no such run directory or config file: {path}: {there}")
  expected = f"expected a YAML file, or an example: {', '.join(known)}"
  raise ConfigError(f"no such config file: {path}: {expected}{did_you_mean(path.stem, known)}")


def _examples() -> dict[str, pathlib.Path]:
  """Returns the example configs by name: a wheel has them in the package, a checkout next to it."""
  package = pathlib.Path(__file__).parents[2]
  folder = package / "configs" if (package / "configs").is_dir() else package.parent / "configs"
  return {file.stem: file for file in sorted(folder.glob("*.yaml"))}


def load_config(source: ConfigSource, overrides: Sequence[str] = ()) -> Config:
  """Reads a config, applies overrides and checks the result.

  ```python
  config = mpjax.train.load_config("gpt_stdlib", ["policy=fp16", "train.steps=200"])
  print(config.to_yaml())
  ```

  Args:
    source: a YAML file, the name of an example that comes with mpjax (`gpt_stdlib`, `resnet_digits`,
      `vit_digits`), a mapping of the same keys, or a `Config`.
    overrides: texts `key=value` with dotted keys and YAML values. Later ones win.

  Returns:
    The config. If it does not name `out`, `out` is `runs/NAME-POLICY`.

  Raises:
    ConfigError: one line that names the file or key, the value and what was expected.
  """
  if isinstance(overrides, (str, Mapping)):
    raise ConfigError(
      f"overrides={overrides!r}: expected a list of texts, as in ['policy=bf16', 'train.steps=200']"
    )
  title = None
  if isinstance(source, (str, pathlib.Path)):
    source = find_config(source)
    title = source.stem
  elif isinstance(source, Config) and source.out and "out" not in source.model_fields_set:
    title = source.out.removeprefix("runs/").rpartition("-")[0]
    source = source.changed({"out": None})
  config = checked(Config, read_tree(source, overrides))
  if config.out is None:
    name = config.policy if isinstance(config.policy, str) and config.policy.isidentifier() else "custom"
    config = config.changed({"out": f"runs/{title or config.model.kind}-{name}"})
    config.model_fields_set.remove("out")  # nobody gave it: with another policy it is another one
  return config


def read_tree(source: ConfigSource, overrides: Sequence[str] = ()) -> dict[str, Any]:
  """Returns the keys of a config with `key=value` overrides as plain data. Checks no key.

  Raises:
    ConfigError: as for `load_config`.
  """
  if isinstance(source, (str, pathlib.Path)):
    source = find_config(source)
  elif isinstance(source, Config):
    source = source.tree | {"policy": source.policy}
  elif not isinstance(source, Mapping):
    raise ConfigError(f"config={source!r}: expected a YAML file, the name of an example, or a mapping")
  title = source if isinstance(source, pathlib.Path) else "the config"
  try:
    tree = _parsed(source.read_bytes()) if isinstance(source, pathlib.Path) else _plain(dict(source))
  except _UNREADABLE as error:
    raise ConfigError(f"cannot read {title}: {_said(error)}") from error
  if not isinstance(tree, (dict, NoneType)):
    raise ConfigError(f"{title}: expected a mapping of keys at the top level")
  tree = tree or {}
  for override in overrides:
    _apply(tree, override)
  known: dict[str, Any] = without_old_keys(tree)
  return known


def read_waits(source: ConfigSource, overrides: Sequence[str] = ()) -> DistributedConfig:
  """Returns the `distributed` section. Called before the processes are connected.

  Returns the defaults if the section cannot be read: `load_config` raises later, in all processes.
  """
  try:
    return checked(DistributedConfig, read_tree(source, overrides).get("distributed", {}))
  except ConfigError:
    return DistributedConfig()


def _apply(tree: dict[str, Any], override: str) -> None:
  key, sign, text = override.partition("=")
  if not sign or not key:
    raise ConfigError(f"override {override!r}: expected key=value, as in train.steps=200")
  try:
    value = _parsed(text)
  except _UNREADABLE as error:
    raise ConfigError(f"override {override!r}: {_said(error)}") from error
  *parents, last = key.split(".")
  if parents[:1] == ["policy"] and not isinstance(tree.get("policy"), dict):
    given = tree.get("policy")
    tree["policy"] = {"base": Config.model_fields["policy"].default if given is None else given}
  section = tree
  for parent in parents:
    if section.get(parent) is None:
      section[parent] = {}
    if not isinstance(section[parent], dict):
      raise ConfigError(f"override {override!r}: {parent} is {section[parent]!r}, which has no keys")
    section = section[parent]
  section[last] = value


class _Loader(yaml.SafeLoader):
  """Reads plain values: `1e-3` is a number, and a date is text; no references, by which a file could grow."""

  def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
    event = self.peek_event()
    if isinstance(event, yaml.AliasEvent):
      raise _fault(event, "a reference (*name): write the value out")
    if isinstance(event, yaml.ScalarEvent) and "${" in event.value:
      raise _fault(event, f"{event.value}{instead('${}', 'config')}")
    return super().compose_node(parent, index)

  def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
    names = [key.value for key, _ in node.value]
    if repeated := [name for i, name in enumerate(names) if name in names[:i]]:
      raise _fault(node, f"the key {repeated[0]!r} is there twice")
    return super().construct_mapping(node, deep)


_Loader.yaml_implicit_resolvers = {
  first: [pair for pair in pairs if pair[0] != "tag:yaml.org,2002:timestamp"]
  for first, pairs in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
  "tag:yaml.org,2002:float",
  re.compile(r"[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+$"),
  list("-+0123456789"),
)


_UNREADABLE = (OSError, ValueError, TypeError, RecursionError, yaml.YAMLError)


def _parsed(text: str | bytes) -> Any:
  """Returns the value of a YAML text."""
  return _plain(yaml.load(text, _Loader))


def _plain(data: object) -> Any:
  """Returns a copy of plain data; raises one of `_UNREADABLE` for any other."""

  def refuse(value: object) -> dict[str, Any]:
    if isinstance(value, jmp.Policy):
      return get_policy(value).to_dict()
    raise TypeError(f"expected numbers, text, lists and mappings, not a {type(value).__name__}")

  return json.loads(json.dumps(data, default=refuse))


def _fault(where: Any, what: str) -> yaml.MarkedYAMLError:
  return yaml.MarkedYAMLError(problem=what, problem_mark=where.start_mark)


def _said(error: Exception) -> str:
  """Returns what is wrong with a text, on one line."""
  if isinstance(error, RecursionError):
    return "values nested too deep"
  if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
    return f"line {error.problem_mark.line + 1}: {error.problem}"
  return " ".join(str(error).split())


# Keys that may differ between processes.
_OWN = frozenset({"distributed", "train.checkpoint_wait"})
# Keys that may change when a run resumes. Only a mesh changes what a step computes: its rounding.
_FREE = _OWN.union(
  ["out", "numerics", "mesh", "data.workers", "train.log_every", "train.eval_every"],
  ["train.checkpoint_every", "train.keep_checkpoints", "train.max_skips"],
  ["train.export", "train.export_dtype", "train.profile_steps", "train.trackers"],
)
# Keys that may change when a run resumes with more steps.
_GROWING = {"train.steps", "optimizer.schedule_steps"}


def has_grown(theirs: dict[str, Any], ours: dict[str, Any]) -> bool:
  """Returns whether one config of a run has fewer steps than another."""
  before = _flat(theirs).get("train.steps")
  return isinstance(before, int) and before < ours["train"]["steps"]  # somebody may have changed the file


def run_mismatch(theirs: dict[str, Any], ours: dict[str, Any]) -> str | None:
  """Says how the configs of two runs differ in the keys that a run keeps; `None` if they do not."""
  theirs, ours = without_old_keys(theirs), without_old_keys(ours)
  return mismatch(theirs, ours, free=_FREE | _GROWING if has_grown(theirs, ours) else _FREE)


def mismatch(
  theirs: dict[str, Any],
  ours: dict[str, Any],
  there: str = "there",
  here: str = "here",
  free: frozenset[str] = _OWN,
) -> str | None:
  """Says how two configs differ, with what else is compared; `None` if they do not.

  `there` and `here` say for a person where each is; keys in `free` may differ, by default those of a process.
  """
  one, other = _flat(theirs), _flat(ours)
  found = [
    f"{key}: {one.get(key)!r} {there}, {other.get(key)!r} {here}"
    for key in sorted(one.keys() | other.keys())
    if one.get(key) != other.get(key) and not any(f"{key}.".startswith(f"{each}.") for each in free)
  ]
  return "; ".join([*found[:3], "..."] if len(found) > 3 else found) or None


def _flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
  """Returns the values of a config by dotted key."""
  flat: dict[str, Any] = {}
  for name, value in tree.items():
    flat |= _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
  return flat
