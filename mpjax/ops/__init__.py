"""Operations whose form depends on precision."""

from mpjax.ops._linear_cross_entropy import linear_cross_entropy

__all__ = ["linear_cross_entropy"]
