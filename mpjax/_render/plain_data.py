"""Plain data of a report, for JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any


def plain_data(value: Any) -> Any:
  """Returns data for JSON: NaN and the infinities as the strings that `float` reads, arrays as lists."""
  if isinstance(value, Mapping):
    return {str(key): plain_data(item) for key, item in value.items()}
  if isinstance(value, (list, tuple)):
    return [plain_data(item) for item in value]
  if hasattr(value, "tolist"):  # arrays and scalars of NumPy
    return plain_data(value.tolist())
  if isinstance(value, float) and not math.isfinite(value):
    return str(value)
  return value
