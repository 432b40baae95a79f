"""`autocast`: any JAX function, each operation in the right dtype; `full_precision`, an exception to it."""

from __future__ import annotations

import contextlib
import functools
import warnings
import weakref
from collections.abc import Callable, Mapping
from typing import Any, Never, NoReturn

import jax

from mpjax._calls import AT_THE_USER, is_linen_module, is_policy, refuse_keywords
from mpjax._own_autocast import AUTO, OwnAutocast
from mpjax._types import Fp8State, PolicyLike
from mpjax.casting import _fp8_products
from mpjax.casting._casting_rules import OpLists, make_rules
from mpjax.casting._half_precision import NO_REGIONS, explaining, tracing
from mpjax.casting._known_programs import KnownPrograms
from mpjax.casting._linen_modules import bound_call, with_variables
from mpjax.casting._trace import Traced, to_output
from mpjax.jaxpr import FULL_PRECISION, autocast_scope
from mpjax.policy import (
  Policy,
  PrecisionWarning,
  get_policy,
  matmul_precision,
  warn_of_bare_dtype,
  warn_without_scale,
)

_ELSEWHERE = {
  "dtype": "name a policy, as in mpjax.autocast(f, policy='bf16')",
  "device_type": "autocast follows the function; name a policy, as in mpjax.autocast(f, policy='bf16')",
  "enabled": "for none, write mpjax.autocast(f, policy='fp32'), or mpjax.full_precision(f) inside another",
  "compute_dtype": "name it in a policy, as in policy='params=float32,compute=bfloat16,output=float32'",
}


def _marked(policy: Policy, recompute: str) -> contextlib.AbstractContextManager[None]:
  """Marks what an autocast has decided, where an autocast outside is explained."""
  if not explaining.value:
    return contextlib.nullcontext()
  label = policy.label if "{" in policy.full_label else policy.full_label
  label += "" if recompute == "islands" else f", recompute {recompute}"
  return jax.named_scope(autocast_scope(label))


class _Decorator(functools.partial[Callable[..., Any]]):
  """The result of `autocast` without a function."""

  def __enter__(self) -> NoReturn:
    raise TypeError(
      "mpjax.autocast is not a context manager: JAX traces functions, so wrap the function, as in "
      "loss = mpjax.autocast(loss_fn, 'bf16'), or write @mpjax.autocast(policy='bf16') above it"
    )

  def __exit__(self, *error: object) -> None:
    """Exists so that `with` calls `__enter__`."""


def autocast(
  fun: Callable[..., Any] | None = None,
  policy: PolicyLike = AUTO,
  *,
  ops: OpLists | None = None,
  overrides: Mapping[str, PolicyLike] | None = None,
  recompute: str = "islands",
  fp8_state: Fp8State | None = None,
  **unknown: Never,
) -> Callable[..., Any]:
  """Returns `fun` with its matrix products in half precision and its range-critical operations in float32.

  A transform at trace time: at run time only the casts remain. It does not change arguments: float32
  master weights go in, and their gradients come out in float32. It composes with `jit`, `grad`, `vmap`,
  `scan` and the other transforms, in any order, and keeps the derivative rules of `custom_jvp` and
  `custom_vjp`. Changes in an `nnx.Module` argument are kept, in their own dtype.

  ```python
  loss = mpjax.autocast(loss_fn, "bf16", overrides={"head": "fp32"})
  grads = jax.grad(loss)(params, batch)
  ```

  Matrix products and convolutions run in `policy.compute_dtype`, with float32 accumulation where the hardware
  does it. Sums, exponentials, norms and losses are float32 islands: their inputs are half precision, their
  results are rounded where half-precision operations read them, and the backward pass recomputes the
  inside. Parameters, biases and masks take the dtype of the activation that they meet; their gradients are
  summed in float32. A value that the program itself casts to float32 stays float32 until a matrix product
  reads it. float64, complex, integer and explicitly half-precision values, kernels and callbacks keep their
  dtypes.

  Args:
    fun: any function of pytrees, a module, or a method of one, also inside a linen module; `None` for use as
      a decorator. NumPy and JAX arrays among its arguments are traced, everything else (Python numbers,
      strings) is static.
    policy: what `mpjax.get_policy` takes; read at each call, so `"auto"` follows the backend.
    ops: the lists of primitives; by default `mpjax.OpLists.default()`.
    overrides: policies by regular expression on the module path (`GPT/h0/attn`), tried before the policy's
      own; the first that matches whole components of the path wins. The dtype of a loop's carry can be set,
      too: `{"GPT/rnn/carry_1": {"loop_carry": "float32"}}`, or with the loop's path for all its carries.
    fp8_state: histories of FP8 products under `recipe: delayed`, from `mpjax.init_fp8_state`; the
      derivative with respect to it is its next value. Other recipes ignore it.
    recompute: what the backward pass recomputes instead of keeping it in memory: `"islands"` or
      `"nothing"`. An override such as `{".*/attn": {"recompute": "nothing"}}` chooses for a module.

  Returns:
    A function with `fun`'s signature; its float16, bfloat16 and float32 outputs are in `policy.output_dtype`.
    An output with the shape and the half-precision dtype of an argument keeps it: the carry of a
    loop, a cache.

  Raises:
    ValueError: for an invalid policy or list, and when called, for an override that matches
      no module path (the error lists the paths).
    TypeError: when called, if `fun` returns something that is neither array nor number.

  Warns:
    PrecisionWarning: for a bare half-precision dtype as a policy, which also makes the outputs half
      precision; for a kernel that stays in float32, with the line that changes it.
      Without a policy on a GPU: the choice is `fp16`, whose loss scale autocast cannot apply.
      From `mpjax.value_and_grad` of the result, if the policy scales the loss and the optimiser's state has
      no loss scale.
  """
  refuse_keywords(autocast, unknown, _ELSEWHERE)
  if ops is not None and not isinstance(ops, OpLists):
    raise ValueError(f"ops={ops!r}: expected mpjax.OpLists, such as OpLists.default().replace(deny=...)")
  make_rules(get_policy(policy), ops, overrides, recompute)  # raises early if they are invalid
  if fun is None:
    return _Decorator(
      autocast, policy=policy, ops=ops, overrides=overrides, recompute=recompute, fp8_state=fp8_state
    )
  if not callable(fun) or is_policy(fun):
    raise ValueError(
      f"autocast of {fun!r}: expected a function; the policy is the second argument, as in "
      "mpjax.autocast(f, 'bf16') or @mpjax.autocast(policy='bf16')"
    )
  if is_linen_module(fun):
    raise TypeError(
      f"autocast of the linen module {type(fun).__name__}, which holds no parameters: write "
      "mpjax.autocast(model.apply, policy)(variables, x)"
    )

  warn_of_bare_dtype(policy)
  if policy is AUTO:
    warn_without_scale(policy, "autocast cannot apply a loss scale")

  programs = KnownPrograms()

  @functools.wraps(fun)
  def wrapped(*args: Any, **kwargs: Any) -> Any:
    resolved = get_policy(policy)
    with matmul_precision(resolved), _marked(resolved, recompute):
      rules = make_rules(resolved, ops, overrides, recompute)
      _fp8_products.warn_of(rules.overrides.recipes, resolved.compute_dtype.name)
      bound = bound_call(fun, args, kwargs)
      # The parameters that a linen module makes at first are the same as without autocast.
      is_initializing = bound is not None and bound.module.is_initializing()
      as_written = rules.overrides.nothing_to_do and fp8_state is None and not resolved.in_passes
      if as_written or is_initializing:
        with jax.named_scope(FULL_PRECISION), tracing(NO_REGIONS):
          return to_output(fun(*args, **kwargs), resolved, (args, kwargs))

      def transform(fun: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
          traced = Traced(fun, args, kwargs, rules, resolved)
          program = programs.of(traced)
          for kernel in program.kernels:
            said = f"under autocast {kernel}; if that is intended, put it into mpjax.full_precision"
            warnings.warn(said, PrecisionWarning, **AT_THE_USER)
          return traced.finish(program(traced.operands, fp8_state))

        return run

      if bound is not None:
        return with_variables(transform, bound)
      return transform(fun)(*args, **kwargs)

  OwnAutocast(weakref.ref(wrapped), fun, policy, ops, overrides, recompute).put_on(wrapped)
  return wrapped


def full_precision(fun: Callable[..., Any]) -> Callable[..., Any]:
  """Returns `fun` as a region that `autocast` leaves in float32, including its matrix products.

  ```python
  scores = mpjax.full_precision(lambda x, w: jax.nn.softmax(x @ w))(x, params["body"]["kernel"])
  ```

  Values from half-precision operations are cast to float32. Without an outer autocast it does
  nothing. Also a decorator. Wrap a module at the call, as in `full_precision(self.norm)(x)`: the result is
  a plain function, so a module that stores it does not have the weights as parameters.

  Args:
    fun: any function.

  Returns:
    A function with `fun`'s signature.
  """

  @functools.wraps(fun)
  def region(*args: Any, **kwargs: Any) -> Any:
    with jax.named_scope(FULL_PRECISION), tracing(NO_REGIONS):
      return fun(*args, **kwargs)

  return region
