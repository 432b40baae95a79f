"""Loss scaling as optax transforms: the scale and the skip live in the optimiser's state."""

from mpjax.loss_scale.access import get_loss_scale, scale_loss
from mpjax.loss_scale.check import check_loss_scaling
from mpjax.loss_scale.config import LossScaling
from mpjax.loss_scale.convert import export_loss_scale, import_loss_scale
from mpjax.loss_scale.finite import all_finite
from mpjax.loss_scale.layerwise import LayerwiseLossScale, Scaled, layerwise_loss_scale
from mpjax.loss_scale.observe import (
  loss_scale_metrics,
  nonfinite_leaves,
  scale_history,
  skip_report,
  track_skips,
)
from mpjax.loss_scale.overwritten import apply_updates
from mpjax.loss_scale.region import scaled_region
from mpjax.loss_scale.transform import (
  LossScaleState,
  dynamic_loss_scale,
  static_loss_scale,
  with_loss_scaling,
)

__all__ = [
  "LayerwiseLossScale",
  "LossScaleState",
  "LossScaling",
  "Scaled",
  "all_finite",
  "apply_updates",
  "check_loss_scaling",
  "dynamic_loss_scale",
  "export_loss_scale",
  "get_loss_scale",
  "import_loss_scale",
  "layerwise_loss_scale",
  "loss_scale_metrics",
  "nonfinite_leaves",
  "scale_history",
  "scale_loss",
  "scaled_region",
  "skip_report",
  "static_loss_scale",
  "track_skips",
  "with_loss_scaling",
]
