"""`PrecisionWarning`: a policy that is probably a mistake, or a loss scale that nothing applies."""

from __future__ import annotations

import warnings
from collections.abc import Mapping

import jmp

from mpjax._types import PolicyLike
from mpjax.policy._policy import Policy, get_policy


class PrecisionWarning(UserWarning):
  """A policy is probably a mistake: a bare dtype, or a policy whose loss scale nothing applies."""


def bare_dtype_advice(spec: PolicyLike, backend: str | None = None) -> str | None:
  """Returns the warning for a bare half-precision dtype, by any library's name; `None` for others."""
  if isinstance(spec, (Mapping, jmp.Policy)) or "=" in str(spec):
    return None
  policy = get_policy(spec, backend=backend)
  dtype = policy.compute_dtype
  if dtype.itemsize != 2 or not policy.same_dtypes(Policy(dtype, dtype, dtype)):
    return None
  meant, adam = "'bf16', which has float32 master weights", ""
  if dtype.name == "float16":
    meant = "'fp16', which has float32 master weights and loss scaling"
    adam = (
      "Adam in float16 gives NaN for a zero gradient, since its eps of 1e-8 is 0 there "
      "(optimizer_dtype=float32 keeps its state in float32); "
    )
  return (
    f"policy {policy.name!r} means {dtype.name} for everything, also for parameters, optimiser state and "
    f"outputs; {adam}did you mean {meant}? If not, say {str(policy)!r}"
  )


def warn_of_bare_dtype(spec: PolicyLike) -> None:
  """Warns the caller's caller of a bare half-precision dtype."""
  advice = bare_dtype_advice(spec)
  if advice is not None:
    warnings.warn(advice, PrecisionWarning, stacklevel=3)


def warn_without_scale(spec: PolicyLike, why: str) -> None:
  """Warns the caller's caller of a policy that scales the loss, where nothing does that, and says `why`."""
  policy = get_policy(spec)
  if policy.loss_scaling is not None:
    name = policy.name or str(policy)
    text = (
      f"the policy {policy.full_label} scales the loss, but {why}: small gradients underflow to zero. Write "
      "mpjax.autocast(fun, 'bf16'), which needs no loss scale; or tx = mpjax.with_loss_scaling(tx, "
      f"{name!r}) and mpjax.value_and_grad(mpjax.autocast(fun, {name!r}), opt_state)"
    )
    warnings.warn(text, PrecisionWarning, stacklevel=3)
