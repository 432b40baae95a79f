"""The corpus under autocast: values and gradients, products, memory, and training in float16."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax
import pytest

import mpjax
from tests.casting._jaxprs import is_matrix_product, jit, multiplied, walk
from tests.models._model import distance
from tests.models._table import MODELS, RECTIFIED, TOLERANCE

STEPS = 20
KEYS = list(jax.random.split(jax.random.key(0), STEPS))
HALVES = {"bf16": "bf16", "fp16": "f16"}


@dataclasses.dataclass(frozen=True)
class Run:
  """A training run.

  Attributes:
    jaxpr: of a step.
    traces: how often the step was traced.
    losses: of the steps that were not skipped.
    first: loss and gradient of the first of them; until then the parameters stay as they were.
    params: at the end.
  """

  jaxpr: Any
  traces: int
  losses: list[float]
  first: tuple[Any, Any]
  params: Any


class Programs:
  """A model with what its tests share: each program is traced and compiled for the first test that needs it."""

  def __init__(self, name: str):
    self.name, model = name, MODELS[name]()
    self.loss, self.params, self.batch = model.loss, model.params, model.batch
    self.args = (self.params, self.batch, KEYS[0])
    self.gradient = functools.cache(self._gradient)
    self.compiled = functools.cache(lambda policy: self.gradient(policy).lower().compile())

  def under(self, policy: str) -> Callable[..., jax.Array]:
    """Returns the loss under autocast; `plain` is the loss as it is."""
    return self.loss if policy == "plain" else mpjax.autocast(self.loss, policy)

  def _gradient(self, policy: str) -> jax.stages.Traced:
    return jit(jax.value_and_grad(self.under(policy))).trace(*self.args)

  def first(self, policy: str) -> tuple[Any, Any]:
    """Returns loss and gradient of the initial parameters; of float16 those of a training run."""
    if policy == "fp16":
      return self.run.first
    return self.compiled(policy)(*self.args)

  def rounded(self, policy: str) -> Any:
    """Returns the gradient of the float32 program from parameters and a batch that half precision holds."""
    half = mpjax.get_policy(policy).compute_dtype
    rounded = lambda x: np.asarray(x).astype(half).astype(np.float32) if x.dtype == np.float32 else x
    args = jax.tree.map(rounded, (self.params, self.batch))
    return self.compiled("plain")(*args, KEYS[0])[1]

  def products(self, policy: str) -> list[str]:
    """Returns the dtypes that each matrix product of the gradient multiplies: `bf16 bf16`."""
    jaxpr = self.run.jaxpr if policy == "fp16" else self.gradient(policy).jaxpr
    return [multiplied(e) for e in walk(jaxpr) if is_matrix_product(e)]

  def kept(self, policy: str) -> int:
    """Returns the bytes that `jax.vjp` keeps for the backward pass beside the arguments."""
    fun = self.under(policy)

    def forward(params: Any, batch: Any, key: jax.Array) -> Any:
      return jax.vjp(lambda params: fun(params, batch, key), params)[1]

    jaxpr = jax.make_jaxpr(forward)(*self.args).jaxpr
    kept = {v for v in jaxpr.outvars if not hasattr(v, "val")} - {*jaxpr.invars, *jaxpr.constvars}
    return sum(v.aval.size * v.aval.dtype.itemsize for v in kept)

  @functools.cached_property
  def run(self) -> Run:
    """Steps of Adam in float16 with a dynamic loss scale, a key for each that is not skipped."""
    traces: list[None] = []
    fun, tx = self.under("fp16"), mpjax.dynamic_loss_scale(optax.adam(3e-3))

    def step(params: Any, opt_state: Any, batch: Any, key: jax.Array) -> Any:
      traces.append(None)
      value, grads = mpjax.value_and_grad(fun, opt_state)(params, batch, key)
      updates, opt_state = tx.update(grads, opt_state, params)
      return optax.apply_updates(params, updates), opt_state, value, grads

    step = jit(step)
    params, opt_state = self.params, tx.init(self.params)
    jaxpr = step.trace(*self.args[:1], opt_state, *self.args[1:]).jaxpr
    losses, first = [], None
    for _ in range(STEPS):
      scale = mpjax.get_loss_scale(opt_state).scale
      params, opt_state, value, grads = step(params, opt_state, self.batch, KEYS[len(losses)])
      if mpjax.get_loss_scale(opt_state).grads_finite:
        losses.append(float(value))
        first = first or (value, jax.tree.map(lambda g, scale=scale: np.divide(g, scale), grads))
    return Run(jaxpr, len(traces), losses, first, params)


@pytest.fixture(scope="module", params=MODELS)
def programs(request):
  return Programs(request.param)


@pytest.mark.slow
@pytest.mark.parametrize("policy", TOLERANCE)
def test_the_loss_and_its_gradient_are_those_of_float32(programs, policy):
  value, grads = programs.first(policy)
  plain_value, plain = programs.first("plain")
  assert value.dtype == np.float32
  assert jax.tree.structure(grads) == jax.tree.structure(plain)
  assert {g.dtype for g in jax.tree.leaves(grads)} == {np.dtype(np.float32)}
  tolerance, value_error, error = TOLERANCE[policy], distance(value, plain_value), distance(grads, plain)
  assert value_error <= tolerance / 4
  if programs.name in RECTIFIED:
    tolerance = max(tolerance, 2 * distance(programs.rounded(policy), plain))
  assert error <= tolerance


@pytest.mark.parametrize("policy", ["bf16", pytest.param("fp16", marks=pytest.mark.slow)])
def test_every_product_is_half_precision_and_none_is_computed_twice(programs, policy):
  found = programs.products(policy)
  assert found == [f"{HALVES[policy]} {HALVES[policy]}"] * len(programs.products("plain"))


def test_explain_says_so(programs):
  explained = mpjax.explain(jax.value_and_grad(programs.loss), "bf16")(*programs.args)
  products = [row for row in explained.rows if row.flops and row.list == "allow"]
  assert {row.after for row in products} == {"bfloat16"}


def test_the_backward_pass_keeps_no_more_than_that_of_float32(programs):
  plain = programs.kept("plain")
  ratios = {policy: programs.kept(policy) / plain for policy in TOLERANCE}
  assert max(ratios.values()) <= 1, ratios


@pytest.mark.slow
def test_it_trains_in_float16_and_is_traced_once(programs):
  run = programs.run
  assert run.traces == 1
  assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(run.params))
  assert len(run.losses) > STEPS / 2
  assert np.mean(run.losses[-3:]) < 0.95 * run.losses[0]
