"""Pictures of plans: a file that can be read, with the names of all parts; nothing half-written for bad input."""

import builtins
import dataclasses
import re

import pytest

from mpjax._plain_text import bytes_text
from mpjax.planner import ARGUMENT_PARTS, TRANSIENT_PARTS
from mpjax.planner.render import COLORS, save_picture
from tests.planner._plans import a_plan

matplotlib = pytest.importorskip("matplotlib")


def test_every_part_has_a_colour_of_its_own():
  assert list(COLORS) == [*ARGUMENT_PARTS, *TRANSIENT_PARTS]
  assert len(set(COLORS.values())) == len(COLORS)


@pytest.mark.parametrize("policies", [["bf16"], ["fp32", "bf16", "bf16_pure"], ["bf16"] * 6])
def test_an_svg_has_the_names_and_figures_as_text(tmp_path, policies):
  plans = [a_plan(policy) for policy in policies]
  save_picture(plans, tmp_path / "plan.svg")
  svg = (tmp_path / "plan.svg").read_text()
  for words in (*policies, "master weights", "activations", "analytic", "compiled", "NVIDIA H200 SXM"):
    assert words in svg


def test_a_png_is_an_image_fit_for_a_report(tmp_path):
  from matplotlib import image

  save_picture([a_plan()], str(tmp_path / "plan.png"))
  height, width, _ = image.imread(tmp_path / "plan.png").shape
  assert width >= 1500
  assert height >= 500


def test_the_same_plans_give_the_same_file(tmp_path):
  for name in ("a.svg", "b.svg"):
    save_picture([a_plan()], tmp_path / name)
  assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


def test_what_does_not_fit_says_so(tmp_path):
  save_picture([a_plan(device_memory=5 * 10**9)], tmp_path / "plan.svg")
  assert "does not fit" in (tmp_path / "plan.svg").read_text()


def test_the_title_names_the_model_and_the_device_without_a_second_size(tmp_path):
  plan = a_plan(subject="gpt of 124,439,808 parameters, batch of 16", device="NVIDIA H200 SXM 141 GB")
  save_picture([plan], tmp_path / "plan.svg")
  svg = (tmp_path / "plan.svg").read_text()
  assert plan.subject in svg
  assert "NVIDIA H200 SXM" in svg
  assert "141 GB" not in svg


def test_totals_stand_right_of_every_line(tmp_path):
  plan = a_plan()
  near = dataclasses.replace(plan, device_memory=int(1.001 * plan.peak), usable_memory=int(0.9 * plan.peak))
  save_picture([near], tmp_path / "plan.svg")
  svg = (tmp_path / "plan.svg").read_text()
  assert "JAX takes" in svg
  lines = [float(x) for x in re.findall(r'<path d="M ([\d.]+) [\d.]+ \nL \1 ', svg)]
  total = re.search(rf"translate\(([\d.]+) [\d.]+\)[^>]*>{bytes_text(plan.peak)}<", svg)
  assert total
  assert lines
  assert float(total[1]) > max(lines)


def test_parts_too_small_to_be_seen_are_one_entry_of_the_legend(tmp_path):
  save_picture([a_plan()], tmp_path / "plan.svg")
  svg = (tmp_path / "plan.svg").read_text()
  assert "smaller parts" in svg
  assert ">batch<" not in svg  # 67 MB of 12 GB


def test_an_analytic_plan_has_one_bar(tmp_path):
  save_picture([a_plan(compiled=False)], tmp_path / "plan.svg")
  assert ">compiled<" not in (tmp_path / "plan.svg").read_text()


@pytest.mark.parametrize("name", ["plan.pdf", "plan", "plan.jpeg"])
def test_another_ending_is_refused(tmp_path, name):
  with pytest.raises(ValueError, match=r"\.png or \.svg"):
    save_picture([a_plan()], tmp_path / name)
  assert not list(tmp_path.iterdir())


def test_nothing_to_draw_is_refused(tmp_path):
  with pytest.raises(ValueError, match="at least one"):
    save_picture([], tmp_path / "plan.svg")


def test_without_matplotlib_the_error_says_what_to_install(tmp_path, monkeypatch):
  real = builtins.__import__

  def without(name, *args, **kwargs):
    if name.startswith("matplotlib"):
      raise ImportError(name)
    return real(name, *args, **kwargs)

  monkeypatch.setattr(builtins, "__import__", without)
  with pytest.raises(ImportError, match=r"\[plan\]"):
    save_picture([a_plan()], tmp_path / "plan.svg")
