"""The state of delayed FP8 scaling for a function, and the arguments that are weights of FP8 products."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from mpjax._types import Fp8State, PolicyLike
from mpjax.casting._casting_rules import OpLists
from mpjax.casting._sources import input_root
from mpjax.casting._trace import plan_of
from mpjax.fp8 import Recipe, empty_state
from mpjax.policy import get_policy, matmul_precision


def init_fp8_state(
  fun: Callable[..., Any],
  policy: PolicyLike,
  *,
  ops: OpLists | None = None,
  overrides: Mapping[str, Any] | None = None,
) -> Callable[..., Fp8State]:
  """Makes the first state of delayed FP8 scaling, for `mpjax.autocast(fun, policy, fp8_state=...)`.

  ```python
  policy = mpjax.get_policy({"base": "fp8", "fp8": {"recipe": "delayed", "emulate": True}})
  fp8_state = mpjax.init_fp8_state(loss_fn, policy)(params, batch)
  loss = lambda params, state, batch: mpjax.autocast(loss_fn, policy, fp8_state=state)(params, batch)
  grads, fp8_state = jax.grad(loss, argnums=(0, 1))(params, fp8_state, batch)  # the next state
  ```

  The state is one tree for every kind of model; checkpoint, shard (it is small: replicate) and donate it as
  any other. Each differentiated call takes the state once: if a loss calls a model twice, put the autocast
  around the loss. On a step whose gradients are not finite, keep the old state; in a tree of parameters under
  `_overwrite_with_gradient`, mpjax's loss scaling does that.

  Args:
    fun: the function.
    policy: a policy with `recipe: delayed` in its `fp8` mapping.
    ops: see `autocast`.
    overrides: see `autocast`.

  Returns:
    A function of `fun`'s arguments (arrays or `jax.ShapeDtypeStruct`) that returns the state, without
    computing `fun`. For each FP8 product, by module path, it has float32[amax_history_len] for `lhs`, `rhs`
    and `gradient`. Without products under delayed scaling it has no histories.

  Raises:
    ValueError: for an invalid policy, or a pattern in it that matches no module path.
  """

  def init(*args: Any, **kwargs: Any) -> Fp8State:
    resolved = get_policy(policy)
    with matmul_precision(resolved):
      traced = plan_of(fun, args, kwargs, resolved, ops=ops, overrides=overrides)
      sites = traced.plan.fp8_sites()
    traced.rules.overrides.check_all_matched()
    return empty_state(dict.fromkeys(sorted(sites), (resolved.fp8 or Recipe()).amax_history_len))

  return init


def fp8_weights(fun: Callable[..., Any], policy: PolicyLike) -> Callable[..., set[str]]:
  """Finds the array arguments of a function that are weights of FP8 products under autocast.

  Args:
    fun: the function.
    policy: a policy with an `fp8` mapping.

  Returns:
    A function of `fun`'s arguments (arrays or `jax.ShapeDtypeStruct`) that returns tree paths. A path begins
    with the number or name of the argument, as in `0/params/Dense_0/kernel`; for modules, with their number.
  """

  def weights(*args: Any, **kwargs: Any) -> set[str]:
    traced = plan_of(fun, args, kwargs, get_policy(policy))
    nodes = traced.plan.all_nodes()
    traced.rules.overrides.check_all_matched()
    found = {root for node in nodes if node.fp8 for root in node.fp8.roots}
    return {name for i, name in enumerate(traced.names) if input_root(i) in found}

  return weights
