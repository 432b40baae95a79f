"""What crosses devices in a step, from compiled programs: operations, dtypes and bytes counted by hand."""

import collections
import math
import re

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import AbstractMesh, AxisType

import mpjax
from mpjax.planner import get_target
from mpjax.planner.compiled._hlo import parse, start_of, trips
from mpjax.planner.compiled._worker import module_proto

# Parts are whole tiles of a TPU, whose compiler pads others.
WORDS, DIM, HIDDEN, ROWS = 512, 128, 512, 32
TX = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
OPERATIONS = "all-reduce|reduce-scatter|all-gather|all-to-all|collective-permute"
HLO = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}
# Losses, metrics, norms of gradients and flags: a few for each parameter at the most.
SCALARS = 40


def plain(params, batch):
  """A table and a scale that are read in float32, and two products."""
  x = params["table"][batch["x"]] * params["scale"]
  return jnp.mean((jnp.tanh(x @ params["up"]) @ params["down"]) ** 2)


def plain_params():
  shapes = {"table": (WORDS, DIM), "scale": (DIM,), "up": (DIM, HIDDEN), "down": (HIDDEN, DIM)}
  return {name: jnp.ones(shape) for name, shape in shapes.items()}


def a_step(
  policy, sizes, accumulate=4, target="here", loss=plain, first=plain_params, rows=(ROWS,), rules=None
):
  """A training step on a mesh, and the shapes of its arguments where they lie."""
  shape, types = tuple(sizes.values()), (AxisType.Auto,) * len(sizes)
  make = jax.make_mesh if target == "here" else AbstractMesh
  resolved = mpjax.get_policy(policy, backend=get_target(target).kind)
  step = mpjax.make_train_step(
    loss,
    TX,
    resolved,
    accumulate=accumulate,
    mesh=make(shape, tuple(sizes), axis_types=types),
    sharding=rules,
  )
  state = jax.eval_shape(lambda: step.init(first()))
  put = lambda x, at: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at)
  batch = {"x": put(jax.ShapeDtypeStruct(rows, jnp.int32), step.layout.batch_sharding)}
  return step, (jax.tree.map(put, state, step.layout.shardings(state)), batch)


def repetitions(module):
  """Each computation of a module, how often it runs, and the instructions that call it."""
  left = [(module, 1, [])]
  while left:
    computation, times, callers = left.pop()
    yield computation, times, callers
    for caller in computation.instructions:
      if caller.op not in ("async-update", "async-done"):  # which run nothing new
        runs = times * ((trips(caller) if caller.op == "while" else 1) or 1)
        left += [(called, runs, [*callers, caller]) for called in caller.called]


def crossing(proto):
  """Elements by operation and dtype, of all and of those inside loops."""
  everywhere, in_loops, chains = collections.Counter(), collections.Counter(), set()
  for computation, times, callers in repetitions(parse(proto)):
    loops = tuple(caller.proto.name for caller in callers if caller.op == "while")
    for instruction in computation.instructions:
      operation = instruction.op.removesuffix("-done")
      if not re.fullmatch(OPERATIONS, operation):
        continue
      start = instruction if instruction.op == operation else start_of(instruction)
      chain = [a.value for a in start.proto.frontend_attributes.map if a.key == "chain_id"]
      if chain and (*chain, loops) in chains:
        continue
      chains.add((*chain, loops))
      for shape in instruction.shapes:
        for counter in (everywhere, in_loops) if loops else (everywhere,):
          counter[operation, shape.dtype] += times * math.prod(shape.dims)
  return everywhere, in_loops


def asked_for(lowered):
  """Elements by operation and dtype that a program asks for itself, before any compiler has seen it."""
  counter = collections.Counter()
  instruction = rf"= (\w+)\[([\d,]*)\]\S* ({OPERATIONS})\("
  for dtype, dims, operation in re.findall(instruction, lowered.as_text(dialect="hlo")):
    counter[operation, dtype] += math.prod(int(n) for n in dims.split(",") if n)
  return counter


def by_hand(policy, sizes):
  """Elements by operation and dtype of parameters and gradients that cross."""
  compute, reduced = HLO[policy.compute_dtype.name], HLO[(policy.reduce_dtype or jnp.dtype("float32")).name]
  wide, narrow, whole = WORDS * DIM, 2 * DIM * HIDDEN, DIM
  fsdp, data = sizes.get("fsdp", 1), sizes.get("data", 1)
  found = collections.Counter()
  if fsdp == 1:
    found["all-reduce", reduced] += wide + narrow + whole
    return found
  found["all-gather", "f32"] += wide
  found["all-gather", compute] += narrow
  found["reduce-scatter", reduced] += (wide + narrow) // fsdp
  found["all-reduce", reduced] += whole + ((wide + narrow) // fsdp if data > 1 else 0)
  return found


def widened(counter):
  """As XLA's CPU compiler makes it: every collective of bfloat16, but none of float16, in float32."""
  out = collections.Counter()
  for (operation, dtype), elements in counter.items():
    out[operation, "f32" if dtype == "bf16" else dtype] += elements
  return out


def require_same(found, want):
  """Equal but for scalars."""
  more = {key: found[key] - want[key] for key in found | want}
  assert all(0 <= n <= SCALARS for n in more.values()), f"{dict(found)}, not {dict(want)}"


MESHES = [{"data": 8}, {"fsdp": 8}, {"data": 2, "fsdp": 4}]
named = lambda sizes: ",".join(f"{axis}={n}" for axis, n in sizes.items())


@pytest.mark.parametrize("sizes", MESHES, ids=named)
def test_a_program_asks_for_parameters_as_they_are_read_and_gradients_once(sizes):
  for base, reduce_dtype in (("fp32", None), ("bf16", None), ("bf16", "bfloat16"), ("fp16", "float16")):
    step, args = a_step({"base": base, "reduce_dtype": reduce_dtype}, sizes)
    assert asked_for(step.jitted.lower(*args)) == by_hand(step.policy, sizes), (base, reduce_dtype)


@pytest.mark.parametrize(
  ("base", "reduce_dtype", "sizes"),
  [
    ("bf16", "bfloat16", {"data": 8}),
    ("fp32", None, {"fsdp": 8}),
    ("fp16", "float16", {"data": 2, "fsdp": 4}),
  ],
)
def test_a_compiled_program_has_that_and_nothing_in_its_loop(base, reduce_dtype, sizes):
  step, args = a_step({"base": base, "reduce_dtype": reduce_dtype}, sizes)
  everywhere, in_loops = crossing(module_proto(step.jitted.lower(*args).compile()))
  require_same(everywhere, widened(by_hand(step.policy, sizes)))
  assert not in_loops
