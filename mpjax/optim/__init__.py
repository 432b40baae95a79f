"""Optimiser state in few bytes: optax transforms for moments in 8 bits and master weights in 4 bytes.

```python
tx = mpjax.quantized_state(optax.adamw(3e-4))  # 1 byte instead of 4 for each moment of a parameter
tx = mpjax.master_weights(tx)  # bfloat16 parameters, and the bits that float32 ones would have in addition
```
"""

from typing import TYPE_CHECKING

from mpjax._gone import missing
from mpjax.optim._master_weights import (
  MasterWeightsState,
  apply_bits as apply_bits,
  join as join,
  make_master_weights as make_master_weights,
  master_weights,
  split_like as split_like,
)
from mpjax.optim._quantized import (
  Quantized,
  dequantize as dequantize,
  is_quantized,
  rebuild as rebuild,
  unstored as unstored,
)
from mpjax.optim._quantized_state import (
  QuantizedState,
  in_full_bytes as in_full_bytes,
  quantized_state,
  store_like as store_like,
)
from mpjax.optim._stochastic import stochastic_round
from mpjax.optim._weight_average import (
  WeightAverageState,
  average_weights,
  evaluation_weights,
  keeps_other_weights as keeps_other_weights,
)

# What is imported as itself is for other folders of mpjax, not for users.
__all__ = [
  "MasterWeightsState",
  "Quantized",
  "QuantizedState",
  "WeightAverageState",
  "average_weights",
  "evaluation_weights",
  "is_quantized",
  "master_weights",
  "quantized_state",
  "stochastic_round",
]

if not TYPE_CHECKING:

  def __getattr__(name):
    raise missing(__name__, name)
