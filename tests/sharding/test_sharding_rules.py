"""Where parameters lie on a mesh: the user's patterns, the model's rule, the default; and unfit rules by name."""

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import PartitionSpec as P

import mpjax
from mpjax.optim import Quantized
from mpjax.sharding import ShardingRules, dimension_over, keep_axes, specs_like

PARAMS = {
  "in": jnp.zeros((64, 64)),
  "scale": jnp.zeros(64),
  "blocks": [{"kernel": jnp.zeros((64, 128))}, {"kernel": jnp.zeros((128, 6))}],
  "small": jnp.zeros((8, 8)),
}


def mesh(data=1, fsdp=1, tensor=1):
  return jax.sharding.AbstractMesh((data, fsdp, tensor), ("data", "fsdp", "tensor"))


def test_by_default_the_largest_dimension_that_can_be_is_divided():
  assert ShardingRules().specs(PARAMS, mesh(data=2, fsdp=4)) == {
    "in": P("fsdp"),
    "scale": P(),  # of one dimension
    "blocks": [{"kernel": P(None, "fsdp")}, {"kernel": P()}],  # 768 entries are whole
    "small": P(),
  }
  specs = ShardingRules().specs({"w": jnp.zeros((4096, 3)), "v": jnp.zeros((63, 65))}, mesh(fsdp=4))
  assert specs == {"w": P("fsdp"), "v": P()}


def test_patterns_come_before_the_models_rule_and_that_before_the_default():
  model = lambda path, shape: ("tensor",) + (None,) * (len(shape) - 1) if "kernel" in path else None
  rules = ShardingRules({"blocks/0": ("fsdp", "tensor"), "small": None}, model)
  specs = rules.specs(PARAMS, mesh(fsdp=4, tensor=2))
  assert specs["blocks"] == [{"kernel": P("fsdp", "tensor")}, {"kernel": P("tensor")}]
  assert specs["small"] == P()
  assert specs["in"] == P("fsdp")


def test_what_a_model_asks_for_and_a_shape_does_not_allow_is_left_out():
  rules = ShardingRules(model=lambda path, shape: ("fsdp",) * len(shape))
  assert rules.specs({"w": jnp.zeros((8, 6))}, mesh(fsdp=4)) == {"w": P("fsdp")}


def test_an_axis_of_one_device_divides_nothing():
  assert ShardingRules({"in": ("fsdp", "tensor")}).specs({"in": PARAMS["in"]}, mesh(tensor=2)) == {
    "in": P(None, "tensor")
  }


@pytest.mark.parametrize(
  ("rules", "words"),
  [
    ({"nothing": ("fsdp",)}, ["'nothing' matches no parameter", "blocks/0/kernel"]),
    ({"in": ("fsdp",)}, ["in[64, 64]", "each of its 2 dimensions"]),
    ({"blocks/1": (None, "fsdp")}, ["blocks/1/kernel[128, 6]", "dimension of 6", "fsdp=4"]),
    ({"in": ("data", None)}, ["'in'", "fsdp, tensor or null"]),
    ({"in": "fsdp"}, ["'in'", "fsdp, tensor or null"]),
    ({"in": ("fsdp", "fsdp")}, ["'in'", "twice"]),
    ({"in(": ()}, ["'in('", "regular expression"]),
  ],
)
def test_unfit_rules_are_named(rules, words):
  with pytest.raises(ValueError) as error:
    ShardingRules(rules).specs(PARAMS, mesh(fsdp=4))
  assert all(word in str(error.value) for word in words), error.value


def test_an_optimisers_state_lies_as_its_parameters_do():
  specs = ShardingRules().specs(PARAMS, mesh(fsdp=4))
  state = optax.adam(1e-3).init(PARAMS)
  laid = specs_like(state, PARAMS, specs, mesh(fsdp=4))
  assert laid[0].mu == laid[0].nu == specs
  assert laid[0].count == P()
  factored = {"mu": {"in": jnp.zeros(64)}}  # a parameter's path, another shape
  assert specs_like(factored, PARAMS, specs, mesh(fsdp=4)) == {"mu": {"in": P()}}


def test_quantised_state_lies_as_its_parameters_do():
  params = {"rows": jnp.zeros((64, 48)), "columns": jnp.zeros((6, 1024)), "narrow": jnp.zeros((6, 256))}
  specs = {"rows": P("fsdp"), "columns": P(None, "fsdp"), "narrow": P(None, "fsdp")}
  state = mpjax.quantized_state(optax.adam(1e-3), min_size=0).init(params)
  laid = specs_like(state, params, specs, mesh(fsdp=4)).inner_state[0].nu
  assert {name: (x.codes, x.scales) for name, x in laid.items()} == {
    "rows": (P("fsdp"), P("fsdp")),
    "columns": (P(None, "fsdp"), P(None, "fsdp")),
    "narrow": (P(None, "fsdp"), P()),  # two groups on four devices
  }


def test_a_quantised_scalar_is_whole():
  params = {"s": jnp.ones(())}
  state = mpjax.quantized_state(optax.adam(1.0), min_size=0).init(params)
  nu = specs_like(state, params, {"s": P()}, mesh(fsdp=4)).inner_state[0].nu
  assert nu["s"] == Quantized(P(), P())


def test_parts_of_a_spec():
  spec = P(None, "fsdp", "tensor")
  assert dimension_over(spec, "fsdp") == 1
  assert dimension_over(spec, "data") is None
  assert keep_axes(spec, ("tensor",)) == P(None, None, "tensor")
