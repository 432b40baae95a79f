"""`autocast`: any JAX function, each operation in the right dtype; `full_precision`, the way out of it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from mpjax import _compat
from mpjax._policy_text import brief
from mpjax._precision_warning import warn_of_bare_dtype
from mpjax.casting import _fp8_products
from mpjax.casting._casting_rules import Rules
from mpjax.casting._decide import Plan
from mpjax.casting._emit import Run
from mpjax.casting._kinds import initial
from mpjax.casting._nnx_modules import Modules, with_module_argument
from mpjax.casting._op_lists import OpLists
from mpjax.casting._overrides import FULL_PRECISION, OUTPUT, Overrides
from mpjax.casting._product_roles import Layers, input_root
from mpjax.fp8._delayed import empty_state
from mpjax.fp8._dot_general import as_product
from mpjax.policy import Policy, get_policy, matmul_precision

RECOMPUTE = ("islands", "dots", "nothing")
_OUTPUTS = tuple(np.dtype(d) for d in (jax.numpy.float16, jax.numpy.bfloat16, jax.numpy.float32))


def autocast(
  fun: Callable[..., Any] | None = None,
  policy: Any = "auto",
  *,
  ops: OpLists | None = None,
  overrides: Mapping[str, Any] | None = None,
  recompute: str = "islands",
  fp8_state: Any = None,
) -> Callable[..., Any]:
  """`fun` with its matrix products in half precision and its range-critical operations in float32.

  A transform at trace time: what is left at run time are the casts. Arguments are never changed: float32
  master weights go in, their gradients come out in float32. Composes with `jit`, `grad`, `vmap`, `scan` and
  the other transforms, in any order; keeps the derivative rules of `custom_jvp` and `custom_vjp`. What an
  `nnx.Module` argument mutates is kept, in its own dtype.

  ```python
  loss = mpjax.autocast(loss_fn, "bf16", overrides={".*/head": "fp32"})
  grads = jax.grad(loss)(params, batch)
  ```

  Matrix products and convolutions run in `policy.compute_dtype`, with float32 accumulation where the hardware
  does it. Sums, exponentials, norms and losses are float32 islands: their inputs are half precision, their
  results are half again where half-precision operations read them, and the backward pass computes the inside
  again rather than keep it. Parameters, biases and masks follow the activation they meet; their gradients are
  summed in float32. What the program casts to float32 itself stays float32 until a matrix product reads it.
  float64, complex, integer and explicitly half-precision values, kernels and callbacks keep their dtypes.

  Args:
    fun: any function of pytrees, an `nnx.Module`, or a method of one; `None` for use as a decorator. NumPy
      and JAX arrays among its arguments are traced, everything else (Python numbers, strings) is static.
    policy: whatever `mpjax.get_policy` takes; read at each call, so `"auto"` follows the backend.
    ops: the lists of primitives, if not `mpjax.OpLists.default()`.
    overrides: policies by regular expression on the module path (`GPT/h0/attn`), tried before the policy's
      own; the first that matches whole components of the path wins.
    fp8_state: histories of FP8 products under `recipe: delayed`, from `mpjax.init_fp8_state`; what is
      differentiated with respect to it gives its next value. Other recipes leave it as it is.
    recompute: what the backward pass computes again instead of keeping it in memory: `"islands"`; `"dots"`,
      everything but the results of matrix products (less memory, more work); or `"nothing"`.

  Returns:
    A function with `fun`'s signature; its float16, bfloat16 and float32 outputs are in `policy.output_dtype`.

  Raises:
    ValueError: for a policy or a list that is not understood, and when called, for an override that matches
      no module path (it lists the paths there are).
    TypeError: when called, if `fun` returns something that is neither array nor number.

  Warns:
    PrecisionWarning: for a bare half-precision dtype as a policy, which also has its outputs in that dtype.
  """
  require_recompute(recompute)
  if ops is not None and not isinstance(ops, OpLists):
    raise ValueError(f"ops={ops!r}: expected mpjax.OpLists, such as OpLists.default().replace(deny=...)")
  make_rules(get_policy(policy), ops, overrides)  # what is wrong with them is said now
  if fun is None:
    return functools.partial(
      autocast, policy=policy, ops=ops, overrides=overrides, recompute=recompute, fp8_state=fp8_state
    )
  if not callable(fun):
    raise ValueError(
      f"autocast of {fun!r}: expected a function; the policy is the second argument, as in "
      "mpjax.autocast(f, 'bf16') or @mpjax.autocast(policy='bf16')"
    )

  warn_of_bare_dtype(policy)

  @functools.wraps(fun)
  def wrapped(*args: Any, **kwargs: Any) -> Any:
    resolved = get_policy(policy)
    with matmul_precision(resolved):
      rules = make_rules(resolved, ops, overrides, recompute)
      _fp8_products.warn_of(rules.overrides.recipes, resolved.compute_dtype.name)
      return _call(fun, args, kwargs, resolved, rules, recompute, fp8_state)

  return wrapped


def init_fp8_state(
  fun: Callable[..., Any],
  policy: Any,
  *,
  ops: OpLists | None = None,
  overrides: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
  """The first state of delayed FP8 scaling, for `mpjax.autocast(fun, policy, fp8_state=...)`.

  ```python
  state = mpjax.init_fp8_state(loss_fn, policy)(params, batch)
  loss = lambda params, state, batch: mpjax.autocast(loss_fn, policy, fp8_state=state)(params, batch)
  grads, state = jax.grad(loss, argnums=(0, 1))(params, state, batch)  # what comes back is the next state
  ```

  One tree, whatever the model is written in; checkpoint, shard (it is small: replicate) and donate it as any
  other. Each differentiated call takes the state once: where a loss calls a model twice, put the autocast
  round the loss. On a step whose gradients are not finite, keep the old state; in a tree of parameters under
  `_overwrite_with_gradient`, mpjax's loss scaling does that.

  Args:
    fun: the function.
    policy: with `recipe: delayed` in its `fp8` mapping.
    ops: as for `autocast`.
    overrides: as for `autocast`.

  Returns:
    A function of `fun`'s arguments (arrays or `jax.ShapeDtypeStruct`) that returns the state: for each FP8
    product, by module path, float32[amax_history_len] for `lhs`, `rhs` and `gradient`; nothing is computed.
    Without products under delayed scaling it has no histories.

  Raises:
    ValueError: for a policy that is not understood, or a pattern in it that matches no module path.
  """

  def init(*args: Any, **kwargs: Any) -> Any:
    resolved = get_policy(policy)
    rules = make_rules(resolved, ops, overrides)
    if rules.overrides.nothing_to_do:
      return empty_state({})
    with matmul_precision(resolved):
      plan = Traced(fun, args, kwargs).plan(rules, resolved)
    rules.check_all_matched()
    sites = {node.site for node in plan.all_nodes() if node.site is not None}
    return empty_state({site: rules.sites.recipes[site].amax_history_len for site in sorted(sites)})

  return init


def fp8_weights(fun: Callable[..., Any], policy: Any) -> Callable[..., set[str]]:
  """Which arrays among the arguments are the weights of FP8 products, in a function under `mpjax.autocast`.

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
    traced = Traced(fun, args, kwargs)
    plan = traced.plan(rules, resolved)
    rules.check_all_matched()
    found = {root for node in plan.all_nodes() if node.fp8 for root in node.fp8.roots}
    return {name for i, name in enumerate(traced.names) if input_root(i) in found}

  return weights


def full_precision(fun: Callable[..., Any]) -> Callable[..., Any]:
  """`fun` as a region that `autocast` leaves in float32, matrix products too.

  What comes in from half-precision operations is cast to float32. Without an autocast outside it does
  nothing. Also a decorator.

  Args:
    fun: any function.

  Returns:
    A function with `fun`'s signature.
  """

  @functools.wraps(fun)
  def region(*args: Any, **kwargs: Any) -> Any:
    with jax.named_scope(FULL_PRECISION):
      return fun(*args, **kwargs)

  return region


def _call(
  fun: Any, args: Any, kwargs: Any, policy: Policy, rules: Rules, recompute: str, fp8_state: Any
) -> Any:
  if rules.overrides.nothing_to_do and fp8_state is None:
    with jax.named_scope(FULL_PRECISION):
      return _to_output(fun(*args, **kwargs), policy)
  traced = Traced(fun, args, kwargs)
  plan = traced.plan(rules, policy)
  rules.check_all_matched()
  return traced.finish(carry_out(traced, plan, rules, recompute, fp8_state), policy)


def carry_out(
  traced: Traced,
  plan: Plan,
  rules: Rules,
  recompute: str,
  fp8_state: Any,
  watches: dict[int, Any] | None = None,
  look: Callable[[Any, Any], Any] | None = None,
) -> list[Any]:
  """The results of a traced function under a plan; with `look` at values that `_probes.py` has marked."""
  uses = _fp8_products.number([node.fp8 for node in plan.all_nodes() if node.fp8])
  histories = _fp8_products.open_histories(fp8_state, rules.sites.recipes, uses)
  histories = dataclasses.replace(histories, watches=watches or {})
  cast = lambda histories, *operands: _fp8_products.keep(histories, Run(histories, look)(plan, operands))
  if recompute == "dots":
    cast = jax.checkpoint(cast, policy=as_product(jax.checkpoint_policies.dots_saveable))
  return cast(histories, *traced.operands)


def require_recompute(recompute: str) -> str:
  """Raises `ValueError` unless `recompute` is one that `autocast` takes; returns it."""
  if recompute not in RECOMPUTE:
    raise ValueError(f"recompute={recompute!r}: expected one of {', '.join(RECOMPUTE)}")
  return recompute


def make_rules(policy: Policy, ops: OpLists | None, overrides: Any, recompute: str = "islands") -> Rules:
  """What decides, from autocast's arguments."""
  if policy.fp8 and policy.compute_dtype.itemsize != 2:
    raise ValueError(
      f"fp8={brief(policy.fp8)!r} with compute_dtype={policy.compute_dtype.name!r}: FP8 products are those "
      "that would run in half precision, and give that; use compute_dtype bfloat16, as base: fp8 does"
    )
  resolved = Overrides(policy, overrides)
  return Rules(ops or OpLists.default(), resolved, policy.accum_dtype, islands=recompute != "nothing")


class Traced:
  """A call of a function, traced in the dtypes that it was written for.

  Attributes:
    closed: its jaxpr.
    operands: constants and arguments for it.
    names: a tree path for each argument.
  """

  def __init__(self, fun: Any, args: Any, kwargs: Any):
    fun, args = with_module_argument(fun, args)
    self._modules = Modules(args, kwargs)
    leaves = self._modules.leaves
    dynamic = [i for i, leaf in enumerate(leaves) if _is_dynamic(leaf)]

    def flat(*arrays: Any) -> list[Any]:
      merged = list(leaves)
      for i, array in zip(dynamic, arrays, strict=True):
        merged[i] = array
      out, changed = self._modules.call(fun, merged)
      leaves_out, self._structure = jax.tree.flatten(out)
      for path, leaf in jax.tree_util.tree_flatten_with_path(out)[0]:
        _check_output(path, leaf)
      changes, self._changes = jax.tree.flatten(changed)
      self._arrays = [i for i, leaf in enumerate(leaves_out) if hasattr(leaf, "dtype")]
      self._out = [None if hasattr(leaf, "dtype") else leaf for leaf in leaves_out]
      return [*(leaves_out[i] for i in self._arrays), *changes]

    arguments = [leaves[i] for i in dynamic]
    self.names = [self._modules.names[i] for i in dynamic]
    self.closed = jax.make_jaxpr(flat)(*arguments)
    self.operands = [*_compat.constants(self.closed), *arguments]

  def plan(self, rules: Rules, policy: Policy) -> Plan:
    """The plan of the program under these rules."""
    body = _compat.open_jaxpr(self.closed)
    constants = _compat.constants(self.closed)
    half = rules.overrides.any_half
    held = [initial(v.aval, _known(c), half) for v, c in zip(body.constvars, constants, strict=True)]
    held += [initial(v.aval) for v in body.invars]
    layers = Layers.of(self.closed, rules) if rules.overrides.recipes else None
    return Plan(self.closed, held, rules, full_outputs=policy.output_dtype.itemsize >= 4, layers=layers)

  def finish(self, results: list[Any], policy: Policy | None) -> Any:
    """The function's value from the results of its program; puts mutated state where it belongs.

    Without a policy its outputs keep their dtypes.
    """
    n = len(self._arrays)
    own = [v.aval.dtype for v in _compat.open_jaxpr(self.closed).outvars]
    out = list(self._out)
    with jax.named_scope(OUTPUT):
      for i, x, dtype in zip(self._arrays, results, own, strict=False):
        out[i] = _as(x, policy.output_dtype if policy and dtype in _OUTPUTS else dtype)
      changes = [_as(x, dtype) for x, dtype in zip(results[n:], own[n:], strict=True)]
    self._modules.update(jax.tree.unflatten(self._changes, changes))
    return jax.tree.unflatten(self._structure, out)


def _as(x: Any, dtype: Any) -> Any:
  return x if x.dtype == dtype else jax.lax.convert_element_type(x, dtype)


def _check_output(path: Any, leaf: Any) -> None:
  if not hasattr(leaf, "dtype") and not isinstance(leaf, (bool, int, float, complex)):
    raise TypeError(
      f"the function under autocast returned {leaf!r} of type {type(leaf).__name__} at output"
      f"{jax.tree_util.keystr(path)}: expected arrays or numbers in a pytree; take it out of the result"
    )


def _known(x: Any) -> Any:
  if isinstance(x, jax.core.Tracer) or not hasattr(x, "dtype") or x.size > 1 << 20 or x.dtype != np.float32:
    return None
  return np.asarray(x)


def _is_dynamic(leaf: Any) -> bool:
  return isinstance(leaf, (jax.Array, np.ndarray, jax.ShapeDtypeStruct)) and leaf.dtype != jax.dtypes.float0


def _to_output(tree: Any, policy: Policy) -> Any:
  def cast(x: Any) -> Any:
    if getattr(x, "dtype", None) in _OUTPUTS and x.dtype != policy.output_dtype:
      return jax.lax.convert_element_type(x, policy.output_dtype)
    return x

  with jax.named_scope(OUTPUT):
    return jax.tree.map(cast, tree)
