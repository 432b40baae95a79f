"""The leaves of an optimiser's state that are not moments, and must not be stored in few bytes."""

from __future__ import annotations

import jax
import optax
import optax.contrib

from mpjax._types import PyTree
from mpjax.jaxpr import outputs_of

# Fields, by state, that are not moments, although `init` sets them to zeros.
_FIELDS: dict[type, tuple[str, ...]] = {
  optax.MultiStepsState: ("acc_grads",),  # gradients that are added up before use
  optax.ApplyEvery: ("grad_acc",),
  optax.ScaleByLBFGSState: ("params", "updates"),  # from the last step, for the difference to this step
  optax.contrib.DoGState: ("init_params",),  # in older versions set at the first update, not by `init`
}


def is_exact(inner: optax.GradientTransformation, params: PyTree, state: PyTree) -> PyTree:
  """Returns, for each leaf of `state`, which is `inner.init(params)`, whether it must stay as it is."""
  leaves, structure = jax.tree.flatten(_is_exact_field(state))
  either = [a or b for a, b in zip(leaves, holds_parameters(inner, params), strict=True)]
  return jax.tree.unflatten(structure, either)


def holds_parameters(inner: optax.GradientTransformation, params: PyTree) -> list[bool]:
  """Returns, for each leaf of `inner.init(params)`, whether it depends on the parameters' values.

  Examples are `z` of `optax.contrib.schedule_free`, and the first parameters that `mechanize`, `prodigy` and
  `dog` keep. A moment depends only on the parameters' shapes.

  Args:
    inner: any optax transform.
    params: tree of parameters.
  """
  jaxpr = jax.make_jaxpr(inner.init)(params).jaxpr
  return outputs_of(jaxpr, [True] * len(jaxpr.invars))


def _is_exact_field(state: PyTree) -> PyTree:
  """Returns, for each leaf of a state, whether it is in one of `_FIELDS`."""

  def node(x: PyTree) -> PyTree:
    fields = _FIELDS.get(type(x))
    if fields is None:
      return False
    parts = zip(x._fields, x, strict=True)
    whole = lambda part: jax.tree.map(lambda _: True, part)
    return type(x)(*(whole(part) if name in fields else _is_exact_field(part) for name, part in parts))

  return jax.tree.map(node, state, is_leaf=lambda x: type(x) in _FIELDS)
