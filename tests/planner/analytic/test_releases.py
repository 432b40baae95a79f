"""The analytic plan beside the programs that compilers of several releases made."""

import jax
import pytest

import mpjax
from mpjax import _compat
from tests.planner.compiled.programs import STEPS, VERSIONS, kept


@pytest.fixture
def ratio(monkeypatch):
  """Returns the analytic peak of a kept step by what the compiler of a release said."""

  def of(version, name, target):
    monkeypatch.setattr(_compat, "has_newer_xla", lambda: not version.startswith("0.10"))
    step = STEPS[name][0]()
    jitted = jax.jit(step.function, donate_argnums=step.donated)
    plan = mpjax.plan(jitted, step.args, target=target, compile=False)
    return plan.peak / kept(version, name, target).peak

  return of


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(
  "name", ["training", "step", "half precision", "wide layers", "computing again", "scan in half precision"]
)
def test_peak_on_a_gpu_and_the_room_for_its_products_are_each_releases(name, version, ratio):
  assert ratio(version, name, "h200") == pytest.approx(1, abs=0.1)


def test_peak_on_a_cpu_follows_what_its_newer_compiler_keeps(ratio):
  # It keeps half precision as it is, and computes again what it was told to.
  newer = VERSIONS[-1]
  assert ratio(newer, "computing again", "here") == pytest.approx(1, abs=0.1)
  assert ratio(newer, "scan in half precision", "here") == pytest.approx(1, abs=0.2)
