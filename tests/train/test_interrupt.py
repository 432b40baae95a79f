"""Signals to a process that runs `mpjax train`."""

import signal
import sys
import time

import pytest

# The command's own, without a run.
from mpjax.train._interrupt import Interrupt


@pytest.mark.parametrize("ignored", [False, True])
def test_a_terminal_that_hangs_up_is_an_interruption_unless_it_is_ignored(ignored):
  before = signal.signal(signal.SIGHUP, signal.SIG_IGN if ignored else lambda *_: None)
  try:
    with Interrupt() as interrupt:
      signal.raise_signal(signal.SIGHUP)
    assert interrupt.signum == (None if ignored else signal.SIGHUP)
  finally:
    signal.signal(signal.SIGHUP, before)


class Interrupting:
  def __del__(self):
    signal.raise_signal(signal.SIGINT)
    time.sleep(0)  # a second one is raised here, and dropped


@pytest.fixture
def python_takes_ctrl_c():
  before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it in the background
  yield
  signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("python_takes_ctrl_c")
def test_a_second_ctrl_c_in_a_destructor_acts_as_usual(capsys):
  hook = sys.unraisablehook
  with Interrupt() as interrupt:
    Interrupting()
    assert interrupt.signum == signal.SIGINT
    Interrupting()
    with pytest.raises(KeyboardInterrupt):
      time.sleep(10)
  assert "Exception ignored" not in capsys.readouterr().err
  assert sys.unraisablehook is hook
