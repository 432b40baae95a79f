"""`mpjax env`: versions, extras, devices and flags, also where there is little of them."""

import importlib.metadata
import json
import os
import subprocess
import sys

import jax
import pytest

import mpjax
from mpjax.cli import main
from mpjax.cli._env_command import environment


def test_it_says_versions_devices_and_flags(monkeypatch, capsys):
  monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
  monkeypatch.setenv("JAX_SOMETHING", "a value")
  monkeypatch.setenv("SECRET", "a secret")
  assert main(["env"]) == 0
  out = capsys.readouterr().out
  for text in (mpjax.__version__, jax.__version__, f"{jax.device_count()} x cpu", "JAX_SOMETHING", "a value"):
    assert text in out
  assert "extra train" in out
  assert "secret" not in out.lower()


def test_the_same_as_json(capsys):
  assert main(["env", "--json"]) == 0
  found = json.loads(capsys.readouterr().out)
  assert found == json.loads(json.dumps(environment()))
  assert found["versions"]["numpy"] == importlib.metadata.version("numpy")
  assert found["devices"] == [{"kind": "cpu", "count": jax.device_count(), "memory": found["memory"]}]
  assert found["memory"] > 0


REQUIREMENTS = [
  "jax>=0.10",
  "optax>=0.2; extra == 'train'",
  "no-such-package; extra == 'train'",
  'rich>=13; extra == "plan"',
  "mpjax[plan]; extra == 'plan-tpu'",
  "no-such-compiler; extra == 'plan-tpu'",
  "jax[tpu]; extra == 'tpu'",
]
OF_JAX = ["numpy>=2", "libtpu-of-jax==1.*; extra == 'tpu' and python_version > '3'", "other; extra == 'cuda'"]


def test_an_extra_lists_what_is_here_and_what_it_lacks(monkeypatch, capsys):
  monkeypatch.setattr("importlib.metadata.requires", {"mpjax": REQUIREMENTS, "jax": OF_JAX}.get)
  extras = environment()["extras"]
  assert list(extras) == ["train", "plan", "plan-tpu", "tpu"]
  assert list(extras["tpu"]) == ["jax", "libtpu-of-jax"]
  assert extras["plan-tpu"] == {"rich": importlib.metadata.version("rich"), "no-such-compiler": None}
  assert main(["env"]) == 0
  assert "lacks no-such-package" in capsys.readouterr().out


def test_what_was_not_installed_and_has_no_device_is_said_all_the_same(monkeypatch, capsys):
  def none():
    raise RuntimeError("Unable to initialize backend 'tpu'")

  def missing(name):
    raise importlib.metadata.PackageNotFoundError(name)

  monkeypatch.setattr("jax.devices", none)
  monkeypatch.setattr("importlib.metadata.requires", missing)
  assert main(["env"]) == 0
  out = capsys.readouterr().out
  assert "none: Unable to initialize backend 'tpu'" in out
  assert "extra" not in out


@pytest.mark.slow
def test_it_needs_no_extra_and_no_device_that_is_asked_for():
  blocked = ("grain", "pydantic", "matplotlib", "safetensors", "tensorboard", "sklearn")
  code = f"import sys; sys.modules.update(dict.fromkeys({blocked})); from mpjax.cli import main; sys.exit(main(['env']))"
  line = [sys.executable, "-W", "ignore", "-c", code]
  environ = {**os.environ, "JAX_PLATFORMS": "rocm"}
  done = subprocess.run(line, env=environ, capture_output=True, text=True)
  assert done.returncode == 0, done.stderr
  assert "none: " in done.stdout
