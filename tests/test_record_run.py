"""The recorded run: what a terminal shows in the end, as a picture that asks nothing of another host."""

import importlib.util
import pathlib
import re

import pytest

pytest.importorskip("rich")

ROOT = pathlib.Path(__file__).parents[1]
SPEC = importlib.util.spec_from_file_location("record_run", ROOT / "scripts" / "record_run.py")
record_run = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(record_run)


def test_a_progress_bar_is_shown_as_it_was_last():
  written = (
    "\x1b[?25lhead\r\n\r\x1b[2Kbar 1\r\x1b[2Ksaid above\r\nbar 1\r\x1b[2Kbar \x1b[1m2\x1b[0m\r\n\x1b[?25h"
  )
  assert record_run.screen(written) == "head\nsaid above\nbar \x1b[1m2\x1b[0m"


def test_the_picture_has_colours_and_no_font_from_elsewhere():
  svg = record_run.picture(["mpjax", "train"], "policy \x1b[32mfp16\x1b[0m <b>")
  assert "fp16" in svg
  assert "&lt;b&gt;" in svg
  assert len(set(re.findall(r"fill: (#\w+)", svg))) > 1
  for text in (svg, record_run.PICTURE.read_text()):
    assert "@font-face" not in text
    assert set(re.findall(r"https?://[^\"]+", text)) == {"http://www.w3.org/2000/svg"}


def test_the_picture_is_of_the_command_that_the_script_runs():
  shown = re.sub(r"<[^>]+>", "", record_run.PICTURE.read_text()).replace("&#160;", " ")
  assert f"$ {' '.join(record_run.COMMAND)}" in shown
  assert "run finished" in shown
