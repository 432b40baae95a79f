"""`PrecisionWarning`: a bare dtype as a policy, which holds everything in it."""

from __future__ import annotations

import warnings
from collections.abc import Mapping

import jmp

from mpjax._types import PolicyLike
from mpjax.dtypes import DTYPE_NAMES
from mpjax.policies import presets
from mpjax.policy import get_policy


class PrecisionWarning(UserWarning):
  """A policy is probably not the one that was meant: a bare dtype, which holds everything in it."""


def bare_dtype_advice(spec: PolicyLike, backend: str | None = None) -> str | None:
  """Returns what to say of a policy that is a bare half-precision dtype; `None` of any other."""
  if isinstance(spec, str):
    text = spec.strip()
    bare = text not in presets() and (text == "half" or text in DTYPE_NAMES)
  else:
    bare = not isinstance(spec, (Mapping, jmp.Policy))
  policy = get_policy(spec, backend=backend) if bare else None
  if policy is None or policy.compute_dtype.itemsize != 2:
    return None
  name = policy.compute_dtype.name
  meant, has = ("bf16", "") if name == "bfloat16" else ("fp16", " and loss scaling")
  return (
    f"policy {policy.name!r} means {name} for everything, also for parameters, optimiser state and outputs; "
    f"did you mean {meant!r}, which has float32 master weights{has}? If not, say {str(policy)!r}"
  )


def warn_of_bare_dtype(spec: PolicyLike, stacklevel: int = 2) -> None:
  """Warns of a bare half-precision dtype at the caller's caller, or `stacklevel - 2` further out."""
  advice = bare_dtype_advice(spec)
  if advice is not None:
    warnings.warn(advice, PrecisionWarning, stacklevel=stacklevel + 1)
