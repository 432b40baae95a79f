"""The corpus: models of several packages, written in float32 by their authors."""

from __future__ import annotations

from tests.models import _equinox, _flax, _haiku, _transformers

MODELS = {**_transformers.MODELS, **_haiku.MODELS, **_equinox.MODELS, **_flax.MODELS}
# How far the gradient of all parameters may be from that of the float32 program, as a share of it.
TOLERANCE = {"bf16": 0.03, "fp16": 0.004}
# Where rectified images of a convolution are averaged, rounding decides which of many small values count: their
# gradients may be twice as far as rounding parameters and batch moves those of the float32 program.
RECTIFIED = {"transformers FlaxRegNet", "Haiku nets.ResNet", "Flax CNN"}
