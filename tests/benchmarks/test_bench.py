"""The command of the benchmarks, and its overhead suite: that what it compares is one and the same step."""

import json
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import _quick_compile as quick

ROOT = pathlib.Path(__file__).parents[2]


def bench(*arguments, timeout=300):
  command = [sys.executable, str(ROOT / "scripts" / "bench.py"), *arguments]
  environment = os.environ | {"JAX_PLATFORMS": "cpu"} | quick.environment(1)
  return subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=environment)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_every_variant_is_the_same_step(dtype):
  import benchmarks.overhead._keras  # noqa: F401 - not left out
  from benchmarks.overhead._models import SMALL
  from benchmarks.overhead._steps import variants

  model = SMALL["mlp_tiny"]
  init, _, data = model.build()
  batch = data()
  losses = {}
  for name, (start, step) in variants(model, dtype).items():
    state = jax.tree.map(jnp.array, start(init()))
    curve = []
    for _ in range(4):
      state, out = step(state, batch)
      curve.append(float(out["loss"] if isinstance(out, dict) else out))
    losses[name] = curve
  expected = losses["hand-written"]
  assert expected[-1] < expected[0]
  tolerance = {"float32": 1e-4, "bfloat16": 1e-2, "float16": 2e-3}[dtype]
  for name, curve in losses.items():
    np.testing.assert_allclose(curve, expected, rtol=tolerance, err_msg=name)


@pytest.mark.slow
def test_a_suite_writes_its_report_and_says_what_it_found(tmp_path):
  file = tmp_path / "report.json"
  model = ("--model", "mlp_tiny", "--dtype", "bfloat16")
  done = bench("overhead", *model, "--rounds", "3", "--compile-rounds", "0", "--json", str(file))
  assert done.returncode == 0, done.stderr
  assert "mpjax.make_train_step bf16" in done.stdout
  report = json.loads(file.read_text())
  assert report["command"].endswith("--model mlp_tiny --dtype bfloat16 --rounds 3 --compile-rounds 0")
  assert {"jax", "flax", "optax", "jmp", "mpjax"} <= set(report["versions"])
  rows = report["models"]["mlp_tiny"]["dtypes"]["bfloat16"]
  assert rows["hand-written"]["step_ratio"] == 1.0
  assert all(row["step_q25"] <= row["step_ratio"] <= row["step_q75"] for row in rows.values())


@pytest.mark.slow
@pytest.mark.parametrize(
  ("arguments", "status", "says"),
  [
    (["--help"], 0, "quality"),
    (["no-such-suite"], 2, "invalid choice"),
    (["quality", "--json", "/no/such/folder/out.json"], 2, "there is no folder /no/such/folder"),
  ],
)
def test_the_command_line(arguments, status, says):
  done = bench(*arguments)
  assert done.returncode == status
  assert says in done.stdout + done.stderr


def a_report():
  rows = lambda **times: {
    name: {"step_s": 0.01 * r, "step_ratio": r, "step_q25": r - 0.01, "step_q75": r + 0.01, "temp_bytes": 1e6}
    | {"temp_bytes_ratio": r}
    for name, r in times.items()
  }
  named = lambda ours, peer: rows(
    **{"hand-written": 1.0, "jmp casts": peer, "mpjax.make_train_step bf16": ours}
  )
  models = {
    "mlp": {"title": "large", "bound": "products", "dtypes": {"bfloat16": named(0.98, 1.05)}},
    "vit": {"title": "slow", "bound": "products", "dtypes": {"bfloat16": named(1.04, 1.05)}},
    "mlp_tiny": {"title": "tiny", "bound": "dispatch", "dtypes": {"bfloat16": named(0.99, 2.0)}},
    "transformer_opt": {"title": "beaten", "bound": "optimiser", "dtypes": {"bfloat16": named(0.98, 0.9)}},
  }
  return {"command": "python scripts/bench.py overhead", "device": "here", "versions": {}, "models": models}


def test_targets_are_judged_by_row():
  from benchmarks.overhead import _tables

  lines = [line for line in _tables.targets(a_report()).splitlines() if " time: " in line]
  missed = ["not met" in line for line in lines]
  assert missed == [False, True, False, True]  # the hand-written step is one of the others
  bound = [line for line in _tables.targets(a_report()).splitlines() if "at most 1.03" in line]
  assert ["not met" in line for line in bound] == [False, True]
  text = _tables.tables(a_report())
  assert "| mpjax.make_train_step bf16 | 0.98 (0.97 to 0.99) |" in text
  assert _tables.pictures(a_report()) == {}  # float16 is not there
