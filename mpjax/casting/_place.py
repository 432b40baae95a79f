"""The place of a jaxpr in the program that autocast decides about."""

from __future__ import annotations

import dataclasses

from mpjax.casting._fp8_products import Sites
from mpjax.casting._product_roles import Lineage, ProductRoles
from mpjax.casting._readers import Reads
from mpjax.casting._weight_gradients import WeightGradients
from mpjax.jaxpr import Calls, Facts


@dataclasses.dataclass(frozen=True, eq=False)
class Place:
  """What is known of a jaxpr from where it stands.

  Attributes:
    gradients: of parameters, in it.
    roles: of its products; `None` where they are not known, as in a derivative rule.
    lineages: where its values come from; `None` where that is not known, as in a backward rule.
    readers: who reads its values; `None` where that is not known outside of it.
    followed: whether further products are made of what it returns, if `roles` do not say.
    exact: see `backward_of_exact`.
    calls: those that it is in, outermost first.
    path: the module path that it is in.
    sites: the names that products under delayed FP8 scaling have taken.
    islands: whether there are islands: not inside a checkpoint of the user's.
    in_loop: whether it is a step of a `scan`, whose backward pass is a loop of its own.
    copies: whether islands make cheap inputs themselves: not where values are looked at, each in one place.
    solver: why it is in float32 whatever its policy, as the body of a solver is; empty where it is not.
    enter_all: whether the bodies of calls that run whole in float32 are decided about, too, for `explain`.
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
  solver: str = ""
  enter_all: bool = False
