"""Facts about number formats, matrix units and devices.

```python
print(mpjax.formats.format_table(["bfloat16", "float16"]))  # range, precision, devices
```
"""

from mpjax.formats._devices import DeviceData, SpeedData, described_devices
from mpjax.formats._matrix_units import (
  LOW_PRECISION,
  MATRIX_UNITS,
  LowPrecision,
  MatrixUnit,
  eligible,
  narrow_bits,
  padded,
  runs_on,
  utilisation,
)
from mpjax.formats._numbers import FORMATS, NumberFormat
from mpjax.formats._print_formats import describe, format_table, print_formats

__all__ = [
  "FORMATS",
  "LOW_PRECISION",
  "MATRIX_UNITS",
  "DeviceData",
  "LowPrecision",
  "MatrixUnit",
  "NumberFormat",
  "SpeedData",
  "describe",
  "described_devices",
  "eligible",
  "format_table",
  "narrow_bits",
  "padded",
  "print_formats",
  "runs_on",
  "utilisation",
]
