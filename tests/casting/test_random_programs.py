"""Autocast over random programs: graphs of operations, nested in scans, conditionals, custom rules and the rest."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings, strategies as st
from jax import lax

from tests.casting._conformance import Case, check, normal

Body = Callable[[jax.Array, jax.Array], jax.Array]
SHAPE = (4, 4)
MASK = np.tri(4, dtype=bool)


@jax.custom_jvp
def softsign(x):
  return x / (1 + jnp.abs(x))


@softsign.defjvp
def _softsign_jvp(primals, tangents):
  (x,), (dx,) = primals, tangents
  return softsign(x), dx / jnp.square(1 + jnp.abs(x))


@jax.custom_vjp
def bounded(x):
  return jnp.tanh(x)


bounded.defvjp(lambda x: (jnp.tanh(x), x), lambda x, g: (g / jnp.square(jnp.cosh(x)),))

# Every operation maps values of a few units to values of a few units.
UNARY: dict[str, Callable[[jax.Array], jax.Array]] = {
  "astype": lambda x: x.astype(jnp.float32) + 0.5,
  "bias": lambda x: x + jnp.arange(4.0) / 4,
  "cos": jnp.cos,
  "cumsum": lambda x: jnp.cumsum(x, 0) / 4,
  "custom jvp": softsign,
  "custom vjp": bounded,
  "erf": lax.erf,
  "exp": lambda x: jnp.exp(jnp.tanh(x)),
  "fft": lambda x: jnp.fft.fft(x).real / 4,
  "flip": lambda x: x[::-1],
  "gather": lambda x: x[np.array([3, 0, 0, 1])],
  "gelu": jax.nn.gelu,
  "half": lambda x: (x.astype(jnp.float16) * 2).astype(jnp.float32) / 4,
  "integer": lambda x: x + jnp.sum(jnp.ones_like(x, dtype=jnp.int32)) / 16,
  "layer_norm": lambda x: jax.nn.standardize(x, epsilon=0.1),
  "log1p": lambda x: jnp.log1p(jnp.square(x)),
  "logistic": jax.nn.sigmoid,
  "logsumexp": lambda x: x - jax.nn.logsumexp(x, axis=1, keepdims=True) / 2,
  "masked_softmax": lambda x: jax.nn.softmax(jnp.where(MASK, x, -1e9)),
  "mean": lambda x: x - x.mean(0),
  "pad": lambda x: jnp.pad(x, 1)[:-2, 1:-1],
  "reduce_precision": lambda x: lax.reduce_precision(x, 8, 10),
  "rsqrt": lambda x: x * lax.rsqrt(1 + jnp.square(x)),
  "scale": lambda x: 0.7 * x,
  "scatter": lambda x: x.at[np.array([1, 1, 2])].add(x[:3] / 2),
  "softmax": jax.nn.softmax,
  "softplus": jax.nn.softplus,
  "transpose": jnp.transpose,
  "rows": jax.vmap(lambda row: jnp.tanh(row) @ MASK.astype(np.float32) / 2),
}  # fmt: skip
# Their gradients jump: a rounding moves a gradient from one value to another.
KINKED: dict[str, Callable[[jax.Array], jax.Array]] = {
  "abs": jnp.abs,
  "clip": lambda x: jnp.clip(x, -1, 1),
  "max": lambda x: x - x.max(1, keepdims=True),
  "relu": jax.nn.relu,
  "sort": lambda x: jnp.sort(x, axis=1),
  "top_k": lambda x: x - lax.top_k(x, 2)[0][:, 1:],
}  # fmt: skip
BINARY: dict[str, Body] = {
  "add": lambda x, y: x + y,
  "attention": lambda x, y: jax.nn.softmax(x @ y.T / 2) @ y,
  "concatenate": lambda x, y: jnp.concatenate([x[:2], y[:2]]),
  "conv": lambda x, y: lax.conv(x[None, None], jnp.tanh(y[None, None, :3, :3]) / 3, (1, 1), "SAME")[0, 0],
  "div": lambda x, y: x / (1 + jnp.square(y)),
  "einsum": lambda x, y: jnp.einsum("ij,kj->ki", x, jnp.tanh(y)) / 2,
  "matmul": lambda x, y: x @ jnp.tanh(y) / 2,
  "mul": lambda x, y: x * jnp.tanh(y),
  "preferred": lambda x, y: lax.dot(x, jnp.tanh(y), preferred_element_type=jnp.float32) / 2,
  "sub": lambda x, y: x - y,
  "update": lambda x, y: lax.dynamic_update_slice(x, y[:2, :2], (1, 1)),
  "where": lambda x, y: jnp.where(MASK, x, y),
}  # fmt: skip


def scanned(body: Body, x: Any, y: Any) -> Any:
  carry, rows = lax.scan(lambda c, row: (jnp.tanh(body(c, y)), c[0] + row), x, y)
  return carry + rows


def custom(body: Body, x: Any, y: Any) -> Any:
  fun = jax.custom_vjp(body)
  fun.defvjp(lambda x, y: jax.vjp(body, x, y), lambda pull, g: pull(g))
  return fun(x, y)


NESTED: dict[str, Callable[[Body, jax.Array, jax.Array], jax.Array]] = {
  "associative_scan": lambda f, x, y: lax.associative_scan(lambda a, b: jnp.tanh(a + b), f(x, y)),
  "checkpoint": lambda f, x, y: jax.checkpoint(f)(x, y),
  "cond": lambda f, x, y: lax.cond(jnp.int32(x.shape[0]) > 3, f, lambda x, y: x, x, y),
  "cond on data": lambda f, x, y: lax.cond(jnp.sum(jnp.square(x)) > -1, f, lambda x, y: y, x, y),
  "custom_vjp": custom,
  "fori_loop": lambda f, x, y: lax.fori_loop(0, 2, lambda i, c: jnp.tanh(f(c, y)), x),
  "grad": lambda f, x, y: jnp.tanh(jax.grad(lambda x: jnp.sum(f(x, y)))(x)),
  "jit": lambda f, x, y: jax.jit(f)(x, y),
  "map": lambda f, x, y: lax.map(lambda z: f(z, y), jnp.stack([x, y])).mean(0),
  "scan": scanned,
  "switch": lambda f, x, y: lax.switch(jnp.int32(1), [lambda x, y: x, f, lambda x, y: y], x, y),
  "vmap": lambda f, x, y: jax.vmap(f, in_axes=(0, None))(jnp.stack([x, y]), y).sum(0) / 2,
  "while_loop": lambda f, x, y: lax.while_loop(lambda c: c[0] < 2, lambda c: (c[0] + 1, jnp.tanh(f(c[1], y))),
    (0, x))[1],
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Step:
  """An operation on two earlier values, counted from the last; with a program of its own, if nested."""

  name: str
  at: tuple[int, int]
  body: tuple[Step, ...] = ()


def steps(depth: int) -> st.SearchStrategy[tuple[Step, ...]]:
  at = st.tuples(st.integers(0, 5), st.integers(0, 5))
  flat = st.builds(Step, st.sampled_from([*UNARY, *BINARY, *BINARY, *KINKED]), at)
  if not depth:
    return st.lists(flat, min_size=1, max_size=3).map(tuple)
  nested = st.builds(Step, st.sampled_from([*NESTED]), at, steps(depth - 1))
  return st.lists(flat | nested, min_size=2, max_size=6).map(tuple)


def evaluate(program: Sequence[Step], *values: jax.Array) -> jax.Array:
  made = list(values)
  for step in program:
    x, y = (made[-1 - at % len(made)] for at in step.at)
    if step.name in NESTED:
      made.append(NESTED[step.name](functools.partial(evaluate, step.body), x, y))
    elif step.name in BINARY:
      made.append(BINARY[step.name](x, y))
    else:
      made.append((UNARY | KINKED)[step.name](x))
  return made[-1]


def parts(program: Sequence[Step]) -> Iterator[Step]:
  for step in program:
    yield step
    yield from parts(step.body)


def names(program: Sequence[Step]) -> set[str]:
  return {step.name for step in parts(program)}


def grads_of(program: Sequence[Step], operations: set[str]) -> bool:
  """Whether the program takes a gradient through any of the operations."""
  return any(step.name == "grad" and names(step.body) & operations for step in parts(program))


def check_random(program, policy):
  args = (normal(*SHAPE), normal(*SHAPE, seed=1), normal(*SHAPE, seed=2))
  kinked = set(KINKED)
  case = Case(
    lambda cast: cast(lambda *args: evaluate(program, *args)),
    args,
    grad="while_loop" not in names(program),
    slack=np.inf if grads_of(program, kinked) else 4,
    grad_slack=np.inf if names(program) & kinked else 8,
  )
  check({"random": case}, (policy,))


OPTIONS = {
  "deadline": None,
  "derandomize": True,
  "phases": [Phase.generate],  # a smaller program takes many compilations to find
  "suppress_health_check": list(HealthCheck),
}
PROGRAMS = steps(2).filter(lambda program: not grads_of(program, {"while_loop"}))


@settings(max_examples=5, **OPTIONS)
@given(program=PROGRAMS, policy=st.sampled_from(["bf16", "fp16"]))
def test_a_few_random_programs(program, policy):
  check_random(program, policy)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["bf16", "fp16"])
@settings(max_examples=20, **OPTIONS)
@given(program=PROGRAMS)
def test_random_program(policy, program):
  check_random(program, policy)
