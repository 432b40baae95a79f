"""One look for all pictures, whatever a user's own settings of matplotlib are."""

import sys

import pytest

from mpjax.planner._picture import save_picture
from tests.planner._plans import a_plan


def test_a_picture_neither_follows_nor_changes_the_settings_of_its_user(tmp_path, monkeypatch):
  matplotlib = pytest.importorskip("matplotlib")
  monkeypatch.setattr(matplotlib, "use", lambda *args, **kwargs: pytest.fail("the backend is the user's"))
  save_picture([a_plan()], tmp_path / "plain.svg")
  with matplotlib.rc_context({"font.size": 30, "font.family": "serif", "axes.facecolor": "black"}):
    before = dict(matplotlib.rcParams)
    save_picture([a_plan()], tmp_path / "among_theirs.svg")
    assert dict(matplotlib.rcParams) == before
  assert (tmp_path / "among_theirs.svg").read_bytes() == (tmp_path / "plain.svg").read_bytes()
  if pyplot := sys.modules.get("matplotlib.pyplot"):
    assert not pyplot.get_fignums()
