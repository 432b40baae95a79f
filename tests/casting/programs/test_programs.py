"""Autocast of programs of many fields: as near to float32 as half-precision products allow."""

import importlib
import pkgutil

import pytest

from tests.casting import programs
from tests.casting.programs._ideal import PROGRAMS, compare

for module in pkgutil.iter_modules(programs.__path__):
  if module.name.startswith("_"):
    importlib.import_module(f"{programs.__name__}.{module.name}")


# One of each kind, and cheap to compile.
QUICK = {
  "diffusion",
  "entropy_behind_calls",
  "equilibrium",
  "euler_by_jit",
  "experts_with_capacity",
  "lookup_by_one_hot",
  "rotary_by_einsum",
  "sequence_ratio",
  "top_p_sampling",
  "whitening",
}
# What autocast does not get right yet, by what it would have to know.
UNSOLVED = {
  "products of coordinates with small matrices fill no matrix unit": (
    "affine_warp",
    "camera_rays",
    "chain_of_joints",
    "periodic_cell",
  ),
  "the right-hand side of a linear system feels every rounding": ("closed_form_head",),
  "a state that each step adds to, or renormalises, remembers": (
    "crf_by_products",
    "nonnegative_factors",
    "scaled_forward",
    "sinkhorn_by_products",
    "value_iteration",
  ),
  "autocast of grad: the gradient that a layer hands to a solver is rounded to half precision": (
    "adaptive_solver",
  ),
}
REASONS = {name: reason for reason, names in UNSOLVED.items() for name in names}
assert PROGRAMS.keys() >= QUICK | REASONS.keys()


def case(name):
  marks = [] if name in QUICK else [pytest.mark.slow]
  if name in REASONS:
    marks.append(pytest.mark.xfail(reason=REASONS[name], raises=AssertionError, strict=True))
  return pytest.param(name, marks=marks)


@pytest.mark.parametrize("name", [case(name) for name in PROGRAMS])
def test_program_is_as_near_to_float32_as_its_products_allow(name):
  one = PROGRAMS[name]
  if one.needs:
    pytest.importorskip(one.needs)
  lines = [line for found in compare(one) for line in found.failures(one.factor)]
  assert not lines, f"{one.about}\n" + "\n".join(lines)
