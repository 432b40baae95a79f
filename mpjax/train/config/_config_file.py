"""Reads a config from YAML with `key=value` overrides, or one of the examples that come with mpjax.

OmegaConf does the reading. Every mistake is a `ConfigError` of one line that names the file or the key.
"""

from __future__ import annotations

import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jmp
import omegaconf
import yaml

from mpjax._gone import without_old_keys
from mpjax.dtypes import did_you_mean
from mpjax.policy import get_policy
from mpjax.registry._checks import checked
from mpjax.registry._names import examples
from mpjax.train._errors import ConfigError
from mpjax.train.config._config import Config, DistributedConfig, parse_config

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
  known = examples()
  if str(path) in known:
    return known[str(path)]
  if len(path.parts) > 1 and path.suffix not in (".yaml", ".yml"):
    runs = sorted(str(config.parent) for config in path.parent.glob("*/config.yaml"))
    there = f"there are {', '.join(runs)}{did_you_mean(str(path), runs)}" if runs else "no runs there"
    raise ConfigError(f"no such run directory or config file: {path}: {there}")
  expected = f"expected a YAML file, or an example: {', '.join(known)}"
  raise ConfigError(f"no such config file: {path}: {expected}{did_you_mean(path.stem, known)}")


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
  if isinstance(source, Config) and source.out and "out" not in source.model_fields_set:
    title = source.out.removeprefix("runs/").rpartition("-")[0]
    source = source.model_copy(update={"out": None})
  source = _located(source)
  config = parse_config(read_tree(source, overrides))
  if config.out is None:
    title = title or (source.stem if isinstance(source, pathlib.Path) else config.model.kind)
    name = config.policy if isinstance(config.policy, str) and config.policy.isidentifier() else "custom"
    config = config.model_copy(update={"out": f"runs/{title}-{name}"})
    config.model_fields_set.remove("out")  # nobody gave it: with another policy it is another one
  return config


def read_tree(source: pathlib.Path | Mapping[str, Any], overrides: Sequence[str] = ()) -> dict[str, Any]:
  """Returns a YAML file with `key=value` overrides as plain data. Checks no key.

  A value may refer to another key, as in `${seed}`. OmegaConf's functions, such as `${oc.env:NAME}`, are
  refused: they would write the environment into the run directory or send it in a request for a dataset.

  Raises:
    ConfigError: as for `load_config`.
  """
  title = source if isinstance(source, pathlib.Path) else "the config"
  try:
    if isinstance(source, pathlib.Path):
      tree = omegaconf.OmegaConf.load(source)
    else:
      tree = omegaconf.OmegaConf.create(dict(source))
    if not isinstance(tree, omegaconf.DictConfig):
      raise ConfigError(f"{title}: expected a mapping of keys at the top level")
    for override in overrides:
      _apply(tree, override)
    _require_plain(tree)
    data: Any = omegaconf.OmegaConf.to_container(tree, resolve=True)
  except ConfigError:
    raise
  except RecursionError as error:
    raise ConfigError(f"cannot read {title}: values nested too deep") from error
  except (OSError, ValueError, yaml.YAMLError, omegaconf.errors.OmegaConfBaseException) as error:
    raise ConfigError(f"cannot read {title}: {' '.join(str(error).split())}") from error
  known: dict[str, Any] = without_old_keys(data)
  return known


def _located(source: ConfigSource) -> pathlib.Path | Mapping[str, Any]:
  """Returns the file of a config, or its keys as plain data."""
  if isinstance(source, Config):
    source = source.model_dump(mode="json") | {"policy": source.policy}
  if isinstance(source, (str, pathlib.Path)):
    return find_config(source)
  if not isinstance(source, Mapping):
    raise ConfigError(f"config={source!r}: expected a YAML file, the name of an example, or a mapping")
  policy = source.get("policy")
  return {**source, "policy": get_policy(policy).to_dict()} if isinstance(policy, jmp.Policy) else source


def read_waits(source: ConfigSource, overrides: Sequence[str] = ()) -> DistributedConfig:
  """Returns the `distributed` section. Called before the processes are connected.

  Returns the defaults if the section cannot be read: `load_config` raises later, in all processes.
  """
  try:
    return checked(DistributedConfig, read_tree(_located(source), overrides).get("distributed", {}))
  except ConfigError:
    return DistributedConfig()


def _apply(tree: omegaconf.DictConfig, override: str) -> None:
  key, sign, value = override.partition("=")
  if not sign or not key:
    raise ConfigError(f"override {override!r}: expected key=value, as in train.steps=200")
  if key.startswith(("policy.", "policy[")) and not isinstance(
    policy := tree.get("policy"), omegaconf.DictConfig
  ):
    tree["policy"] = {"base": Config.model_fields["policy"].default if policy is None else policy}
  try:
    parsed: Any = omegaconf.OmegaConf.to_container(omegaconf.OmegaConf.from_dotlist([f"value={value}"]))
    omegaconf.OmegaConf.update(tree, key, parsed["value"], merge=False)
  except Exception as error:  # from YAML, OmegaConf or Python
    raise ConfigError(f"override {override!r}: {' '.join(str(error).split())}") from error


_MOST_REFERENCES = 16
_REFERENCE = re.compile(r"(?<![\\$])\$\{[\w.\[\]-]+\}")


def _require_plain(tree: omegaconf.DictConfig) -> None:
  """Raises for OmegaConf's functions, and for so many references that they could fill the memory."""
  rest, found = _REFERENCE.subn("", omegaconf.OmegaConf.to_yaml(tree))
  for line in rest.splitlines():
    if "${" in line:
      raise ConfigError(
        f"{line.strip()}: only another key may stand in ${{...}}, as in ${{seed}}; a value from the "
        "environment goes on the command line, as in out=$HOME/runs/x"
      )
  if found > _MOST_REFERENCES:
    raise ConfigError(
      f"{found} references ${{...}}: expected at most {_MOST_REFERENCES}; write the values out"
    )
