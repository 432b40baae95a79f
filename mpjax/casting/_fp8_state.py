"""The state of delayed FP8 scaling for a function, and which of its arguments are weights of FP8 products."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from mpjax._types import Fp8State, PolicyLike
from mpjax.casting._casting_rules import make_rules
from mpjax.casting._op_lists import OpLists
from mpjax.casting._product_roles import input_root
from mpjax.casting._trace import Traced
from mpjax.fp8._delayed import empty_state
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
  state = mpjax.init_fp8_state(loss_fn, policy)(params, batch)
  loss = lambda params, state, batch: mpjax.autocast(loss_fn, policy, fp8_state=state)(params, batch)
  grads, state = jax.grad(loss, argnums=(0, 1))(params, state, batch)  # what comes back is the next state
  ```

  One tree, whatever the model is written in; checkpoint, shard (it is small: replicate) and donate it as any
  other. Each differentiated call takes the state once: where a loss calls a model twice, put the autocast
  around the loss. On a step whose gradients are not finite, keep the old state; in a tree of parameters under
  `_overwrite_with_gradient`, mpjax's loss scaling does that.

  Args:
    fun: the function.
    policy: with `recipe: delayed` in its `fp8` mapping.
    ops: as for `autocast`.
    overrides: as for `autocast`.

  Returns:
    A function of `fun`'s arguments (arrays or `jax.ShapeDtypeStruct`) that returns the state. It has for each
    FP8 product, by module path, float32[amax_history_len] for `lhs`, `rhs` and `gradient`. Nothing is
    computed. Without products under delayed scaling it has no histories.

  Raises:
    ValueError: for a policy that is not understood, or a pattern in it that matches no module path.
  """

  def init(*args: Any, **kwargs: Any) -> Fp8State:
    resolved = get_policy(policy)
    rules = make_rules(resolved, ops, overrides)
    if rules.overrides.nothing_to_do:
      return empty_state({})
    with matmul_precision(resolved):
      plan = Traced(fun, args, kwargs, rules.overrides).plan(rules, resolved)
    rules.check_all_matched(plan.fp8_paths())
    return empty_state({site: recipe.amax_history_len for site, recipe in sorted(plan.fp8_sites().items())})

  return init


def fp8_weights(fun: Callable[..., Any], policy: PolicyLike) -> Callable[..., set[str]]:
  """Finds which arrays among the arguments of a function are the weights of FP8 products under autocast.

  Args:
    fun: the function.
    policy: with an `fp8` mapping.

  Returns:
    A function of `fun`'s arguments (arrays or `jax.ShapeDtypeStruct`) that returns tree paths, the number or
    name of the argument first, as in `0/params/Dense_0/kernel`; of modules, first their number among those.
  """

  def weights(*args: Any, **kwargs: Any) -> set[str]:
    resolved = get_policy(policy)
    rules = make_rules(resolved, None, None)
    traced = Traced(fun, args, kwargs, rules.overrides)
    plan = traced.plan(rules, resolved)
    rules.check_all_matched(plan.fp8_paths())
    found = {root for node in plan.all_nodes() if node.fp8 for root in node.fp8.roots}
    return {name for i, name in enumerate(traced.names) if input_root(i) in found}

  return weights
