"""`CastPlan`: everything is decided before anything is emitted."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from mpjax import get_policy
from mpjax.casting._cast_plan import Island
from mpjax.casting._casting_rules import make_rules
from mpjax.casting._emit import execute
from mpjax.casting._trace import Traced
from tests.casting._conformance import normal

W = jnp.asarray(normal(16, 16, scale=0.25))
X = jnp.asarray(normal(16, 16, seed=1))
FP8 = {"emulate": True, "min_dim": 1, "first_layer": True, "last_layer": True, "recipe": "current"}


def model(w, x):
  y = jax.lax.scan(lambda c, _: (jax.nn.softmax(c @ w), None), x, None, length=2)[0]
  return jax.nn.gelu(jax.jit(jnp.matmul)(y, w)).sum()


def planned(policy):
  policy = get_policy(policy)
  traced = Traced(model, (W, X), {})
  return traced, traced.plan(make_rules(policy, None, None), policy)


def plans_in(plan):
  yield plan
  for node in plan.nodes:
    for inner in node.call.plans if node.call else ():
      yield from plans_in(inner)


@pytest.mark.parametrize("policy", ["bf16", {"base": "fp8", "fp8": FP8}], ids=["bf16", "fp8"])
def test_a_plan_is_carried_out_as_often_as_one_likes(policy):
  traced, plan = planned(policy)
  first, second = (str(jax.make_jaxpr(lambda *xs: execute(plan, xs))(*traced.operands)) for _ in range(2))
  assert first == second


def test_nothing_of_a_plan_can_be_changed():
  _, plan = planned("bf16")
  for part in (plan, *plan.units, *(unit.nodes[0] for unit in plan.units if isinstance(unit, Island))):
    for field in dataclasses.fields(part):
      with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(part, field.name, None)


def test_a_plan_says_what_each_operand_is_read_in_and_what_each_island_reads():
  _, plan = planned("bf16")
  found = list(plans_in(plan))
  assert len(found) == 3  # the function, the loop's body, and that of the jit
  for part in found:
    nodes = [n for unit in part.units for n in (unit.nodes if isinstance(unit, Island) else [unit])]
    assert sorted(map(id, nodes)) == sorted(map(id, part.nodes))
    assert all(len(node.reads) == len(node.equation.invars) for node in nodes)
    products = [node for node in nodes if node.listed == "allow"]
    assert all(set(node.reads) == {jnp.dtype("bfloat16")} for node in products)
  islands = [unit for part in found for unit in part.units if isinstance(unit, Island)]
  assert islands
  assert all(island.inputs and island.outputs for island in islands)
