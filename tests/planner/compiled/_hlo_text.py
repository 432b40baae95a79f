"""Programs written by hand, as text that XLA reads."""

import importlib
import re

from mpjax.planner.compiled._hlo import parse

SHORT = {
  "V": "f32[8]{0:T(128)}",
  "N": "s32[]{:T(128)}",
  "DOT": "lhs_contracting_dims={1}, rhs_contracting_dims={0}",
  "CALL": 'custom_call_target="some_call"',
}
ADD = "%add {\n  %l = f32[] parameter(0)\n  %r = f32[] parameter(1)\n  ROOT %s = f32[] add(%l, %r)\n}\n\n"


def computation(name, lines):
  """Text of a computation whose lines end in `;`; words of SHORT are what they stand for."""
  lines = re.sub(r"(custom-call\([^)]*\))(?!, (?:custom_call_target|CALL))", r"\1, CALL", lines)
  lines = re.sub(rf"\b({'|'.join(SHORT)})\b", lambda found: SHORT[found[1]], lines)
  body = "".join(f"  {line.strip()}\n" for line in lines.split(";"))
  return f"{name} {{\n{body}}}\n\n"


def program(lines, computations="", head=""):
  """The module of a main computation of these lines; `%add` is there for reductions."""
  main = computation("ENTRY %main", lines)
  return parse(serialised(f"HloModule m, is_scheduled=true{head}\n\n{ADD}{computations}{main}"))


def serialised(text):
  """The messages of a text, by the reader that JAX's older releases have in another module."""
  for name in ("jaxlib._hlo", "jaxlib._jax"):
    try:
      read = importlib.import_module(name).hlo_module_from_text
      break
    except (ImportError, AttributeError):
      continue
  return bytes(read(text).as_serialized_hlo_module_proto())
