"""One look for all pictures, whatever a user's own settings of matplotlib are."""

import sys

import pytest

from mpjax._render import picture_style as style
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


@pytest.mark.parametrize("name", ["a.gif", "a"])
def test_a_file_of_another_kind_is_refused(tmp_path, name):
  pytest.importorskip("matplotlib")
  with style.picture_style():
    figure = style.new_figure(2)
  with pytest.raises(ValueError, match=r"\.png or \.svg"):
    style.save_figure(figure, tmp_path / name)
  assert not list(tmp_path.iterdir())
