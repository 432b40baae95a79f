"""Device meshes and where parameters lie on them. Knows nothing of training steps."""

from mpjax.sharding._mesh import batch_axes

__all__ = [
  "batch_axes",
]
