"""A run that is written to a file says what it does, too."""

import io

import rich.console

from mpjax.train._display import Display


def test_without_a_terminal_a_line_says_that_the_step_is_compiled():
  stream = io.StringIO()
  with Display(rich.console.Console(file=stream), steps=10, start=0, units="tokens", has_scale=True):
    assert stream.getvalue() == "compiling the training step\n"
