"""Operations that precision shapes."""

from mpjax.ops._linear_cross_entropy import linear_cross_entropy

__all__ = ["linear_cross_entropy"]
