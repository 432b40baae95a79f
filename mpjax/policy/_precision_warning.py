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
  """Returns the warning for a policy that is a bare half-precision dtype, also by another library's name.

  Returns `None` for any other policy.
  """
  if isinstance(spec, (Mapping, jmp.Policy)) or "=" in str(spec):
    return None
  policy = get_policy(spec, backend=backend)
  dtype = policy.compute_dtype
  if dtype.itemsize != 2 or not policy.same_dtypes(Policy(dtype, dtype, dtype)):
    return None
  meant, has, adam = "bf16", "", ""
  if dtype.name == "float16":
    meant, has = "fp16", " and loss scaling"
    adam = (
      "Adam in float16 gives NaN for a zero gradient, since its eps of 1e-8 is 0 there "
      "(optimizer_dtype=float32 keeps its state in float32); "
    )
  return (
    f"policy {policy.name!r} means {dtype.name} for everything, also for parameters, optimiser state and "
    f"outputs; {adam}did you mean {meant!r}, which has float32 master weights{has}? If not, say "
    f"{str(policy)!r}"
  )


def warn_of_bare_dtype(spec: PolicyLike) -> None:
  """Warns the caller's caller of a bare half-precision dtype."""
  advice = bare_dtype_advice(spec)
  if advice is not None:
    warnings.warn(advice, PrecisionWarning, stacklevel=3)


def warn_of_auto(policy: Policy) -> None:
  """Warns the caller's caller of `autocast` whose policy the backend chose, if that scales the loss."""
  if policy.loss_scaling is not None:
    text = (
      f"autocast without a policy is {policy.reason}, whose loss scale autocast cannot apply: small "
      "gradients underflow to zero. Write mpjax.autocast(fun, 'bf16'); or scale the loss, as "
      "mpjax.make_train_step does: mpjax.with_loss_scaling(tx, 'auto') and "
      "mpjax.value_and_grad(mpjax.autocast(fun, 'auto'), opt_state)"
    )
    warnings.warn(text, PrecisionWarning, stacklevel=3)


def warn_without_scale(spec: PolicyLike) -> None:
  """Warns the caller's caller of a policy that scales the loss, for a function without a loss scale."""
  policy = get_policy(spec)
  if policy.loss_scaling is not None:
    name = policy.label
    text = (
      f"the policy {name!r} of this autocast scales the loss, but opt_state has no loss scale: small "
      f"gradients underflow to zero. Wrap the optimiser, tx = mpjax.with_loss_scaling(tx, {name!r}), or use "
      "a policy that needs no loss scale, such as 'bf16'"
    )
    warnings.warn(text, PrecisionWarning, stacklevel=3)
