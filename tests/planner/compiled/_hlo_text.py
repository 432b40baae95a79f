"""Texts of compiled programs, written by hand."""

import re

from mpjax.planner.compiled import parse

SHORT = {
  "X": "f32[32,32]{1,0}",
  "CHIP": "f32[32,32]{1,0:S(1)}",
  "BIG": "f32[64,1024]{1,0}",
  "FOUR": "f32[128,32]{1,0}",
  "V": "f32[8]{0:T(128)}",
  "N": "s32[]{:T(128)}",
  "DOT": "lhs_contracting_dims={1}, rhs_contracting_dims={0}",
}


def computation(name, lines):
  """Text of a computation whose lines end in `;`: `c = a . b` is a product, and words of SHORT are what they stand for."""
  lines = re.sub(r"(\w+) = (\w+) \. (\w+)", r"%\1 = X dot(%\2, %\3), DOT", lines)
  lines = re.sub(rf"\b({'|'.join(SHORT)})\b", lambda found: SHORT[found[1]], lines)
  body = "".join(f"  {line.strip()}\n" for line in lines.split(";"))
  return f"{name} () -> () {{\n{body}}}\n\n"


def program(lines, computations="", head=""):
  """The module of a main computation of these lines, whose argument is `p`."""
  main = computation("ENTRY %main", lines)
  return parse(f"HloModule m, is_scheduled=true{head}\n\n{computations}{main}")
