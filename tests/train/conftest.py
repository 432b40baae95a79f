"""The kinds that a file registers are gone after it: others list all that there are."""

import pytest

import mpjax.train.config  # noqa: F401 - kinds that it registers later would be forgotten, too

# A test's kinds are to be forgotten, for which there is no public function.
from mpjax.registry import DATASETS, MODELS, TARGETS
from tests.train._runs import register_line


@pytest.fixture(autouse=True, scope="module")
def _kinds():
  with pytest.MonkeyPatch.context() as patch:
    for kinds in (MODELS, DATASETS, TARGETS):
      patch.setattr(kinds, "by_name", dict(kinds.by_name))
    register_line()
    yield
