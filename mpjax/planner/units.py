"""Numbers with units, for people: decimal bytes, FLOPs and seconds."""

from __future__ import annotations


def bytes_text(nbytes: float) -> str:
  """`1.23 GB`."""
  return _scaled(nbytes, ("B", "kB", "MB", "GB", "TB", "PB"))


def flops_text(flops: float) -> str:
  """`4.56 TFLOP`."""
  return _scaled(flops, ("FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP", "EFLOP"))


def seconds_text(seconds: float) -> str:
  """`7.89 ms`."""
  return _scaled(seconds * 1e9, ("ns", "us", "ms", "s"))


def _scaled(value: float, units: tuple[str, ...]) -> str:
  for unit in units:
    if abs(value) < 999.5 or unit == units[-1]:
      return f"{value:.3g} {unit}" if unit != units[0] or value != int(value) else f"{int(value)} {unit}"
    value /= 1000
  return ""
