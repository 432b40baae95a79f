"""The package as it is shipped: the wheel, the version, the README."""

import ast
import pathlib
import re
import subprocess
import sys
import zipfile

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import mpjax

ROOT = pathlib.Path(__file__).parents[1]


@pytest.mark.slow
def test_the_wheel_carries_the_presets_and_the_type_marker(tmp_path):
  build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
  subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
  (wheel,) = tmp_path.glob("*.whl")
  assert wheel.name.startswith(f"mpjax-{mpjax.__version__}-")
  names = zipfile.ZipFile(wheel).namelist()
  assert "mpjax/py.typed" in names
  assert not any(name.startswith(("tests/", "benchmarks/")) for name in names)
  zipfile.ZipFile(wheel).extractall(tmp_path / "site")
  # Away from the checkout, the presets can only come from the wheel.
  code = "import mpjax; print(mpjax.__file__, [str(mpjax.get_policy(n)) for n in mpjax.policy.presets()])"
  environment = {"PYTHONPATH": str(tmp_path / "site"), "JAX_PLATFORMS": "cpu", "PATH": ""}
  out = subprocess.run(
    [sys.executable, "-c", code], cwd=tmp_path, env=environment, check=True, capture_output=True, text=True
  )
  assert str(tmp_path / "site") in out.stdout
  assert out.stdout.count("params=") == 8


def test_the_changelog_has_the_version():
  assert f"## {mpjax.__version__}" in (ROOT / "CHANGELOG.md").read_text()


@pytest.mark.parametrize("package", [mpjax, mpjax.train], ids=lambda package: package.__name__)
def test_names_imported_at_first_use_are_those_that_a_type_checker_sees(package):
  (seen,) = (
    node.body
    for node in ast.parse(pathlib.Path(package.__file__).read_text()).body
    if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
  )
  names = {alias.name: node.module for node in seen for alias in node.names}
  packages = {name for name, module in names.items() if module == "mpjax"}
  assert {name: f"mpjax.{module}" for name, module in package._MODULE_OF.items()} == {
    name: module for name, module in names.items() if name not in packages
  }
  assert sorted(package._MODULE_OF) == sorted(package.__all__)
  assert {*dir(package)} >= {*names}
  for name in packages:
    assert getattr(package, name).__name__ == f"mpjax.{name}"


def test_a_name_that_is_not_there_is_an_attribute_error():
  for name in ("autcast", "_policy", "__wrapped__"):
    with pytest.raises(AttributeError, match=name):
      getattr(mpjax, name)


@pytest.mark.slow
def test_an_import_waits_for_what_is_used():
  heavy = ("matplotlib", "grain", "orbax", "pydantic", "mpjax.planner", "mpjax.numerics", "mpjax.tuning")
  code = f"""
import sys, mpjax
print([name for name in ("jax", "numpy") if name in sys.modules])
mpjax.autocast, mpjax.make_train_step, mpjax.dynamic_loss_scale, mpjax.get_policy
print([name for name in {heavy} if name in sys.modules], mpjax.formats.FORMATS.keys())
mpjax.train.load_config("gpt_stdlib")  # a model's keys are known without the model
print([name for name in ("flax", "grain", "orbax", "sklearn") if name in sys.modules])
from mpjax import *
print({{*mpjax.__all__}} - {{*globals()}})
"""
  done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
  without_jax, step, config, whole = done.stdout.splitlines()
  assert without_jax == config == "[]"
  assert step.startswith("[] dict_keys(['float64'")
  assert whole == "set()"


def test_the_python_of_the_readme_runs():
  text = (ROOT / "README.md").read_text()
  autocast, whole, own_loop = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
  batch = {"x": np.ones((4, 2), np.float32)}
  names = {
    "mpjax": mpjax,
    "jax": jax,
    "optax": optax,
    "params": {"w": jnp.ones(2)},
    "loss_fn": lambda params, batch: ((batch["x"] * params["w"]).astype(jnp.float32) ** 2).mean() / 8,
    "batch": batch,
  }
  exec(autocast, names)
  assert names["grads"]["w"].dtype == jnp.float32
  after = dict(names)
  exec(whole, after)
  assert after["metrics"]["grads_finite"]
  exec(own_loop, names)
  params, state, loss = jax.jit(names["step"])(names["params"], names["opt_state"], batch)
  assert float(loss) == pytest.approx(float(names["loss_fn"](names["params"], batch)), rel=1e-2)
  assert (params["w"] != 1).all()
  assert mpjax.get_loss_scale(state).grads_finite


def test_the_readme_has_two_commands_first():
  block = re.search(r"```bash\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)[1]
  assert [line.split("#")[0].split() for line in block.splitlines()] == [
    ["python3", "scripts/bootstrap.py", "train"],
    ["python3", "scripts/bootstrap.py", "test"],
  ]
