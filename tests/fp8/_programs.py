"""Programs whose products are FP8 under autocast, and what is read of them.

A program's products are written in its order: `8` for FP8, `b` for bfloat16, `f` for float32.
"""

from __future__ import annotations

import itertools

import jax
import numpy as np

import mpjax
from tests.fp8._reference import normal

SHORT = {"float8_e4m3fn": "8", "bfloat16": "b", "float32": "f"}
D = 32


def fp8(overrides=(), base="fp8", **options):
  recipe = {"recipe": "current", "emulate": True, "min_dim": 16, **options}
  return {"base": base, "fp8": recipe, "autocast": True, "overrides": overrides}


def weights(*sizes):
  return [normal(m, n, seed=i) / np.sqrt(m) for i, (m, n) in enumerate(itertools.pairwise(sizes))]


X = normal(D, D, seed=9)
W = weights(*[D] * 6)
relu = jax.nn.relu


def products(fun, *args, policy=None):
  """The rows of products in what is explained, in the order of the program."""
  return [row for row in mpjax.explain(fun, *args, policy=policy or fp8()).rows if row.flops]


def by_path(fun, *args, policy=None):
  """The kinds of products by module path."""
  found = {}
  for row in products(fun, *args, policy=policy):
    found[row.path] = found.get(row.path, "") + SHORT[row.after]
  return found


def mlp(w, x):
  for layer in w[:-1]:
    x = relu(x @ layer)
  return x @ w[-1]


def loss(w, x):
  return (mlp(w, x) ** 2).mean()
