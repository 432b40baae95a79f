"""Names of types for the signatures of several packages."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import jax
import jmp
import numpy as np
from jax.extend.core import (
  ClosedJaxpr as ClosedJaxpr,
  Jaxpr as Jaxpr,
  JaxprEqn as JaxprEqn,
  Literal as Literal,
  Var as Var,
)
from jaxtyping import PyTree as PyTree

Atom: TypeAlias = Var | Literal
AnyJaxpr: TypeAlias = Jaxpr | ClosedJaxpr
Array: TypeAlias = jax.Array
ArrayLike: TypeAlias = jax.Array | np.ndarray | np.generic | bool | int | float | complex
DTypeLike: TypeAlias = jax.typing.DTypeLike
Mesh: TypeAlias = jax.sharding.Mesh | jax.sharding.AbstractMesh
Fp8State: TypeAlias = dict[str, Any]  # histories of delayed FP8 scaling, from `mpjax.init_fp8_state`
LossFunction: TypeAlias = Callable[..., Any]
# The argument of `mpjax.get_policy`.
PolicyLike: TypeAlias = str | Mapping[str, Any] | jmp.Policy | np.dtype | type[np.generic]
Metrics: TypeAlias = dict[str, jax.Array]
