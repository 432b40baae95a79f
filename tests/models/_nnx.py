"""A small module of nnx whose state changes as it runs."""

from flax import nnx


class Normed(nnx.Module):
  """A linear layer, BatchNorm and dropout."""

  def __init__(self, width: int, out: int):
    rngs = nnx.Rngs(0)
    self.linear = nnx.Linear(width, out, rngs=rngs)
    self.norm = nnx.BatchNorm(out, rngs=rngs)
    self.dropout = nnx.Dropout(0.1, rngs=rngs)

  def __call__(self, x):
    return self.dropout(self.norm(self.linear(x)))
