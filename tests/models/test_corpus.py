"""Models of several packages under autocast: values and gradients, products, memory, and training in float16."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
import pytest

import mpjax
from mpjax.casting._reasons import EXACT
from tests.casting._jaxprs import is_matrix_product, jit, multiplied, walk
from tests.models import _equinox, _flax, _haiku, _transformers
from tests.models._model import distance

MODELS = {**_transformers.MODELS, **_haiku.MODELS, **_equinox.MODELS, **_flax.MODELS}
# Those of the suite: one of each package that compiles fast. All others are for `--all`.
QUICK = ("transformers FlaxGPT2", "Haiku LSTM", "Equinox nn.MLP", "Flax CNN", "Flax nnx decoder")
# How far the gradient of all parameters may be from that of the float32 program, as a share of it.
TOLERANCE = {"bf16": 0.03, "fp16": 0.004}
# Where rectified images of a convolution are averaged, rounding decides which of many small values count: their
# gradients may be twice as far as rounding parameters and batch moves those of the float32 program.
RECTIFIED = {"Haiku nets.ResNet", "Flax CNN"}
STEPS = 20


class Run(NamedTuple):
  """A training run: a step's jaxpr, how often it was traced, and what the steps gave that were not skipped.

  `first` is loss and gradient of the first of them; until then the parameters stay as they were.
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
    self.keys = [*jax.random.split(jax.random.key(0), STEPS)]
    self.args = (self.params, self.batch, self.keys[0])
    self.gradient = functools.cache(self._gradient)
    self.compiled = functools.cache(lambda policy: self.gradient(policy).lower().compile())

  def under(self, policy: str) -> Callable[..., jax.Array]:
    """Returns the loss under autocast; `plain` is the loss as it is."""
    return self.loss if policy == "plain" else mpjax.autocast(self.loss, policy)

  def _gradient(self, policy: str, order: str = "of autocast") -> jax.stages.Traced:
    """Returns the traced gradient; under autocast JAX itself refuses a reduction in half precision."""
    fun = jax.value_and_grad(self.under(policy if order == "of autocast" else "plain"))
    with jax_allow_f16_reductions(policy == "plain"):
      return jit(fun if order == "of autocast" else mpjax.autocast(fun, policy)).trace(*self.args)

  def rounded(self, policy: str) -> Any:
    """Returns the gradient of the float32 program from parameters and a batch that half precision holds."""
    half = mpjax.get_policy(policy).compute_dtype
    rounded = lambda x: np.asarray(x).astype(half).astype(np.float32) if x.dtype == np.float32 else x
    return self.compiled("plain")(*jax.tree.map(rounded, self.args[:2]), self.keys[0])[1]

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
    params, opt_state = self.params, jax.jit(tx.init)(self.params)
    jaxpr = step.trace(params, opt_state, *self.args[1:]).jaxpr
    losses, first = [], None
    for _ in range(STEPS):
      scale = mpjax.get_loss_scale(opt_state).scale
      params, opt_state, value, grads = step(params, opt_state, self.batch, self.keys[len(losses)])
      if mpjax.get_loss_scale(opt_state).grads_finite:
        losses.append(float(value))
        first = first or (value, jax.tree.map(lambda g, scale=scale: np.divide(g, scale), grads))
    return Run(jaxpr, len(traces), losses, first, params)


@contextlib.contextmanager
def jax_allow_f16_reductions(allowed: bool) -> Iterator[None]:
  before = jax.config.jax_allow_f16_reductions
  jax.config.update("jax_allow_f16_reductions", allowed)
  try:
    yield
  finally:
    jax.config.update("jax_allow_f16_reductions", before)


def kept(fun: Callable[..., Any], *args: Any) -> int:
  """Returns the bytes that `jax.vjp` keeps for the backward pass beside the arguments."""
  forward = lambda params, *rest: jax.vjp(lambda params: fun(params, *rest), params)[1]
  jaxpr = jax.make_jaxpr(forward)(*args).jaxpr
  kept = {v for v in jaxpr.outvars if not hasattr(v, "val")} - {*jaxpr.invars, *jaxpr.constvars}
  return sum(v.aval.size * v.aval.dtype.itemsize for v in kept)


def assert_products_are_half(programs, jaxpr, half):
  """Each is half precision, and none is computed twice."""
  products = lambda jaxpr: [multiplied(e) for e in walk(jaxpr) if is_matrix_product(e)]
  count = len(products(programs.gradient("plain").jaxpr))
  assert products(jaxpr) == [f"{half} {half}"] * count


def assert_near_float32(programs, policy, value, grads):
  plain_value, plain = programs.compiled("plain")(*programs.args)
  assert value.dtype == np.float32
  assert jax.tree.structure(grads) == jax.tree.structure(plain)
  assert {g.dtype for g in jax.tree.leaves(grads)} == {np.dtype(np.float32)}
  tolerance = TOLERANCE[policy]
  assert distance(value, plain_value) <= tolerance / 4
  if programs.name in RECTIFIED:
    tolerance = max(tolerance, 2 * distance(programs.rounded(policy), plain))
  assert distance(grads, plain) <= tolerance


@pytest.fixture(
  scope="module", params=[pytest.param(m, marks=() if m in QUICK else pytest.mark.slow) for m in MODELS]
)
def programs(request):
  return Programs(request.param)


def test_products_are_half_precision_and_explain_says_so_and_the_backward_pass_keeps_no_more(programs):
  assert_products_are_half(programs, programs.gradient("bf16").jaxpr, "bf16")
  assert_products_are_half(programs, programs.gradient("fp16", "under autocast").jaxpr, "f16")
  explained = mpjax.explain(jax.value_and_grad(programs.loss), *programs.args, policy="bf16")
  layers = [row for row in explained.rows if row.flops and row.list == "allow" and row.code not in EXACT]
  assert {row.after for row in layers} == {"bfloat16"}
  bytes_of = {policy: kept(programs.under(policy), *programs.args) for policy in ("plain", *TOLERANCE)}
  assert max(bytes_of.values()) == bytes_of["plain"], bytes_of


def test_the_loss_and_its_gradient_are_those_of_float32(programs):
  assert_near_float32(programs, "bf16", *programs.compiled("bf16")(*programs.args))


@pytest.mark.slow
def test_it_trains_in_float16_and_is_traced_once(programs):
  run = programs.run
  assert_products_are_half(programs, run.jaxpr, "f16")
  assert_near_float32(programs, "fp16", *run.first)
  assert run.traces == 1
  assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(run.params))
  assert len(run.losses) > STEPS / 2
  assert np.mean(run.losses[-3:]) < 0.95 * run.losses[0]


@pytest.mark.parametrize("policy", TOLERANCE)
def test_a_backward_pass_keeps_no_more_than_that_of_casts_by_hand(policy):
  model, by_hand = _flax.gpt(), _flax.gpt(mpjax.get_policy(policy).compute_dtype)
  args = (model.params, model.batch, jax.random.key(0))
  assert kept(mpjax.autocast(model.loss, policy), *args) <= kept(by_hand.loss, *args)
