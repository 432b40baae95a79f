"""`scaled_region`: a loss scale for one group of parameters, inside the backward pass."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from mpjax._types import Array, ArrayLike, PyTree
from mpjax.dtypes import at_least_float32
from mpjax.jaxpr import closure_as_argument
from mpjax.loss_scale._finite import is_inexact
from mpjax.loss_scale._layerwise_vjp import divide


def scaled_region(fun: Callable[..., Any], scale: jax.Array) -> Callable[..., Any]:
  """Returns `fun` with a loss scale of its own for the gradients inside it.

  For a scale per parameter group: one loss, and `optax.partition` with a loss scale in each group. The
  gradient of the output is multiplied by `scale`, the gradient of `inputs` is divided by it, and the gradient
  of `params` stays scaled, for the group's own transform to unscale and judge:

  ```python
  tx = optax.partition(
    {"body": mpjax.dynamic_loss_scale(optax.adam(1e-3)), "head": mpjax.dynamic_loss_scale(optax.adam(1e-2))},
    {"body": "body", "head": "head"},
  )

  def loss_fn(params, opt_state, x, y):
    of = lambda group: mpjax.get_loss_scale(opt_state, path=group).scale
    h = mpjax.loss_scale.scaled_region(body, of("body"))(params["body"], x)
    return jnp.mean((mpjax.loss_scale.scaled_region(head, of("head"))(params["head"], h) - y) ** 2)
  ```

  Args:
    fun: `(params, *inputs)` to a tree; it casts to half precision inside. The gradient of arrays that it
      closes over is unscaled, like that of `inputs`; in half precision it becomes NaN where it would
      underflow.
    scale: f32[]; such as `mpjax.get_loss_scale(opt_state, path=...).scale`.

  Returns:
    A function like `fun`, whose floating outputs are in float32 or wider.

  Raises:
    ValueError: when called with an input narrower than float32, in which the quotient could underflow.
  """

  @functools.wraps(fun)
  def region(params: PyTree, *inputs: PyTree) -> PyTree:
    for path, leaf in jax.tree_util.tree_flatten_with_path(inputs)[0]:
      if is_inexact(leaf) and jnp.finfo(jnp.result_type(leaf)).bits < 32:
        raise ValueError(
          f"input {jax.tree_util.keystr(path)} of a scaled region is {jnp.result_type(leaf)}: its gradient "
          "would be unscaled in that dtype and underflow; pass it in float32 and cast it inside"
        )

    def wide(params: PyTree, inputs: PyTree) -> PyTree:
      return jax.tree.map(_widen, fun(params, *inputs))

    run, closure, _ = closure_as_argument(wide, params, inputs)
    return _call(run, params, (closure, inputs), jnp.asarray(scale, jnp.float32))

  return region


def _call(run: Callable[..., Any], params: PyTree, inputs: tuple[PyTree, PyTree], scale: jax.Array) -> PyTree:
  @jax.custom_vjp
  def call(params: PyTree, inputs: PyTree, scale: jax.Array) -> PyTree:
    return apply(params, inputs)

  def apply(params: PyTree, inputs: PyTree) -> PyTree:
    closure, rest = inputs
    return run(closure, params, rest)

  def forward(
    params: PyTree, inputs: PyTree, scale: jax.Array
  ) -> tuple[PyTree, tuple[Callable[..., Any], Array]]:
    out, backward = jax.vjp(apply, params, inputs)
    return out, (backward, scale)

  def backward(residuals: tuple[Callable[..., Any], Array], g: PyTree) -> tuple[PyTree, PyTree, Array]:
    vjp, scale = residuals
    of_params, of_inputs = vjp(jax.tree.map(lambda x: x * scale if is_inexact(x) else x, g))
    return of_params, divide(of_inputs, scale), jnp.zeros_like(scale)

  call.defvjp(forward, backward)
  return call(params, inputs, scale)


def _widen(x: ArrayLike) -> ArrayLike:
  if not is_inexact(x):
    return x
  x = jnp.asarray(x)
  return x.astype(at_least_float32(x.dtype))
