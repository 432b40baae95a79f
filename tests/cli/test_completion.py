"""Completion in a shell, as argcomplete asks for it."""

import inspect
import os
import pathlib
import subprocess
import sys

import pytest

from mpjax.cli import COMMANDS
from mpjax.registry._names import config_keys
from mpjax.registry._registry import DATASETS, MODELS
from mpjax.train import Config

ROOT = pathlib.Path(__file__).parents[2]
# A line up to the cursor, and what the last word of it may become.
LINES = {
  "mpjax ": {*COMMANDS},
  "mpjax nu": {"numerics"},
  "mpjax plan --pic": {"--picture"},
  "mpjax explain gpt": {"gpt_stdlib"},
  "mpjax train gpt_stdlib train.init": {"train.init_from=", "train.init_optimizer="},
  "mpjax train policy=bf": {"bf16", "bf16_lean", "bf16_pure"},
  "mpjax plan gpt_stdlib policy=fp32,tf": {"fp32,tf32"},
  "mpjax plan gpt_stdlib target=v5": {"v5e", "v5p"},
  "mpjax export runs/x dtype=b": {"bf16"},
}


@pytest.mark.parametrize("line", LINES)
def test_a_word_is_completed_without_jax(line, tmp_path):
  asked = {
    "_ARGCOMPLETE": "1",
    "_ARGCOMPLETE_STDOUT_FILENAME": str(tmp_path / "answer"),
    "_ARGCOMPLETE_SUPPRESS_SPACE": "1",
    "_ARGCOMPLETE_IFS": "\n",
    "_ARGCOMPLETE_COMP_WORDBREAKS": " \t\n\"'><=;|&(:",
    "COMP_LINE": line,
    "COMP_POINT": str(len(line)),
  }
  code = "import sys; sys.modules['jax'] = None; from mpjax.cli import main; main()"
  subprocess.run([sys.executable, "-c", code], cwd=ROOT, env={**os.environ, **asked}, check=True)
  assert {*(tmp_path / "answer").read_text().split()} == LINES[line]


def test_the_keys_are_those_of_a_config():
  fields = {name: field.annotation for name, field in Config.model_fields.items()}
  sections = {name for name, kind in fields.items() if hasattr(kind, "model_fields")}
  keys = {f"{name}.{key}" for name in sections for key in fields[name].model_fields}
  kinds = {
    f"{kinds.section}.{key.name}"
    for kinds in (MODELS, DATASETS)
    for kind in kinds.registered().values()
    if kind.is_own
    for key in inspect.signature(kind.fun).parameters.values()
    if key.kind is key.KEYWORD_ONLY
  }
  found = {key for key in config_keys() if not key.startswith("policy.")}
  assert found == {*(fields.keys() - sections), *keys, *kinds}
