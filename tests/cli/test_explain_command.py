"""`mpjax explain` as a user meets it: the answer, a table, everything, one policy after the other."""

import re

import pytest

from mpjax.cli import main
from tests.train._tiny_gpt import write_tiny_gpt


@pytest.fixture
def printed(tmp_path, monkeypatch, capsys):
  """Runs the command on a small GPT at a width; returns the lines that it printed."""
  [config] = write_tiny_gpt(tmp_path)

  def printed(*arguments, width=116):
    monkeypatch.setenv("COLUMNS", str(width))
    assert main(["explain", config, *arguments]) == 0
    return capsys.readouterr().out.splitlines()

  return printed


def test_the_answer_fits_a_screen_and_says_how_to_see_the_rest(printed):
  lines = printed("policy=bf16,fp16")
  between = lines.index("")
  answers = {"bfloat16": lines[:between], "float16": lines[between + 1 :]}
  for dtype, answer in answers.items():
    assert len(answer) <= 12
    assert max(map(len, answer)) <= 116
    first = rf"policy \w+: \S+ MFLOP of matrix products, 100% in {dtype}; "
    assert re.match(first, answer[0])
    assert answer[-2].startswith("Change it: overrides={")
    assert answer[-1] == "more: --table reasons, or modules, all"
  assert answers["float16"] == printed("policy=fp16")


def test_a_table_is_asked_for_by_name_and_all_of_them_at_once(printed):
  modules = printed("--table", "modules")
  assert modules[0] == "Modules"
  everything = printed("--all")
  assert everything[-len(modules) :] == modules
  assert everything[: len(printed()) - 1] == printed()[:-1]
  assert max(map(len, printed("--all", width=80))) <= 80


def test_keys_below_the_policy_hold_for_the_one_that_is_named(printed):
  assert "100% in float16" in printed("policy=bf16", "policy.compute_dtype=float16")[0]
