"""What autocast decides for a program, as data: operations, islands, loop carries."""

from __future__ import annotations

import dataclasses

from mpjax.policy import Policy


@dataclasses.dataclass(frozen=True)
class ExplainedOperation:
  """One operation of a program.

  Attributes:
    path: module path, such as `GPT/h0/attn`.
    primitive: name of the JAX primitive.
    list: allow, deny, infer or opaque.
    before: dtype of its result in the user's program.
    after: dtype that it runs in under autocast.
    flops: FLOPs of a matrix product or convolution, or those a kernel states, all repetitions; else 0.
    bytes: bytes of its results under autocast, all repetitions.
    casts: casts that autocast inserts before it.
    cast_bytes: bytes that those casts write.
    island: number of the float32 island that it is part of, or `None`.
    why: the reason for the dtype.
    rule: the row of the table of decisions (docs/reference/autocast_rules.md).
    times: how often it runs (the length of the scans around it; a while loop counts once).
    operands: the floating dtypes of a kernel's operands; empty for others.
  """

  path: str
  primitive: str
  list: str
  before: str
  after: str
  flops: int
  bytes: int
  casts: int
  cast_bytes: int
  island: int | None
  why: str
  rule: str
  times: int
  operands: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class ExplainedIsland:
  """A float32 island: computed again in the backward pass, from what is kept of it.

  Attributes:
    number: as `island` of its operations has it.
    path: module path.
    operations: names of the JAX primitives that are computed again.
    copied: names of those before it that it carries out itself, since their results take more memory than
      what they are made of: a one-hot, a mask of positions.
    kept_bytes: bytes kept for the backward pass: inputs in half precision, and statistics of rows in
      float32; all repetitions.
    recomputed_bytes: bytes of the float32 results inside, which the backward pass computes again; all
      repetitions.
    fenced_bytes: bytes that the backward pass reads through an optimisation barrier, so that a compiler does
      compute again; all repetitions. 0 where the backward pass follows at once, as in a loss.
    kept_in: `float8` where half-precision inputs are kept in FP8; else empty.
    times: how often it runs.
  """

  number: int
  path: str
  operations: tuple[str, ...]
  copied: tuple[str, ...]
  kept_bytes: int
  recomputed_bytes: int
  fenced_bytes: int
  kept_in: str
  times: int


@dataclasses.dataclass(frozen=True)
class ExplainedFragility:
  """An operation whose result half precision may destroy, whatever its policy.

  Attributes:
    path: module path.
    primitive: name of the JAX primitive.
    kind: `difference`, `angle`, `order`, `small` or `loop`.
    line: the line in the user's program, `model.py:31`.
    why: what may happen.
  """

  path: str
  primitive: str
  kind: str
  line: str
  why: str


@dataclasses.dataclass(frozen=True)
class ExplainedCarry:
  """A carry of a loop that is float32 in the user's program, and the dtype it is held in.

  Attributes:
    path: the loop's module path and `carry_0`, `carry_1`, ...: what an override has to match.
    primitive: `scan` or `while`.
    shape: the carry's shape.
    dtype: the dtype it is held in.
    why: the reason for the dtype.
  """

  path: str
  primitive: str
  shape: tuple[int, ...]
  dtype: str
  why: str


@dataclasses.dataclass(frozen=True)
class ExplainedGather:
  """A parameter that is divided over `fsdp`, and the dtype that it is gathered in.

  Attributes:
    path: the parameter's path.
    shape: the parameter's shape.
    kept: the dtype it is kept in.
    dtype: the dtype it is gathered in.
  """

  path: str
  shape: tuple[int, ...]
  kept: str
  dtype: str


@dataclasses.dataclass(frozen=True)
class ExplainedProgram:
  """The decisions of autocast for a program, as data; `Explanation` says what each is."""

  policy: Policy
  rows: tuple[ExplainedOperation, ...]
  islands: tuple[ExplainedIsland, ...] = ()
  carries: tuple[ExplainedCarry, ...] = ()
  unknown: tuple[str, ...] = ()
  gathers: tuple[ExplainedGather, ...] = ()
  fragile: tuple[ExplainedFragility, ...] = ()
  note: str = ""
  fp8: str = ""

  def matrix_flops(self) -> dict[str, int]:
    """Floating-point operations of matrix products, convolutions and kernels, by dtype."""
    total: dict[str, int] = {}
    for row in self.rows:
      if row.flops:
        total[row.after] = total.get(row.after, 0) + row.flops
    return total
