"""The matrix products of an optimised GPU program, read from its HLO: kernel, dtypes, FLOPs.

A product is a GEMM where a cuBLAS call or a Triton or cuDNN fusion does it. A `dot` anywhere else is what
XLA's own loops multiply, which no matrix unit does.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import math
import re

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%([\w.\-]+) = (\(.*?\)|[^\s(]\S*) ([\w\-]+)\((.*)$")
_CALLED = re.compile(r"\b(?:calls|to_apply|body|condition|branch_computations)=(?:\{([^}]*)\}|%([\w.\-]+))")
_TRIP_COUNT = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_GEMM_FUSION = re.compile(r'"kind":"(__triton\w*|__cudnn\$fusion)"')


@dataclasses.dataclass(frozen=True)
class Product:
  """One matrix product.

  Attributes:
    kernel: `cublas`, `triton` or `cudnn`; `loop` for one that is no GEMM.
    dtypes: of its operands, as HLO names them.
    flops: of all repetitions.
    times: how often it runs; a loop whose length is not known counts once.
    op: where it came from in the traced program.
  """

  kernel: str
  dtypes: tuple[str, str]
  flops: int
  times: int
  op: str

  @property
  def fp8(self) -> bool:
    """Whether it is a GEMM with both operands in FP8."""
    return self.kernel != "loop" and all(dtype.startswith("f8") for dtype in self.dtypes)

  @property
  def backward(self) -> bool:
    """Whether an operand is E5M2, the format of gradients."""
    return any("e5m2" in dtype for dtype in self.dtypes)


@dataclasses.dataclass(frozen=True)
class _Instruction:
  shape: str
  op: str
  rest: str  # operands and attributes


def products(hlo: str) -> list[Product]:
  """Every matrix product of a compiled module, in the order of its text."""
  computations, entry = _parse(hlo)
  times, kernels = _repetitions(computations, entry)
  found = []
  for name, instructions in computations.items():
    for instruction in instructions.values():
      product = _product(instruction, instructions, times[name], kernels.get(name, "loop"))
      if product is not None and product.times:
        found.append(product)
  return found


def by_dtypes(found: list[Product]) -> dict[str, dict[str, int]]:
  """FLOPs and number of products by `kernel: dtypes`, the most FLOPs first."""
  table: dict[str, dict[str, int]] = collections.defaultdict(lambda: {"flops": 0, "products": 0})
  for product in sorted(found, key=lambda product: -product.flops):
    row = table[f"{product.kernel}: {' x '.join(product.dtypes)}"]
    row["flops"] += product.flops
    row["products"] += 1
  return dict(table)


def _parse(hlo: str) -> tuple[dict[str, dict[str, _Instruction]], str]:
  computations: dict[str, dict[str, _Instruction]] = {}
  current: dict[str, _Instruction] = {}
  entry = ""
  for line in hlo.splitlines():
    if header := _COMPUTATION.match(line):
      current = computations[header[2]] = {}
      entry = header[2] if header[1] else entry
    elif parsed := _INSTRUCTION.match(line):
      current[parsed[1]] = _Instruction(parsed[2], parsed[3], parsed[4])
  if not entry:
    raise ValueError("no ENTRY computation: expected the text of an HLO module, as compiled.as_text() gives")
  return computations, entry


def _repetitions(
  computations: dict[str, dict[str, _Instruction]], entry: str
) -> tuple[collections.Counter[str], dict[str, str]]:
  """How often each computation runs, and the GEMM kernel that it is compiled into, if it is."""
  times: collections.Counter[str] = collections.Counter()
  kernels: dict[str, str] = {}

  def visit(name: str, n: int, kernel: str | None) -> None:
    times[name] += n
    if kernel is not None:
      kernels[name] = kernel
    for instruction in computations[name].values():
      count, inner = n, kernel
      if instruction.op == "while" and (length := _TRIP_COUNT.search(instruction.rest)):
        count *= int(length[1])
      if instruction.op == "fusion" and (kind := _GEMM_FUSION.search(instruction.rest)):
        inner = "triton" if "triton" in kind[1] else "cudnn"
      for several, one in _CALLED.findall(instruction.rest):
        for called in re.findall(r"[\w.\-]+", several or one):
          if called in computations:
            visit(called, count, inner)

  visit(entry, 1, None)
  return times, kernels


def _product(
  instruction: _Instruction, scope: dict[str, _Instruction], times: int, kernel: str
) -> Product | None:
  text = instruction.rest
  if instruction.op == "dot":
    sizes = lambda side, kind: _integers(rf"\b{side}_{kind}_dims=\{{([\d,]*)\}}", text)
    contracted, batch = sizes("lhs", "contracting"), sizes("lhs", "batch")
  elif instruction.op == "custom-call" and "__cublas$" in text:
    config, _ = json.JSONDecoder().raw_decode(text, text.index("backend_config=") + len("backend_config="))
    dims = config["gemm_backend_config"]["dot_dimension_numbers"]
    contracted = [int(i) for i in dims["lhs_contracting_dimensions"]]
    batch = [int(i) for i in dims["lhs_batch_dimensions"]]
    kernel = "cublas"
  else:
    return None
  lhs, rhs = (scope[name].shape for name in re.findall(r"%([\w.\-]+)", text)[:2])
  lhs_dims, rhs_dims = _dims(lhs), _dims(rhs)
  shared = math.prod(lhs_dims[i] for i in (*contracted, *batch))
  flops = 2 * math.prod(lhs_dims) * math.prod(rhs_dims) // shared
  op = re.search(r'op_name="([^"]*)"', text)
  return Product(kernel, (_dtype(lhs), _dtype(rhs)), flops * times, times, op[1] if op else "")


def _integers(pattern: str, text: str) -> list[int]:
  match = re.search(pattern, text)
  return [int(i) for i in match[1].split(",") if i] if match else []


def _dtype(shape: str) -> str:
  return shape[: shape.index("[")]


def _dims(shape: str) -> list[int]:
  return _integers(r"\[([\d,]*)\]", shape)
