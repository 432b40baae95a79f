"""Pictures of plans: a file that can be read, with the names of all parts; nothing half-written for bad input."""

import sys

import pytest

from mpjax.planner._picture import save_picture
from tests.planner._plans import a_plan

matplotlib = pytest.importorskip("matplotlib")


@pytest.fixture
def svg_of(tmp_path):
  """Returns the text of the picture of plans."""

  def svg(*plans, name="plan.svg"):
    save_picture(plans, tmp_path / name)
    return (tmp_path / name).read_text()

  return svg


@pytest.mark.parametrize("policies", [["bf16"], ["fp32", "bf16", "bf16_pure"], ["bf16"] * 6])
def test_an_svg_has_the_names_and_figures_as_text(svg_of, policies):
  svg = svg_of(*map(a_plan, policies))
  for words in (*policies, "master weights", "activations", "analytic", "compiled", "NVIDIA H200 SXM"):
    assert words in svg, words
  # Parts too small to be seen are one entry of the legend.
  assert "smaller parts" in svg
  assert ">batch<" not in svg  # 67 MB of 12 GB
  assert "does not fit" not in svg


def test_an_analytic_plan_has_one_bar_and_the_title_names_the_model_and_the_device(svg_of):
  subject, device = "gpt of 124,439,808 parameters, batch of 16", "NVIDIA H200 SXM"
  svg = svg_of(a_plan(subject=subject, device=device, device_memory=5 * 10**9, compiled=False))
  assert subject in svg
  assert "NVIDIA H200 SXM" in svg
  assert "does not fit" in svg
  assert "compiled" not in svg


def test_what_cannot_be_drawn_is_refused_and_leaves_no_file(tmp_path, monkeypatch):
  for name in ("plan.pdf", "plan", "plan.jpeg"):
    with pytest.raises(ValueError, match=r"\.png or \.svg"):
      save_picture([a_plan()], tmp_path / name)
  with pytest.raises(ValueError, match="at least one"):
    save_picture([], tmp_path / "plan.svg")
  for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
    monkeypatch.setitem(sys.modules, name, None)  # as if it were not installed
  with pytest.raises(ImportError, match=r"\[plan\]"):
    save_picture([a_plan()], tmp_path / "plan.svg")
  assert not list(tmp_path.iterdir())


def test_a_picture_neither_follows_nor_changes_the_settings_of_its_user(tmp_path, monkeypatch):
  monkeypatch.setattr(matplotlib, "use", lambda *args, **kwargs: pytest.fail("the backend is the user's"))
  save_picture([a_plan()], tmp_path / "plain.svg")
  with matplotlib.rc_context({"font.size": 30, "font.family": "serif", "axes.facecolor": "black"}):
    before = dict(matplotlib.rcParams)
    save_picture([a_plan()], tmp_path / "among_theirs.svg")
    assert dict(matplotlib.rcParams) == before
  assert (tmp_path / "among_theirs.svg").read_bytes() == (tmp_path / "plain.svg").read_bytes()
  if pyplot := sys.modules.get("matplotlib.pyplot"):
    assert not pyplot.get_fignums()
