"""The matrix products and collectives of an optimised program, read from its HLO.

A product is a GEMM if a cuBLAS call, a Triton or cuDNN fusion or a TPU's matrix unit computes it. On a GPU,
XLA's own loops compute any other `dot`, without matrix units. A `scaled-dot` multiplies blocks with scales.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import math
import re
from collections.abc import Iterator, Mapping

from mpjax.formats import narrow_bits
from mpjax.jaxpr import taps
from mpjax.planner._results import Collective, Crossing, add_up
from mpjax.planner.compiled._hlo_opcodes import COLLECTIVES
from mpjax.planner.compiled._hlo_parts import path_of_name
from mpjax.planner.compiled._hlo_text import HloInstruction, HloModule, HloShape, done_of, numpy_name

_GEMM_FUSION = re.compile(r'"kind":"(__triton\w*|__cudnn\$fusion)"')
# The devices of a collective: `{{0,1},{2,3}}`, `[2,2]<=[4]`, or `mesh['data'=2,'fsdp'=2] {'fsdp'}`.
_LISTED = re.compile(r"\breplica_groups=(?:\{\{([\d,]+)\}|\[\d+,(\d+)\]<=)")
_OF_MESH = re.compile(r"\breplica_groups=mesh\[([^\]]*)\][^{]*\{([^}]*)\}")
# On a TPU, several fusions that compute during one collective each repeat it; they share its chain.
_CHAIN = re.compile(r'chain_id="(\d+)"')
_PLAIN = {"size": 1, "stride": 1, "pad": 0, "lhs_dilate": 1, "rhs_dilate": 1}


@dataclasses.dataclass(frozen=True)
class KernelProduct:
  """One matrix product.

  Attributes:
    kernel: `cublas`, `triton` or `cudnn`; `loop` for a product that is not a GEMM; `dot` on platforms with a
      single way (TPU, CPU).
    dtypes: HLO's names of its operands' dtypes.
    flops: FLOPs of all repetitions.
    times: how often it runs; a loop of unknown length counts once.
    op: its place in the traced program.
  """

  kernel: str
  dtypes: tuple[str, str]
  flops: int
  times: int
  op: str

  @property
  def is_narrow(self) -> bool:
    """Returns whether it is a GEMM with both operands below 16 bits."""
    return self.kernel != "loop" and all(narrow_bits(numpy_name(dtype)) for dtype in self.dtypes)

  @property
  def backward(self) -> bool:
    """Returns whether an operand is E5M2, the format of gradients."""
    return any("e5m2" in dtype for dtype in self.dtypes)


def kernel_products(module: HloModule, kind: str = "gpu") -> list[KernelProduct]:
  """Returns every matrix product of a compiled module, in the order of its text.

  Args:
    module: the parsed HLO.
    kind: kind of the platform: `gpu`, `tpu` or `cpu`.
  """
  found = []
  times, kernels = _repetitions(module)
  for name, instructions in module.computations.items():
    if not times[name]:
      continue
    for instruction in instructions.values():
      default = "loop" if kind == "gpu" else "dot"
      product = _product(instruction, instructions, times[name], kernels.get(name, default))
      if product is not None:
        found.append(product)
  return found


def matrix_flops(instruction: HloInstruction, scope: Mapping[str, HloInstruction]) -> int:
  """Returns the FLOPs of one run of a product or convolution."""
  found = _product(instruction, scope, 1, "")
  return found.flops if found is not None else 0


def by_dtypes(found: list[KernelProduct]) -> dict[str, dict[str, int]]:
  """Returns FLOPs and number of products by `kernel: dtypes`, the most FLOPs first."""
  table: dict[str, dict[str, int]] = collections.defaultdict(lambda: {"flops": 0, "products": 0})
  for product in sorted(found, key=lambda product: -product.flops):
    row = table[f"{product.kernel}: {' x '.join(product.dtypes)}"]
    row["flops"] += product.flops
    row["products"] += 1
  return dict(table)


def collectives(module: HloModule) -> tuple[Collective, ...]:
  """Returns the collectives of one step: the bytes of the results on each device, by operation and dtype."""
  return add_up(
    Crossing(
      instruction.op.removesuffix("-start"),
      numpy_name(shape.dtype),
      shape.nbytes,
      _group(instruction.rest),
      path_of_name(instruction.op_name),
      times,
    )
    for instruction, times, moved in _crossings(module)
    for shape in moved or ()
  )


def _group(text: str) -> int:
  """Returns the number of devices that exchange with each other in a collective; 0 if not stated."""
  if listed := _LISTED.search(text):
    return int(listed[2]) if listed[2] else listed[1].count(",") + 1
  if (over := _OF_MESH.search(text)) is None:
    return 0
  sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", over[1])}
  return math.prod(sizes.get(axis.strip("'"), 0) for axis in over[2].split(","))


def unplaced_collectives(module: HloModule) -> tuple[str, ...]:
  """Returns the names of collectives that begin and never end; their bytes are not known."""
  return tuple(instruction.name for instruction, _, moved in _crossings(module) if moved is None)


def _crossings(module: HloModule) -> Iterator[tuple[HloInstruction, int, list[HloShape] | None]]:
  """Yields each collective once, with how often it runs and its results, or `None` if they are not known."""
  chains = set()
  for name, times, callers in module.repetitions():
    scope = module.computations[name]
    for instruction in scope.values():
      if instruction.op.removesuffix("-start") not in COLLECTIVES:
        continue
      if chain := _CHAIN.search(instruction.rest):
        key = (chain[1], *(caller.name for caller in callers if caller.op == "while"))
        if key in chains:
          continue
        chains.add(key)
      end = done_of(instruction, scope) if instruction.op.endswith("-start") else instruction
      yield instruction, times, end.shapes if end is not None else None


def _repetitions(module: HloModule) -> tuple[collections.Counter[str], dict[str, str]]:
  """Returns how often each computation runs, and the GEMM kernels of those that are compiled into one."""
  times: collections.Counter[str] = collections.Counter()
  kernels: dict[str, str] = {}
  for name, count, callers in module.repetitions():
    times[name] += count
    for caller in reversed(callers):
      if caller.op == "fusion" and (found := _GEMM_FUSION.search(caller.rest)):
        kernels[name] = "triton" if "triton" in found[1] else "cudnn"
        break
  return times, kernels


def _product(
  instruction: HloInstruction, scope: Mapping[str, HloInstruction], times: int, kernel: str
) -> KernelProduct | None:
  text = instruction.rest
  if instruction.op == "convolution":
    return _convolution(instruction, scope, times, kernel)
  if instruction.op in ("dot", "scaled-dot"):
    contracted, batch = integers("lhs_contracting_dims", text), integers("lhs_batch_dims", text)
  elif instruction.op == "custom-call" and "__cublas$" in text:
    config, _ = json.JSONDecoder().raw_decode(text, text.index("backend_config=") + len("backend_config="))
    dims = config["gemm_backend_config"]["dot_dimension_numbers"]
    contracted = [int(i) for i in dims["lhs_contracting_dimensions"]]
    batch = [int(i) for i in dims["lhs_batch_dimensions"]]
    kernel = "cublas"
  elif instruction.op == "custom-call" and "__cudnn$conv" in text:
    return _convolution(instruction, scope, times, "cudnn")
  else:
    return None
  lhs, rhs = (scope[name].shapes[0] for name in instruction.operands[:2])
  shared = math.prod(lhs.dims[i] for i in (*contracted, *batch))
  flops = 2 * math.prod(lhs.dims) * math.prod(rhs.dims) // shared
  return KernelProduct(kernel, (lhs.dtype, rhs.dtype), flops * times, times, instruction.op_name)


def _convolution(
  instruction: HloInstruction, scope: Mapping[str, HloInstruction], times: int, kernel: str
) -> KernelProduct | None:
  """Returns a convolution; on a TPU every plain product is one, with a window of one."""
  labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", instruction.rest)
  if labels is None:
    return None
  lhs, rhs = (scope[name].shapes[0] for name in instruction.operands[:2])
  out = instruction.shapes[0]
  # cuDNN's backward calls use the names of the forward call's operands and result.
  if "convBackwardFilter" in instruction.rest:
    inputs, weights, result = lhs.dims, out.dims, rhs.dims
  elif "convBackwardInput" in instruction.rest:
    inputs, weights, result = out.dims, rhs.dims, lhs.dims
  else:
    inputs, weights, result = lhs.dims, rhs.dims, out.dims
  met = 1
  for i, window in enumerate(_windows(instruction.rest, len(inputs) - 2)):
    at = labels[1].index(str(i)), labels[3].index(str(i))
    met *= taps(inputs[at[0]], result[at[1]], **window)
  features = result[labels[3].index("b")] * result[labels[3].index("f")]
  flops = 2 * features * weights[labels[2].index("i")] * met
  return KernelProduct(kernel, (lhs.dtype, rhs.dtype), flops * times, times, instruction.op_name)


def _windows(text: str, rank: int) -> list[dict[str, int]]:
  """Returns the window of a convolution along each spatial dimension."""
  found = re.search(r"window=\{([^}]*)\}", text)
  windows = [dict(_PLAIN) for _ in range(rank)]
  for item in found[1].split() if found else ():
    name, _, values = item.partition("=")
    if name in _PLAIN:
      for window, value in zip(windows, values.split("x"), strict=True):
        window[name] = int(value.partition("_")[0])
  return windows


def integers(name: str, text: str) -> list[int]:
  """Returns the numbers of an attribute such as `lhs_batch_dims={0,1}`."""
  match = re.search(rf"\b{name}=\{{([\d,]*)\}}", text)
  return [int(i) for i in match[1].split(",") if i] if match else []
