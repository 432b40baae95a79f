"""What is known of a dataset, and what the function of a model is told."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np

from mpjax.policy import Policy


class MissingFact(AttributeError):
  """A fact that a model asks for and the data does not give."""


@dataclasses.dataclass(frozen=True)
class DataInfo:
  """Facts about a dataset. Those that its function gives are attributes and items: `info.num_classes`.

  Attributes:
    train_examples: rows of an epoch.
    eval_examples: rows held out.
    fingerprint: changes with the content, the split and the row length; not with where the data lies.
    description: one line for a person.
    row: dtype and shape of each array of a row, by name.
    facts: what the data's function says of it, in plain data.
  """

  train_examples: int
  eval_examples: int
  fingerprint: str
  description: str
  row: dict[str, tuple[str, tuple[int, ...]]] = dataclasses.field(default_factory=dict)
  facts: dict[str, Any] = dataclasses.field(default_factory=dict)

  def __getattr__(self, name: str) -> Any:
    facts = self.__dict__.get("facts", {})
    if name in facts:
      return tuple(facts[name]) if isinstance(facts[name], list) else facts[name]
    given = ", ".join(sorted(facts)) or "nothing"
    raise MissingFact(f"it needs {name!r}, and the data says {given} of itself")

  def __getitem__(self, name: str) -> Any:
    return getattr(self, name)

  def batch_shapes(self, rows: int) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns shapes and dtypes of a batch of so many rows."""
    return {
      name: jax.ShapeDtypeStruct((rows, *shape), np.dtype(dtype)) for name, (dtype, shape) in self.row.items()
    }


@dataclasses.dataclass(frozen=True)
class ModelInfo(DataInfo):
  """What the function of a model is told: facts about the data, and how the run will use the model.

  Attributes:
    policy: the policy in force. A model needs no dtypes of its own; a kernel may.
    backend: the platform: `"cpu"`, `"gpu"` or `"tpu"`.
    recompute: the config's `train.recompute`; `"blocks"` asks the model to recompute its blocks.
  """

  policy: Policy = dataclasses.field(kw_only=True)
  backend: str = dataclasses.field(kw_only=True)
  recompute: str = dataclasses.field(kw_only=True)
