"""Programs under delayed scaling whose amaxes are known by hand.

Weights are permutations times powers of two and inputs small integers, so that FP8 with scales that are powers of
two is exact.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

import mpjax
from tests.casting._jaxprs import jit
from tests.fp8._programs import D, fp8

ROWS, LENGTH = 64, 4
NAMES = ("lhs", "rhs", "gradient")


def delayed(**options):
  return fp8(**{"recipe": "delayed", "amax_history_len": LENGTH, **options})


def exact_weight(seed, factor=1.0):
  rng = np.random.default_rng(seed)
  return (np.eye(D)[rng.permutation(D)] * rng.choice([-1, 1], D) * factor).astype(np.float32)


def exact_batch(seed, largest=3, rows=ROWS):
  """Inputs and cotangents; the largest of each is in one row only."""
  rng = np.random.default_rng(seed)
  x, c = (rng.integers(-1, 2, (rows, D)).astype(np.float32) for _ in range(2))
  x[rng.integers(rows), rng.integers(D)] = largest
  c[rng.integers(rows), rng.integers(D)] = -largest
  return x, c


W = [exact_weight(i, factor) for i, factor in enumerate([1, 2, 0.5, 4, 1])]
X, C = exact_batch(0)


def act(x):
  return jnp.where(x > 0, x, 0.5 * x)


def net(w, x):
  for layer in w[:-1]:
    x = act(x @ layer)
  return x @ w[-1]


def loss(w, x, c):
  """Its gradient with respect to the network's outputs is c."""
  return jnp.sum(net(w, x) * c)


def amaxes(w, x, c):
  """By hand: of each layer's input, weight and the gradient of its output, [layers, 3]."""
  inputs, slopes = [np.asarray(x, np.float64)], []
  for layer in w[:-1]:
    out = inputs[-1] @ layer
    slopes.append(np.where(out > 0, 1, 0.5))
    inputs.append(out * slopes[-1])
  gradients = [np.asarray(c, np.float64)]
  for layer, slope in zip(w[:0:-1], slopes[::-1], strict=True):
    gradients.append((gradients[-1] @ layer.T) * slope)
  rows = zip(inputs, w, gradients[::-1], strict=True)
  return np.array([[np.abs(a).max() for a in row] for row in rows])


def next_state(fun, state, *args, policy=None, **options):
  """The state after this one."""
  of = lambda state: mpjax.autocast(fun, policy or delayed(), fp8_state=state, **options)(*args)
  return jax.grad(of)(state)


@functools.cache
def _compiled(fun, policy, **options):
  return jit(lambda state, args: next_state(fun, state, *args, policy=policy, **options))


def following(fun, state, *args, policy=None, **options):
  """The same, compiled once for a function, a policy and the shapes."""
  return _compiled(fun, mpjax.get_policy(policy or delayed()), **options)(state, args)


def first_state(fun, *args, policy=None):
  return mpjax.init_fp8_state(fun, policy or delayed())(*args)


def newest(state):
  """The amaxes of the last step, by site: lhs, rhs, gradient."""
  return {site: [float(of[name][0]) for name in NAMES] for site, of in state["amax"].items()}


def same(a, b):
  jax.tree.map(np.testing.assert_array_equal, a, b)


def mesh_of(*shape):
  return jax.make_mesh(shape, ("d", "m")[: len(shape)], axis_types=(jax.sharding.AxisType.Auto,) * len(shape))


def by_site(table):
  """Amaxes of layers [layers, 3] as `newest` gives them: sites are numbered without the first and the last layer."""
  return {f":{i}": list(row) for i, row in enumerate(table[1:-1])}


INNER = by_site(amaxes(W, X, C))
