"""The place of a jaxpr in the program that autocast decides about."""

from __future__ import annotations

import dataclasses

from mpjax.casting._fp8_products import Sites
from mpjax.casting._product_roles import Lineage, ProductRoles
from mpjax.casting._readers import Reads
from mpjax.casting._reasons import Code
from mpjax.casting._weight_gradients import WeightGradients
from mpjax.jaxpr import Calls, Facts


@dataclasses.dataclass(frozen=True, eq=False)
class Place:
  """Facts about a jaxpr from its place in the program.

  Attributes:
    gradients: the gradients of parameters in it.
    roles: the roles of its products; `None` if unknown, as in a derivative rule.
    lineages: the sources of its values; `None` if unknown, as in a backward rule.
    readers: the readers of its values; `None` if those outside are unknown.
    followed: whether more products follow its outputs, if `roles` do not say.
    exact: see `backward_of_exact`.
    calls: the calls around it, outermost first.
    path: its module path.
    sites: the names of products under delayed FP8 scaling so far.
    islands: whether to make islands: not inside a checkpoint of the user's.
    in_loop: whether it is a step of a `scan`, whose backward pass is another loop.
    copies: whether islands compute cheap inputs themselves: not if values are inspected, each in one place.
    solver: why it is in float32 under every policy, such as the body of a solver; otherwise `None`.
    enter_all: whether to decide about the bodies of calls that run whole in float32, too, for `explain`.
  """

  gradients: WeightGradients
  roles: ProductRoles | None = None
  lineages: Facts[Lineage] | None = None
  readers: Facts[Reads] | None = None
  followed: bool = True
  exact: frozenset[Calls] = frozenset()
  calls: Calls = ()
  path: str = ""
  sites: Sites = dataclasses.field(default_factory=Sites)
  islands: bool = True
  in_loop: bool = False
  copies: bool = True
  solver: Code | None = None
  enter_all: bool = False
