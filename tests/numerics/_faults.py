"""Models with a fault planted in a known layer, and the lines of the faults."""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np

W = np.eye(4, dtype=np.float32) + np.float32(0.1)


def none(x):
  return x


def overflow(x):
  x = x * 300
  return (x @ x.T) * 1e-6  # line of: overflow


def log_zero(x):
  return x + jnp.log(x * 0)  # line of: log_zero


def zero_by_zero(x):
  return (x * 0) / (x * 0)  # line of: zero_by_zero


def sqrt_zero(x):
  return x + jnp.sqrt(x * 0)  # line of: sqrt_zero


def exp_large(x):
  return jnp.exp(x * 1000)  # line of: exp_large


FAULTS = {f.__name__: f for f in (none, overflow, log_zero, zero_by_zero, sqrt_zero, exp_large)}
PRIMITIVE = {
  "overflow": "dot_general",
  "log_zero": "log",
  "zero_by_zero": "div",
  "sqrt_zero": "div",
  "exp_large": "exp",
}


def line_of(name, file=__file__):
  """The line of a file that ends with a comment of this name, as a report gives it."""
  path = pathlib.Path(file)
  lines = enumerate(path.read_text().splitlines(), 1)
  (number,) = [number for number, text in lines if text.endswith(f"# line of: {name}")]
  return f"{path.name}:{number}"


def plain(params, x, faults):
  for i, fault in enumerate(faults):
    with jax.named_scope(f"layer_{i}"):
      x = FAULTS[fault](x @ params["w"][i])  # line of: product
  return x
