"""Facts about number formats, matrix units and devices.

```python
print(mpjax.formats.format_table(["bfloat16", "float16"]))  # range, precision, devices
```
"""

from typing import TYPE_CHECKING

from mpjax._gone import missing
from mpjax.formats._describe import describe, format_table
from mpjax.formats._devices import DeviceData, described_devices, fp8_time
from mpjax.formats._matrix_units import (
  LOW_PRECISION,
  MATRIX_UNITS,
  LowPrecision,
  eligible,
  narrow_bits,
  padded,
  runs_on,
)
from mpjax.formats._numbers import FORMATS, NumberFormat
from mpjax.formats._passes import PASSES as PASSES, SHORT_NAMES as SHORT_NAMES, passes_of as passes_of

__all__ = [
  "FORMATS",
  "LOW_PRECISION",
  "MATRIX_UNITS",
  "DeviceData",
  "LowPrecision",
  "NumberFormat",
  "describe",
  "described_devices",
  "eligible",
  "format_table",
  "fp8_time",
  "narrow_bits",
  "padded",
  "runs_on",
]

if not TYPE_CHECKING:

  def __getattr__(name):
    raise missing(__name__, name)
