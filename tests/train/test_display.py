"""A run that is written to a file says what it does, too."""

import io
import pathlib

import rich.console

import mpjax
from mpjax.train._display import Display, summary_table


def test_without_a_terminal_a_line_says_that_the_step_is_compiled():
  stream = io.StringIO()
  with Display(rich.console.Console(file=stream), steps=10, start=0, units="tokens", has_scale=True):
    assert stream.getvalue() == "compiling the training step\n"


def test_the_final_table_cuts_no_policy():
  policy = str(mpjax.get_policy({"base": "fp16", "loss_scaling": {"init_scale": 1024, "growth_interval": 7}}))
  console = rich.console.Console(width=60, file=io.StringIO())
  summary_table(console, {"policy": policy, "steps": 3}, pathlib.Path("runs/x"))
  text = console.file.getvalue()
  assert "growth_interval" in "".join(
    line.strip("│ ").removeprefix("policy").strip("│ ") for line in text.splitlines()
  )
  assert "…" not in text
