"""`mpjax env`: versions, devices and flags, also where there is little of them."""

import importlib.metadata
import json
import os
import subprocess
import sys

import jax
import pytest

import mpjax
from mpjax.cli import main


def test_it_says_versions_devices_and_flags_as_text_or_json(monkeypatch, capsys):
  monkeypatch.setenv("JAX_SOMETHING", "a value")
  monkeypatch.setenv("SECRET", "a secret")
  assert main(["env"]) == 0
  text = capsys.readouterr().out
  for said in (f"mpjax: {mpjax.__version__}", jax.__version__, "cpu", "JAX_SOMETHING: a value"):
    assert said in text
  assert "secret" not in text.lower()
  assert main(["env", "--json"]) == 0
  found = json.loads(capsys.readouterr().out)
  assert found["versions"]["optax"] == importlib.metadata.version("optax")
  assert found["flags"]["JAX_SOMETHING"] == "a value"
  assert found["jax"] in text


@pytest.mark.slow
def test_it_needs_no_extra():
  blocked = ("grain", "pydantic", "matplotlib", "safetensors", "tensorboard", "sklearn")
  code = f"import sys; sys.modules.update(dict.fromkeys({blocked})); from mpjax.cli import main; sys.exit(main(['env']))"
  done = subprocess.run(
    [sys.executable, "-W", "ignore", "-c", code],
    env={**os.environ, "JAX_PLATFORMS": "rocm"},
    capture_output=True,
    text=True,
    check=False,
  )
  assert done.returncode == 0, done.stderr
  assert "none: " in done.stdout
