"""Facts about a dataset, and the argument `info` of a model's function."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np

from mpjax.policy import Policy


class MissingFact(AttributeError):
  """A model asks for a fact that the data does not give."""


@dataclasses.dataclass(frozen=True)
class DataInfo:
  """Facts about a dataset.

  The facts that the data's function returned are also attributes and items: `info.num_classes`,
  `info["num_classes"]`.

  Attributes:
    train_examples: number of rows in an epoch.
    eval_examples: number of rows held out.
    fingerprint: changes with the content, the split and the row length; not with the data's location.
    description: one line for a person.
    row: dtype and shape of each array of a row, by name: `{"tokens": ("int32", (129,))}`.
    facts: what the data's function returned as `info`, in plain data.
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
    raise MissingFact(f"it needs {name!r}, and the data gives {given}")

  def __getitem__(self, name: str) -> Any:
    return getattr(self, name)

  def __contains__(self, name: object) -> bool:
    return isinstance(name, str) and hasattr(self, name)

  def batch_shapes(self, rows: int) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the shapes and dtypes of a batch of `rows` rows."""
    return {
      name: jax.ShapeDtypeStruct((rows, *shape), np.dtype(dtype)) for name, (dtype, shape) in self.row.items()
    }


@dataclasses.dataclass(frozen=True)
class ModelInfo(DataInfo):
  """The argument `info` of a model's function: facts about the data, and how the run will use the model.

  Attributes:
    policy: the run's policy. A model needs no dtypes of its own; the choice of a kernel may depend on them.
    backend: the platform: `"cpu"`, `"gpu"` or `"tpu"`.
    recompute: the config's `train.recompute`; `"blocks"` asks the model to recompute its blocks.
  """

  policy: Policy = dataclasses.field(kw_only=True)
  backend: str = dataclasses.field(kw_only=True)
  recompute: str = dataclasses.field(kw_only=True)
