"""`mpjax explain` as a user meets it: the answer, a table, everything, policies side by side."""

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
  assert len(lines) <= 12
  assert max(map(len, lines)) <= 116
  assert re.match(r"policy bf16: \S+ MFLOP of matrix products, 100% in bfloat16; ", lines[0])
  assert re.match(r"policy fp16: \S+ MFLOP of matrix products, 100% in float16; ", lines[1])
  assert lines[-2].startswith("Change it: policy.overrides: {")
  assert lines[-1] == "more: --table totals, or float32, follows, islands, modules, all"


def test_a_table_is_asked_for_by_name_and_all_of_them_at_once(printed):
  modules = printed("--by", "module")
  assert modules == printed("--table", "modules")
  assert modules[0] == "Modules"
  everything = printed("--all")
  assert everything[-len(modules) :] == modules
  assert everything[: len(printed()) - 1] == printed()[:-1]
  assert max(map(len, printed("--all", "policy=bf16,fp16", width=80))) <= 80


def test_a_wrong_table_is_answered_with_those_there_are(tmp_path, capsys):
  [config] = write_tiny_gpt(tmp_path)
  assert main(["explain", config, "--table", "island"]) == 2
  assert capsys.readouterr().err == (
    "error: --table: no table 'island': expected one of all, totals, float32, follows, islands, modules; "
    "did you mean 'islands'?\n"
  )


def test_keys_below_the_policy_hold_for_the_one_that_is_named(printed):
  assert "100% in float16" in printed("policy=bf16", "policy.compute_dtype=float16")[0]
