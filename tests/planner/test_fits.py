"""Searches for the largest batch that fits, and the cheapest choice that does: on plans made up for them."""

import dataclasses

import pytest

from mpjax.planner import CompileError, Memory, Note, cheapest, largest_batch
from tests.planner._plans import a_plan, a_product, a_time

FAILED = Note("the compiler failed, out of memory: v5e: RESOURCE_EXHAUSTED", "out of memory")


def with_peak(analytic, compiled=None, **changes):
  """A plan that needs so many bytes."""
  memory = lambda peak: Memory({"batch": peak}, {}, (), 0, peak)
  plan = a_plan(**changes)
  found = compiled and dataclasses.replace(plan.compiled, peak=compiled, memory=memory(compiled))
  return dataclasses.replace(plan, memory=memory(analytic), compiled=found or None)


class Planned:
  """Plans batches by formulas for both peaks, and remembers what was asked for.

  Args:
    compiled: bytes of a batch, by the compiler.
    analytic: by the plan; the same if not given.
    gives_up: from which batch on the compiler does not; how is `note` or `raise`.
  """

  def __init__(self, compiled, analytic=None, gives_up=None, how="note"):
    self.compiled, self.analytic = compiled, analytic or compiled
    self.gives_up, self.how = gives_up, how
    self.calls = []  # of the compiler
    self.guesses = []  # without it

  def __call__(self, batch, compile):
    analytic = int(self.analytic(batch))
    if compile is False:
      self.guesses.append(batch)
      return with_peak(analytic)
    self.calls.append(batch)
    if self.gives_up is not None and batch >= self.gives_up:
      if self.how == "raise":
        raise CompileError("RESOURCE_EXHAUSTED", out_of_memory=True)
      return with_peak(analytic, notes=(FAILED,))
    return with_peak(analytic, int(self.compiled(batch)))


def largest_by_hand(peak, memory, multiple=1, most=10**7):
  """By doubling and halving the peak itself, which grows."""
  low, high = 0, most // multiple + 1
  while high - low > 1:
    middle = (low + high) // 2
    low, high = (middle, high) if peak(middle * multiple) <= memory else (low, middle)
  return low * multiple


line = lambda constant, slope: lambda b: constant + slope * b
square = lambda b: 100 + b * b
BENT = {
  # name: the compiler's bytes, the plan's, memory, at most so many compilations.
  "straight": (line(100, 7), None, 10_000, 3),
  "straight, fewer bytes than planned": (line(100, 7), line(100, 9), 10_000, 8),
  "straight, more bytes than planned": (line(100, 9), line(100, 7), 10_000, 8),
  "mostly state": (line(112_000, 280), line(112_000, 560), 141_000, 8),
  "mostly state, planned far too large": (line(112_000, 28), line(112_000, 280), 141_000, 12),
  "mostly state, planned too small": (line(112_000, 560), line(112_000, 280), 141_000, 8),
  "nearly all state": (line(999_000, 1), line(999_000, 900), 1_000_000, 16),
  "quadratic": (square, lambda b: 90 * b + square(b), 10**8, 20),
  "quadratic, planned straight": (square, line(100, 7), 10**8, 36),
  "root": (lambda b: 100 + int(1000 * b**0.5), line(100, 7), 10**6, 30),
  "steps of 64": (lambda b: 100 + 512 * (b // 64), line(100, 8), 10**6, 20),
  "a jump": (lambda b: 100 + 7 * b + (3000 if b > 900 else 0), None, 10_000, 20),
}


def assert_is_largest(fit, planned, memory, multiple):
  assert fit.batch % multiple == 0
  assert fit.plan.peak == planned.compiled(fit.batch) <= memory
  assert fit.next_batch == fit.batch + multiple
  assert fit.next_peak == planned.compiled(fit.next_batch) > memory
  assert fit.memory == memory
  assert dict(fit.tried) == {b: planned.compiled(b) for b in planned.calls}
  assert len(planned.calls) == len(set(planned.calls))  # none is planned twice


@pytest.mark.parametrize("name", BENT)
def test_largest_batch_fits_and_the_next_does_not(name):
  compiled, analytic, memory, most_calls = BENT[name]
  for multiple in (1, 8, 24):
    largest = largest_by_hand(compiled, memory, multiple)
    if largest:  # the smallest fits
      planned = Planned(compiled, analytic)
      fit = largest_batch(planned, memory, multiple=multiple)
      assert fit.batch == largest, multiple
      assert_is_largest(fit, planned, memory, multiple)
      assert len(planned.calls) <= most_calls, multiple
      assert len(planned.guesses) <= 16, multiple


def test_a_compiler_that_gives_up_is_taken_for_too_large():
  for how, gives_up, multiple in (
    *(("note", 30, 1), ("raise", 30, 24), ("raise", 701, 1), ("note", 701, 24)),
    *(("note", 1400, 1), ("raise", 1400, 24)),
  ):
    planned = Planned(line(100, 7), gives_up=gives_up, how=how)
    fit = largest_batch(planned, 10_000, multiple=multiple)
    assert fit.batch == (gives_up - 1) // multiple * multiple, (how, gives_up, multiple)
    assert (fit.next_batch, fit.next_peak) == (fit.batch + multiple, 0)
    assert dict(fit.tried)[fit.next_batch] == 0
    assert f"{fit.next_batch} the compiler finds too large" in str(fit)
    assert len(planned.calls) <= 16, (how, gives_up, multiple)


def test_the_search_ends_at_its_bound():
  for most, multiple, want in ((100, 1, 100), (100, 24, 96), (24, 24, 24)):
    planned = Planned(line(100, 7))
    fit = largest_batch(planned, 10**9, multiple=multiple, most=most)
    assert (fit.batch, fit.next_batch, fit.next_peak) == (want, None, 0)
    assert str(fit) == f"largest batch that fits 1.00 GB: {want} ({100 + 7 * want} B)"
    assert max(planned.calls) <= most
  fit = largest_batch(Planned(lambda b: 10), 1000, most=4096)  # bytes that do not depend on the batch
  assert (fit.batch, fit.next_batch) == (4096, None)


def test_progress_is_told_each_plan_and_bounds_that_close_in():
  told = []
  planned = Planned(square, lambda b: 90 * b + square(b))
  largest_batch(planned, 10**8, progress=lambda *args: told.append(args))
  assert [batch for batch, _, _ in told] == planned.guesses + planned.calls
  for search in told[: len(planned.guesses)], told[len(planned.guesses) :]:
    lows, highs = zip(*((low, high) for _, low, high in search), strict=True)
    assert list(lows) == sorted(lows)
    known = [high for high in highs if high]
    assert known == sorted(known, reverse=True)
    assert all(low < batch and (not high or batch < high) for batch, low, high in search)


def test_where_nothing_fits_it_is_said():
  large, ends = line(10**9, 1), r"not even a batch of 1 fits 1(.00)? MB: its compiler gives up"
  for planned, memory, options, message in (
    (Planned(large), 10**6, {}, r"batch of 1 fits 1(.00)? MB: it needs 1(.00)? GB; choose another"),
    (Planned(large), 10**6, {"multiple": 24}, r"not even a batch of 24 fits 1(.00)? MB"),
    (Planned(line(0, 10), gives_up=1), 10**6, {}, ends),
    (Planned(line(0, 10), gives_up=1, how="raise"), 10**6, {}, ends),
    (Planned(line(0, 1)), 10**6, {"multiple": 0}, r"multiple=0: expected positive"),
    (Planned(line(0, 1)), 0, {}, r"memory=0.*expected positive"),
    (Planned(large), 10**6, {"multiple": 24, "most": 20}, r"most=20: expected at least one multiple of 24"),
  ):
    with pytest.raises(ValueError, match=message):
      largest_batch(planned, memory, **options)


def a_choice(label, peak, seconds, flops=10, **changes):
  time = seconds and a_time(seconds)
  return with_peak(peak, label=label, time=time or None, products=(a_product(flops=flops),), **changes)


FP8, BF16, FP32 = a_choice("fp8", 60, 1.0), a_choice("bf16", 50, 2.0), a_choice("fp32", 90, 4.0)
EVERY = (FP32, BF16, FP8, a_choice("bf16 recompute=blocks", 30, 2.5))


def test_the_cheapest_is_the_fastest_that_fits():
  for plans, memory, want in (
    (EVERY, 100, "fp8"),
    (EVERY, 60, "fp8"),
    (EVERY, 59, "bf16"),
    (EVERY, 49, "bf16 recompute=blocks"),
    ((a_choice("more", 50, 2.0), a_choice("less", 40, 2.0)), 100, "less"),
    # Where no peaks are published, FLOPs.
    ((a_choice("again", 40, None, 15), a_choice("once", 50, None, 10)), 100, "once"),
    ((a_choice("again", 40, None, 15), a_choice("once", 50, 1.0, 10)), 100, "once"),
    # The compiler's figure counts, not the analytic one.
    ((dataclasses.replace(FP8, compiled=with_peak(1, 999).compiled), BF16), 100, "bf16"),
    ((a_choice("failed", 40, 1.0, notes=(FAILED,)), BF16), 100, "bf16"),
  ):
    assert cheapest(plans, memory).label == cheapest(plans[::-1], memory).label == want, memory
  with pytest.raises(ValueError, match=r"none of 2 choices fits 10 B: the smallest, bf16, needs 50 B"):
    cheapest((FP32, BF16), 10)
  with pytest.raises(ValueError, match=r"no plans"):
    cheapest((), 10)
