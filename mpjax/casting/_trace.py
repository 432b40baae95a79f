"""A call of a function, traced in its own dtypes; and its value, from results in autocast's dtypes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import numpy as np
from jax.tree_util import KeyPath

from mpjax._average import is_average
from mpjax._types import Array, Fp8State, JaxprEqn, PyTree
from mpjax.casting._cast_plan import CastPlan, Tap
from mpjax.casting._casting_rules import CastingRules, make_rules
from mpjax.casting._decide import Body
from mpjax.casting._emit import execute
from mpjax.casting._half_precision import trace
from mpjax.casting._kinds import Held, as_dtype, initial, own_types
from mpjax.casting._linen_modules import InOwnDtypes
from mpjax.casting._nnx_modules import Modules, with_module_argument
from mpjax.casting._program import Program
from mpjax.casting._sources import loop_facts
from mpjax.jaxpr import OUTPUT, constants_of, dtype_of, open_jaxpr
from mpjax.policy import Policy, get_policy

_OUTPUTS = tuple(np.dtype(d) for d in (jax.numpy.float16, jax.numpy.bfloat16, jax.numpy.float32))


class Traced:
  """A call of a function, traced in its own dtypes; `half_precision` regions in theirs.

  Without a policy, outputs keep their dtypes.

  Attributes:
    closed: its jaxpr.
    operands: constants and arguments for it.
    names: a tree path for each argument.
  """

  def __init__(
    self,
    fun: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    rules: CastingRules,
    policy: Policy | None,
  ):
    self.rules, self.policy = rules, policy
    fun, args = with_module_argument(fun, args)
    self._modules = Modules(args, kwargs)
    leaves = self._modules.leaves
    dynamic = [i for i, leaf in enumerate(leaves) if _is_dynamic(leaf)]

    def flat(*arrays: Array) -> list[Array]:
      merged = list(leaves)
      for i, array in zip(dynamic, arrays, strict=True):
        merged[i] = array
      out, changed = self._modules.call(fun, merged)
      leaves_out, self._structure = jax.tree.flatten(out)
      self._kept = _in_own_dtypes(out)
      for path, leaf in jax.tree_util.tree_flatten_with_path(out)[0]:
        _check_output(path, leaf)
      changes, self._changes = jax.tree.flatten(changed)
      self._arrays = [i for i, leaf in enumerate(leaves_out) if hasattr(leaf, "dtype")]
      self._out = [None if hasattr(leaf, "dtype") else leaf for leaf in leaves_out]
      return [*(leaves_out[i] for i in self._arrays), *changes]

    arguments = [leaves[i] for i in dynamic]
    self._own = own_types(arguments)
    self.names = [self._modules.names[i] for i in dynamic]
    self._arguments = [self._modules.arguments[i] for i in dynamic]
    self.closed = trace(lambda: jax.make_jaxpr(flat)(*arguments), rules.overrides)
    self.operands = [*constants_of(self.closed), *arguments]

  @functools.cached_property
  def plan(self) -> CastPlan:
    """The decisions about the program."""
    full = self._returns_float32
    program = Program.of(self.closed, self.rules, self._arguments, full)
    return Body(program, self.closed, self._held()).plan(full_outputs=full)

  def known(self) -> tuple[Hashable, ...]:
    """Returns what decisions depend on, next to the program and the rules; of values, what `_held` knows."""
    arrays = tuple(isinstance(x, jax.Array) for x in constants_of(self.closed))
    return tuple(self._held()), self._returns_float32, arrays, tuple(self._arguments)

  def _held(self) -> list[Held]:
    """Returns how constants and arguments are held."""
    body, half = open_jaxpr(self.closed), self.rules.overrides.any_half
    constants = zip(body.constvars, constants_of(self.closed), strict=True)
    return [
      *(initial(v.aval, _known(c), half) for v, c in constants),
      *(initial(v.aval) for v in body.invars),
    ]

  @property
  def _returns_float32(self) -> bool:
    return self.policy is None or self.policy.output_dtype.itemsize >= 4 or any(self._kept)

  def execute(self, tap: Tap | None = None, fp8_state: Fp8State | None = None) -> PyTree:
    """Returns the function's value as it was decided; `tap` inspects results of nodes on the way."""
    return self.finish(execute(self.plan, self.operands, fp8_state=fp8_state, tap=tap))

  def steps_are_layers(self, loop: JaxprEqn) -> bool:
    """Returns whether the steps of a loop are layers, each with weights of its own."""
    return any(loop_facts(loop, self.rules).layers)

  def finish(self, results: Sequence[Array]) -> PyTree:
    """Returns the function's value from the results of its program, and stores changed state in its modules.

    Without a policy, outputs keep their dtypes. The sums of an `Average` always do, and outputs with the
    shape and half-precision dtype of an argument: the user chose it.
    """
    n = len(self._arrays)
    own = [dtype_of(v) for v in open_jaxpr(self.closed).outvars]
    out = list(self._out)
    with jax.named_scope(OUTPUT):
      for i, x, dtype in zip(self._arrays, results, own, strict=False):
        keeps = self._kept[i] or dtype not in _OUTPUTS or (x.shape, dtype) in self._own
        out[i] = as_dtype(x, dtype if keeps or self.policy is None else self.policy.output_dtype)
      changes = [as_dtype(x, dtype) for x, dtype in zip(results[n:], own[n:], strict=True)]
    self._modules.update(jax.tree.unflatten(self._changes, changes))
    return jax.tree.unflatten(self._structure, out)


def plan_of(
  fun: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], policy: Policy | None, **rules: Any
) -> Traced:
  """Decides about a call as `autocast` does, with its `ops`, `overrides` and `recompute` as `rules`.

  Without a policy all is float32 and nothing is computed again: the function as written.
  """
  made = make_rules(policy, **rules) if policy else make_rules(get_policy("fp32"), recompute="nothing")
  return Traced(fun, args, kwargs, made, policy)


def to_output(tree: PyTree, policy: Policy, arguments: PyTree) -> PyTree:
  """Casts a function's outputs to the policy's output dtype; see `Traced.finish`."""
  own = own_types(arguments)

  def cast(x: Array) -> Array:
    keeps = is_average(x) or getattr(x, "dtype", None) not in _OUTPUTS or (x.shape, x.dtype) in own
    return x if keeps else as_dtype(x, policy.output_dtype)

  with jax.named_scope(OUTPUT):
    return jax.tree.map(cast, tree, is_leaf=is_average)


def _in_own_dtypes(tree: PyTree) -> list[bool]:
  """Returns, for each leaf, whether it keeps its dtype: variables, and the sums of an `Average`.

  An output dtype may lack the range and digits for sums.
  """
  keeps = lambda x: is_average(x) or isinstance(x, InOwnDtypes)
  leaves = jax.tree.leaves(tree, is_leaf=keeps)
  return [keeps(leaf) for leaf in leaves for _ in jax.tree.leaves(leaf)]


def _check_output(path: KeyPath, leaf: object) -> None:
  if not hasattr(leaf, "dtype") and not isinstance(leaf, (bool, int, float, complex)):
    raise TypeError(
      f"the function under autocast returned {leaf!r} of type {type(leaf).__name__} at output"
      f"{jax.tree_util.keystr(path)}: expected arrays or numbers in a pytree; remove it from the result"
    )


def _known(x: Array) -> np.ndarray | None:
  """Returns the value of a small float32 constant that is known while tracing."""
  if isinstance(x, jax.core.Tracer) or not hasattr(x, "dtype") or x.size > 1 << 20 or x.dtype != np.float32:
    return None
  return np.asarray(x)


def _is_dynamic(leaf: object) -> bool:
  return isinstance(leaf, (jax.Array, np.ndarray, jax.ShapeDtypeStruct)) and leaf.dtype != jax.dtypes.float0
