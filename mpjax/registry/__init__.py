"""What a plug-in needs: models, data and optimisers by name, their config keys, and facts about data.

`mpjax.train` exports what a user's plug-in takes of it.
"""

from mpjax.registry._kinds import (
  DATASETS as DATASETS,
  MODELS as MODELS,
  TARGETS as TARGETS,
  Float as Float,
  Int as Int,
  KindSection as KindSection,
  Natural as Natural,
  Positive as Positive,
  Section as Section,
  Seed as Seed,
  checked as checked,
  register_data as register_data,
  register_model as register_model,
  register_optimizer as register_optimizer,
)
from mpjax.registry._task import (
  DataInfo as DataInfo,
  MissingFact as MissingFact,
  ModelInfo as ModelInfo,
  Task as Task,
)
