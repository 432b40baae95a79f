"""The argument `policy=a,b,c` of commands."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from mpjax._types import PolicyLike
from mpjax.cli._exit_status import config_errors
from mpjax.policy import bare_dtype_advice, get_policy


def split_policies(overrides: Sequence[str]) -> tuple[list[str], list[str]]:
  """Returns the policies of `policy=a,b,c`, each once, and the other overrides.

  A policy that is a mapping or a string of fields stays among the overrides.

  Raises:
    ConfigError: if a name is not a policy.
  """
  policies: list[str] = []
  rest = []
  for override in overrides:
    key, equals, value = override.partition("=")
    if key == "policy" and equals and "=" not in value and not value.lstrip().startswith("{"):
      policies = list(dict.fromkeys(name.strip() for name in value.split(",")))
    else:
      rest.append(override)
  with config_errors("policy"):
    for name in policies:
      get_policy(name)
  return policies, rest


def warn_of_policy(policy: PolicyLike, backend: str | None = None) -> None:
  """Warns on stderr about a bare dtype, which is probably not the policy that the user meant."""
  advice = bare_dtype_advice(policy, backend)
  if advice is not None:
    print(f"warning: {advice}", file=sys.stderr)
