"""Programs in plain float32, each run as it is, under autocast, and with ideal half-precision products.

A program calls what a careful author runs in half precision through its argument `half`: the products of
layers and of attention. Everything else in it is plain JAX. The ideal run rounds the operands of those
products, forward and backward, and nothing else: their results are float32. Its distance from float32 is the
price of half-precision products. Autocast is given the program without a word about precision. It may pay
the price `FACTOR` times, since it rounds results, too, and what element-wise operations make of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

import mpjax
from tests.casting._jaxprs import trace_together

HALF = {"bf16": jnp.bfloat16, "fp16": jnp.float16}
# float16 needs a loss scale, bfloat16 none.
SCALE = {"bf16": 1.0, "fp16": 2.0**12}
FACTOR = 3.0
# A fiftieth of float16's unit roundoff: what another order of float32 sums gives, of the norm of a value.
FLOOR = 1e-5
SEEDS = tuple(range(7))
ORDERS = ("grad of autocast", "autocast of grad")
RUNS = (("bf16", ORDERS[0]), ("fp16", ORDERS[1]))


class Out(NamedTuple):
  """What a program returns.

  Attributes:
    loss: float32[], of which the gradients are taken.
    value: tree of float32 arrays.
    discrete: tree of integers that no half-precision product has a part in.
  """

  loss: jax.Array
  value: Any
  discrete: Any = ()


@dataclasses.dataclass(frozen=True)
class Program:
  """A program of the corpus.

  Attributes:
    run: (half, params, inputs) -> Out.
    about: its field, and what it is.
    params: by name, the shape of a matrix of this fan-in, or rng -> tree of arrays.
    inputs: rng -> tree of arrays.
    needs: a package that it imports, and that may not be there.
    factor: of the ideal error, in place of `FACTOR`; a reason stands next to it.
  """

  run: Callable[[Products, Any, Any], Out]
  about: str
  params: Mapping[str, Any]
  inputs: Callable[[np.random.Generator], Any]
  needs: str | None = None
  factor: float = FACTOR


PROGRAMS: dict[str, Program] = {}


def program(about: str, params: Mapping[str, Any], inputs: Callable[..., Any], **options: Any) -> Any:
  """Adds the decorated function to the corpus, under its own name."""

  def add(run: Callable[..., Out]) -> Callable[..., Out]:
    assert run.__name__ not in PROGRAMS
    PROGRAMS[run.__name__] = Program(run, about, params, inputs, **options)
    return run

  return add


class Products:
  """The products that are to run in half precision: `Products()` leaves them as they are.

  Args:
    dtype: what the operands are rounded to, forward and backward.
  """

  def __init__(self, dtype: Any = None):
    self._dtype = dtype

  def __call__(self, fun: Callable[..., jax.Array], a: jax.Array, b: jax.Array) -> jax.Array:
    """Returns `fun(a, b)`, which is linear in either."""
    if self._dtype is None:
      return fun(a, b)
    round_operand = lambda x: operand_p.bind(jnp.asarray(x, jnp.float32), dtype=self._dtype)
    return cotangent_p.bind(fun(round_operand(a), round_operand(b)), dtype=self._dtype)

  def dot(self, a: jax.Array, b: jax.Array) -> jax.Array:
    return self(jnp.matmul, a, b)

  def einsum(self, spec: str, a: jax.Array, b: jax.Array) -> jax.Array:
    return self(lambda a, b: jnp.einsum(spec, a, b), a, b)

  def conv(self, x: jax.Array, kernel: jax.Array, strides: int = 1) -> jax.Array:
    """A convolution of images, channels last."""
    conv = lambda x, kernel: jax.lax.conv_general_dilated(
      x, kernel, (strides, strides), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    return self(conv, x, kernel)

  def dot_general(self, a: jax.Array, b: jax.Array, *args: Any, **options: Any) -> jax.Array:
    """What layers of linen and nnx take."""
    return self(lambda a, b: jax.lax.dot_general(a, b, *args, **options), a, b)


def mlp(half: Products, params: Any, x: jax.Array) -> jax.Array:
  return half.dot(jax.nn.gelu(half.dot(x, params["in"])), params["out"])


# Two linear functions, each the transpose of the other, so that derivatives of any order are products of the
# same kind: the first rounds, the second rounds what flows back through it.
operand_p = Primitive("ideal_operand")
cotangent_p = Primitive("ideal_cotangent")


def _rounded(x: jax.Array, *, dtype: Any) -> jax.Array:
  kind = jnp.finfo(dtype)
  return jax.lax.reduce_precision(x, kind.nexp, kind.nmant)


def _define(primitive: Primitive, fun: Callable[..., jax.Array], transpose: Primitive) -> None:
  primitive.def_impl(jax.jit(fun, static_argnames="dtype"))
  primitive.def_abstract_eval(lambda x, *, dtype: x)
  ad.deflinear2(primitive, lambda ct, _, *, dtype: [transpose.bind(ct, dtype=dtype)])
  batching.defvectorized(primitive)
  mlir.register_lowering(primitive, mlir.lower_fun(fun, multiple_results=False))


_define(operand_p, _rounded, cotangent_p)
_define(cotangent_p, lambda x, *, dtype: x, operand_p)


def arguments(one: Program, seed: int) -> tuple[Any, Any]:
  """Parameters and inputs of a program."""
  rng = np.random.default_rng(seed)
  params = {name: _drawn(rng, spec) for name, spec in one.params.items()}
  as_arrays = lambda tree: jax.tree.map(
    lambda x: np.asarray(x, np.float32 if np.asarray(x).dtype == np.float64 else None), tree
  )
  return as_arrays(params), as_arrays(one.inputs(rng))


def _drawn(rng: np.random.Generator, spec: Any) -> Any:
  if callable(spec):
    return spec(rng)
  fan_in = np.prod(spec[:-1]) if len(spec) == 4 else spec[-2] if len(spec) > 1 else 25  # biases are small
  return rng.standard_normal(spec) * fan_in**-0.5


class Result(NamedTuple):
  """The outputs of one run, and its gradients."""

  out: Out
  grads: Any


def runs(one: Program) -> dict[str, Callable[[Any, Any], Result]]:
  """By name, what is compared: `float32`, `ideal bf16`, `autocast bf16 grad of autocast` and their like."""
  plain = lambda params, inputs: one.run(Products(), params, inputs)
  found = {"float32": _gradient(plain, 1.0)}
  for policy, dtype in HALF.items():
    ideal = lambda params, inputs, dtype=dtype: one.run(Products(dtype), params, inputs)
    found[f"ideal {policy}"] = _gradient(ideal, SCALE[policy])
  for policy, order in RUNS:
    if order == ORDERS[0]:
      fun = _gradient(mpjax.autocast(plain, policy), SCALE[policy])
    else:
      fun = mpjax.autocast(_gradient(plain, SCALE[policy]), policy)
    found[f"autocast {policy} {order}"] = fun
  return found


def _gradient(fun: Callable[..., Out], scale: float) -> Callable[[Any, Any], Result]:
  def both(params: Any, inputs: Any) -> Result:
    def scaled(params: Any) -> tuple[jax.Array, Out]:
      out = fun(params, inputs)
      return out.loss * scale, out

    grads, out = jax.grad(scaled, has_aux=True)(params)
    return Result(out, jax.tree.map(lambda g: g / scale, grads))

  return both


class Comparison(NamedTuple):
  """One run under autocast beside the ideal one: median errors over the seeds, relative to float32's norm.

  Attributes:
    name: policy and order.
    errors: by what is compared (`value` with the path of the array, `gradient`), the error under autocast and
      the ideal one.
    changed: paths of discrete outputs that are not float32's.
    nonfinite: paths of what is not finite.
  """

  name: str
  errors: dict[str, tuple[float, float]]
  changed: list[str]
  nonfinite: list[str]

  def failures(self, factor: float) -> Iterator[str]:
    for path in self.nonfinite:
      yield f"{self.name}: {path} is not finite"
    for path in self.changed:
      yield f"{self.name}: {path} is not float32's"
    for what, (error, ideal) in self.errors.items():
      if not error <= max(factor * ideal, FLOOR):
        times = error / max(ideal, FLOOR)
        yield f"{self.name}: {what} is off by {error:.2g}, {times:.1f} times the ideal {ideal:.2g}"


def compare(one: Program, seeds: tuple[int, ...] = SEEDS) -> list[Comparison]:
  """Compiles one program of all runs, and compares them for each seed."""
  args = [arguments(one, seed) for seed in seeds]
  functions = runs(one)
  compiled = trace_together(functions, *args[0])[0].lower().compile()
  results = [jax.device_get(compiled(*each)) for each in args]
  names = [name for name in functions if name.startswith("autocast")]
  return [_compared(name, results) for name in names]


def _compared(name: str, results: list[dict[str, Result]]) -> Comparison:
  _, policy, _ = name.split(" ", 2)
  errors: dict[str, list[tuple[float, float]]] = {}
  changed, nonfinite = {}, {}
  for result in results:
    ours, ideal, plain = (result[key] for key in (name, f"ideal {policy}", "float32"))
    values = [_values(run) for run in (ours, ideal, plain)]
    for what, reference in values[2].items():
      got, best = values[0][what], values[1][what]
      for kind, array in (("", got), ("ideal ", best), ("float32 ", reference)):
        if not np.isfinite(array).all():
          nonfinite[kind + what] = None
      errors.setdefault(what, []).append((_error(got, reference), _error(best, reference)))
    for path, (a, b, c) in _paths(ours.out.discrete, ideal.out.discrete, plain.out.discrete):
      assert not jnp.issubdtype(c.dtype, jnp.inexact), f"discrete{path} is {c.dtype}"
      changed |= {f"discrete{path}": None} if not np.array_equal(a, c) else {}
      changed |= {f"ideal discrete{path}": None} if not np.array_equal(b, c) else {}
  median = {what: tuple(np.median(found, 0).tolist()) for what, found in errors.items()}
  return Comparison(name.removeprefix("autocast "), median, list(changed), list(nonfinite))


def _values(run: Result) -> dict[str, np.ndarray]:
  """The arrays that are compared: each of the value, and all gradients as one."""
  found = {f"value{path}": x.ravel() for path, (x,) in _paths(run.out.value)}
  found["gradient"] = np.concatenate([np.ravel(g) for g in jax.tree.leaves(run.grads)])
  return found


def _paths(*trees: Any) -> Iterator[tuple[str, tuple[np.ndarray, ...]]]:
  flat = [jax.tree_util.tree_leaves_with_path(tree) for tree in trees]
  for leaves in zip(*flat, strict=True):
    yield jax.tree_util.keystr(leaves[0][0]), tuple(np.asarray(x) for _, x in leaves)


def _error(got: np.ndarray, want: np.ndarray) -> float:
  """The distance, relative to the norm of what is wanted."""
  got, want = got.astype(np.float64), want.astype(np.float64)
  return float(np.linalg.norm(got - want) / max(np.linalg.norm(want), 1e-30))
