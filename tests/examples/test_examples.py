"""The examples: each runs as it stands, in few steps, and does what its first line says."""

import pathlib
import runpy

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpjax

FOLDER = pathlib.Path(__file__).parents[2] / "examples"
FILES = sorted(FOLDER.glob("*.py"))
# Loops that return losses first: their steps, and what of the first loss the last may be.
LOOPS = {
  "optax_loop": (40, 0.9),
  "linen_batchnorm": (16, 0.8),
  "nnx_model": (30, 0.6),
  "equinox_model": (40, 0.2),
  "haiku_model": (25, 0.6),
  "shard_map_loop": (30, 0.2),
}


def main_of(name):
  if name.endswith("_model") and name != "nnx_model":
    pytest.importorskip(name.removesuffix("_model"))
  return runpy.run_path(str(FOLDER / f"{name}.py"))["main"]


def test_each_is_short_listed_and_says_what_it_is_for():
  listed = (FOLDER / "README.md").read_text()
  for file in FILES:
    text = file.read_text()
    assert len(text.splitlines()) < 120, file.name
    assert text.startswith('"""'), file.name
    assert f"]({file.name})" in listed, file.name


@pytest.mark.slow
@pytest.mark.parametrize("name", LOOPS)
def test_the_loss_falls_and_parameters_stay_float32(name, capsys):
  steps, share = LOOPS[name]
  losses, trained, *_ = main_of(name)(steps=steps)
  assert np.mean(losses[-5:]) < share * np.mean(losses[:5])
  params = getattr(trained, "params", trained)
  floating = [x for x in jax.tree.leaves(params) if jnp.issubdtype(getattr(x, "dtype", int), jnp.floating)]
  assert floating
  assert all(x.dtype == jnp.float32 and np.isfinite(x).all() for x in floating)
  assert "loss" in capsys.readouterr().out


@pytest.mark.slow
def test_a_batch_with_an_infinity_leaves_the_batchnorm_example_untouched(capsys):
  # The loss is not asked: XLA's relu on a CPU makes zeros of NaN, which hides it, and not from the gradients.
  _, state, _ = main_of("linen_batchnorm")("bf16", 6)
  assert mpjax.all_finite((state.params, state.model_state))
  assert "1 step skipped" in capsys.readouterr().out


@pytest.mark.slow
def test_fine_tuning_in_few_bytes_ends_where_float32_does(capsys):
  found = main_of("few_bytes")(40)
  (full, full_bytes, _), (lean, lean_bytes, state) = found["fp32"], found["bf16_lean"]
  assert lean_bytes < 6 < 12 <= full_bytes < 12.1
  assert {x.dtype for x in jax.tree.leaves(state.params)} == {jnp.dtype("bfloat16")}
  assert np.mean(lean[-5:]) < 0.5 * lean[0]
  assert np.mean(lean[-5:]) == pytest.approx(np.mean(full[-5:]), rel=0.05)


@pytest.mark.slow
def test_the_nan_is_found_where_it_is(capsys):
  [report], state = main_of("find_nan")()
  source = (FOLDER / "find_nan.py").read_text().splitlines()
  line = next(i for i, text in enumerate(source, 1) if "# the fault" in text)
  assert report.origin.module == "Net/normalize"
  assert report.origin.line == f"find_nan.py:{line}"
  assert report.origin.primitive == "div"
  assert mpjax.all_finite(state.params)


@pytest.mark.slow
def test_the_plan_says_which_policy_fits(capsys):
  plans = main_of("plan_first")()
  needed = [plans[name].peak for name in ("fp32", "bf16", "bf16_lean")]
  assert needed[0] > needed[1] > needed[2]
  assert plans["fp32"].peak > plans["fp32"].room  # what the example is about
  assert plans["bf16_lean"].peak < plans["bf16_lean"].room
  assert plans["bf16"].floor.seconds < 0.7 * plans["fp32"].floor.seconds
