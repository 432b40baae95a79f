"""The leaves of an optimiser's state that are not moments, and are not stored in 8 bits."""

from __future__ import annotations

import jax
import optax
import optax.contrib

from mpjax._types import PyTree
from mpjax.jaxpr import outputs_of

# Fields, by state, that are not moments, although `init` sets them to zeros.
_FIELDS: dict[type | None, tuple[str, ...]] = {
  optax.MultiStepsState: ("acc_grads",),  # gradients that are added up before use
  optax.ApplyEvery: ("grad_acc",),
  optax.ScaleByLBFGSState: ("params", "updates"),  # from the last step, for the difference to this step
  optax.contrib.DoGState: ("init_params",),  # in older versions set at the first update, not by `init`
}
# Sums (and maxima) without decay: soon a step adds less than half of a code of 8 bits.
_SUMS: dict[type | None, tuple[str, ...]] = {
  optax.ScaleByRssState: ("sum_of_squares",),
  optax.contrib.COCOBState: ("cumulative_gradients", "scale", "subgradients", "reward"),
  getattr(optax.contrib, "MadgradState", None): ("grad_sum_sq", "s"),  # not in older versions
}


def is_sum(state: PyTree) -> PyTree:
  """Returns, for each leaf of a state, whether it is in `_SUMS`."""
  return _in_fields(state, _SUMS)


def is_exact(inner: optax.GradientTransformation, params: PyTree, state: PyTree) -> PyTree:
  """Returns, for each leaf of `state`, which is `inner.init(params)`, whether it must stay as it is.

  So must parameters: `z` of `optax.contrib.schedule_free`, and the first parameters that `mechanize`,
  `prodigy` and `dog` keep. They depend on the parameters' values, where a moment depends on shapes alone.
  """
  jaxpr = jax.make_jaxpr(inner.init)(params).jaxpr
  of_values = outputs_of(jaxpr, [True] * len(jaxpr.invars))
  leaves, structure = jax.tree.flatten(_in_fields(state, _FIELDS))
  return jax.tree.unflatten(structure, [a or b for a, b in zip(leaves, of_values, strict=True)])


def _in_fields(state: PyTree, of: dict[type | None, tuple[str, ...]]) -> PyTree:
  """Returns, for each leaf of a state, whether it is in one of these fields."""

  def node(x: PyTree) -> PyTree:
    fields = of.get(type(x))
    if fields is None:
      return False
    parts = zip(x._fields, x, strict=True)
    whole = lambda part: jax.tree.map(lambda _: True, part)
    return type(x)(*(whole(part) if name in fields else _in_fields(part, of) for name, part in parts))

  return jax.tree.map(node, state, is_leaf=lambda x: type(x) in of)
