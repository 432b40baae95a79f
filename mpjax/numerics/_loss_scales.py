"""The loss scales at which the gradients of a report fit float16."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable

from mpjax.casting import Overrides
from mpjax.numerics._report import NumericsReport
from mpjax.numerics._tensors import Tensor

_MAX_EXPONENT = 24


def scale_limits(report: NumericsReport) -> tuple[float | None, float | None]:
  """Returns the least loss scale that keeps the chosen share of gradients in float16, and the largest.

  They are powers of two from 1 to 2**24, with a factor of two to spare below float16's largest number, or
  `None` if no scale fits. Activation gradients decide what is kept; weight gradients that leave their product
  in half precision also decide what overflows. Under a policy that computes in float16, modules in another
  format do not count.
  """
  own, at = report.policy.compute_dtype.name, _products_in(report)
  counts = lambda t: own != "float16" or at(t.module) == "float16"
  tensors = [t for t in report.of("activation gradient") if t.magnitudes.range is not None and counts(t)]
  products = [t for t, _ in half_products(report) if counts(t)]
  added = lambda found: functools.reduce(operator.add, [t.magnitudes for t in found]) if found else None
  gradients, everything = added(tensors), added([*tensors, *products])
  low = high = None
  for exponent in range(_MAX_EXPONENT + 1):
    scale = 2.0**exponent
    if everything and everything.shares("float16", 2 * scale).overflow:
      break
    high = scale
    if low is None and (not gradients or gradients.kept("float16", scale) >= report.keep):
      low = scale
  return low, high


def half_products(report: NumericsReport) -> list[tuple[Tensor, str]]:
  """Returns the weight gradients that leave their product in half precision, each with that dtype.

  Under autocast, a product returns the gradients of float32 weights in float32, whose range no loss scale
  leaves. They are left out, unless such a gradient is not finite in the policy's run although all activation
  gradients are finite.
  """
  policy, at = report.policy, _products_in(report)
  casts = policy.autocast or policy.compute_dtype.itemsize == 4
  wide = casts and (policy.grad_dtype is None or policy.grad_dtype.itemsize == 4)
  from_finite = not any(t.not_finite for t in report.of("activation gradient"))
  return [
    (t, at(t.module))
    for t in report.of("weight gradient")
    if len(t.shape) > 1 and not (wide and t.dtype == "float32" and not (t.not_finite and from_finite))
  ]


def _products_in(report: NumericsReport) -> Callable[[str], str]:
  """Returns a function from a module path to the dtype of its matrix products under the policy."""
  policy = report.policy
  overrides = Overrides(policy, None)
  scopes = {t.module: t.scope for t in report.tensors}

  def dtype(module: str) -> str:
    half = overrides.half_at(scopes.get(module, module)) if policy.autocast else policy.compute_dtype
    return "float32" if half is None else half.name

  return dtype
