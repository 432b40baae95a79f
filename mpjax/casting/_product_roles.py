"""The roles of matrix products under FP8: first or last, with a weight or with two activations."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from mpjax.casting._kinds import size
from mpjax.casting._sources import Product, Root
from mpjax.jaxpr import Calls, backward_depth, times_run


class ProductRole(NamedTuple):
  """The role of a matrix product in its program.

  Attributes:
    active: which of its operands come after a layer.
    gradients: which of its operands are gradients, in a backward pass inside the program.
    roots: the identities of its operands.
    size: elements of its result; in a backward pass, elements of the gradient operand.
    last: whether no product follows it.
    weights: which of its operands are weights.
    after: the share of the program's products with a weight that come after it; a loop counts as often as it
      runs, and all of a loop's products have the share of its first run.
  """

  active: tuple[bool, bool]
  gradients: tuple[bool, bool]
  roots: tuple[Root | None, Root | None]
  size: int
  last: bool = False
  weights: tuple[bool, bool] = (False, False)
  after: float = 1.0

  @property
  def first(self) -> bool:
    """Whether no layer came before it."""
    return not any(self.active)


def product_roles(
  products: Sequence[Product], is_followed: Callable[[Product], bool]
) -> dict[Calls, ProductRole]:
  """Returns the role of each product of a program, by its place.

  A backward product has the role of the forward product that it differentiates.

  Args:
    products: the products, in the order of the program.
    is_followed: whether another product may follow one.
  """
  known = {product.place: _role(product, is_followed(product)) for product in products}
  again = {place for place in known if any(backward_depth(call) for call, _ in place[:-1])}
  backward = {place for place, role in known.items() if any(role.gradients)}
  forward = {place: role for place, role in known.items() if place not in backward | again}
  forward |= _with_shares(forward)
  recomputed = _inherited({place: known[place] for place in again - backward}, forward)
  both = forward | recomputed
  return both | _inherited({place: known[place] for place in backward}, both)


def _role(product: Product, is_followed: bool) -> ProductRole:
  """Returns the role of a product by its place alone."""
  equation, (lhs, rhs) = product.equation, product.operands
  gradient = lhs.gradient or rhs.gradient or backward_depth(equation) > 0
  still = [not x.active and not x.gradient for x in (lhs, rhs)]
  return ProductRole(
    (lhs.active, rhs.active),
    (lhs.gradient, rhs.gradient),
    product.roots,
    size(equation.invars[0 if lhs.gradient else 1] if gradient else equation.outvars[0]),
    last=not is_followed,
    weights=(still[0] and not still[1], still[1]),
  )


def _inherited(
  products: Mapping[Calls, ProductRole], forward: Mapping[Calls, ProductRole]
) -> dict[Calls, ProductRole]:
  """Returns products of a backward pass with the roles of the forward products that they differentiate.

  Args:
    products: products of gradients, or recomputed ones; those without a forward product are left out.
    forward: the other products.
  """
  readers: dict[Root | None, list[ProductRole]] = {}
  for role in forward.values():
    for root in filter(None, role.roots):
      readers.setdefault(root, []).append(role)
  found = {}
  for place, role in products.items():
    roots = [root for root, gradient in zip(role.roots, role.gradients, strict=True) if not gradient]
    sources = [p for root in roots for p in readers.get(root, [])]
    sources = [p for p in sources if p.size == role.size] or sources
    if not sources or all(role.gradients):
      continue
    active = role.active  # of a recomputed product
    if any(role.gradients):
      active = (all(p.active[0] for p in sources), all(p.active[1] for p in sources))
    last, after = any(p.last for p in sources), min(p.after for p in sources)
    found[place] = role._replace(active=active, last=last, after=after)
  return found


def _with_shares(products: Mapping[Calls, ProductRole]) -> dict[Calls, ProductRole]:
  """Returns products with a weight, with the share of them that comes after each.

  Args:
    products: products of the forward pass, in the order of the program.
  """

  def outermost_loop(place: Calls) -> Calls:
    """Returns the outermost loop around a product; the product itself without one."""
    return next((place[: i + 1] for i, (e, _) in enumerate(place) if times_run(e) > 1), place)

  weighted = (place for place, role in products.items() if not all(role.active))
  counts = {place: math.prod(times_run(equation) for equation, _ in place) for place in weighted}
  found: dict[Calls, ProductRole] = {}
  after = 0
  for _, together in itertools.groupby(reversed(counts), outermost_loop):
    places = list(together)
    after += sum(counts[place] for place in places)
    share = (after - 1) / sum(counts.values())
    found |= {place: products[place]._replace(after=share) for place in places}
  return found
