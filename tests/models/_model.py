"""What a model of the corpus is, and what building one takes: initial values, batches, a loss."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax

VOCAB, CLASSES, LENGTH = 64, 8, 16


@dataclasses.dataclass(frozen=True)
class Model:
  """A loss in plain float32 code.

  Attributes:
    loss: (params, batch, key) -> float32[]; the key is for dropout and samples.
    params: a tree of float32 arrays.
    batch: a tree of arrays.
  """

  loss: Callable[[Any, Any, jax.Array], jax.Array]
  params: Any
  batch: Any


def drawn(shapes: Any) -> Any:
  """Returns initial parameters for a tree of shapes: to compile the initialisers would take longer than a test."""
  rng = np.random.default_rng(0)

  def draw(path: Any, leaf: Any) -> np.ndarray:
    noise = rng.standard_normal(leaf.shape)
    if leaf.size > max(leaf.shape[-1:], default=1):  # Haiku's vectors have four dimensions
      return np.asarray(noise * (leaf.size / leaf.shape[-1]) ** -0.5, np.float32)
    is_scale = re.search(r"(scale|weight|var)\W*(value)?\W*$", jax.tree_util.keystr(path))
    return np.asarray(0.02 * noise + bool(is_scale), np.float32)

  return jax.tree_util.tree_map_with_path(draw, shapes)


def text(rows: int = 8, length: int = LENGTH, seed: int = 0) -> np.ndarray:
  """Returns int32[rows, length]: tokens that count upwards in steps of their row's own."""
  rng = np.random.default_rng(seed)
  first, step = rng.integers(0, VOCAB, (rows, 1)), rng.integers(1, 5, (rows, 1))
  return ((first + step * np.arange(length)) % VOCAB).astype(np.int32)


def images(*shape: int) -> dict[str, np.ndarray]:
  """Returns float32 arrays of a shape, the first dimension of which is examples, and the class of each."""
  rng = np.random.default_rng(0)
  y = rng.integers(0, CLASSES, shape[0])
  of_class = rng.standard_normal((CLASSES, *(1 for _ in shape[2:]), shape[-1]))
  return {"x": (of_class[y] + rng.standard_normal(shape) / 2).astype(np.float32), "y": y.astype(np.int32)}


def cross_entropy(logits: jax.Array, labels: Any) -> jax.Array:
  return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def next_token(logits: jax.Array, tokens: Any) -> jax.Array:
  return cross_entropy(logits[:, :-1], tokens[:, 1:])


def distance(tree: Any, other: Any) -> float:
  """Returns the norm of the difference of two trees as a share of the norm of the other."""
  a, b = (np.concatenate([np.ravel(x).astype(np.float64) for x in jax.tree.leaves(t)]) for t in (tree, other))
  return np.linalg.norm(a - b) / np.linalg.norm(b)
