"""The `fp8` mapping of a policy: keys, defaults, errors that name key, value and choices, and the way back."""

import dataclasses
import json

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import yaml

import mpjax
from mpjax.fp8 import Recipe

DEFAULTS = {
  "recipe": "auto",
  "forward_dtype": "",
  "gradient_dtype": "",
  "backward": "policy",
  "margin": 0,
  "amax_history_len": 1024,
  "emulate": False,
  "first_layer": False,
  "last_layer": False,
  "keep_last": 0.0,
  "attention": False,
  "min_dim": 128,
  "saved_activations": "compute",
}
E4M3, E5M2, FP4 = "float8_e4m3fn", "float8_e5m2", "float4_e2m1fn"
# Fields of a recipe where they differ from the defaults: its formats, and what comes with them.
OWN = {
  "auto": {},
  "current": {"forward_dtype": E4M3, "gradient_dtype": E5M2},
  "delayed": {"forward_dtype": E4M3, "gradient_dtype": E5M2},
  "per_channel": {"forward_dtype": E4M3, "gradient_dtype": E4M3},
  "mx": {"forward_dtype": E4M3, "gradient_dtype": E4M3},
  "nvfp4": {"forward_dtype": FP4, "gradient_dtype": FP4, "keep_last": 0.15},
}
AMD = {"forward_dtype": "float8_e4m3fnuz", "gradient_dtype": "float8_e5m2fnuz"}
# What is given, and the fields that it gives beside those of its recipe: every key, and every kind of mapping.
GIVEN = [
  *((name, {}) for name in OWN),
  *(({"recipe": name}, {}) for name in OWN),
  ([("recipe", "current"), ("min_dim", 16)], {"min_dim": 16}),
  (Recipe(margin=1, attention=True), {"margin": 1, "attention": True}),
  # Of an older version's config, and of its run directory.
  ("block", {"recipe": "mx"}),
  ({"recipe": "block", "forward_dtype": E4M3, "saved_activations": "compute"}, {"recipe": "mx"}),
  ({"recipe": "delayed", "amax_history_len": 16}, {"amax_history_len": 16}),
  ({"recipe": "nvfp4", "keep_last": 0, "backward": "compute"}, {"keep_last": 0.0, "backward": "compute"}),
  ({"keep_last": 1}, {"keep_last": 1.0}),
  ({"margin": 3, "saved_activations": "fp8"}, {"margin": 3, "saved_activations": "fp8"}),
  *(({"recipe": "current", key: True}, {key: True}) for key in ("emulate", "first_layer", "last_layer")),
  # A gradient format goes with the forward one; formats by short name, long name or dtype.
  *(({"forward_dtype": name}, AMD) for name in ("e4m3fnuz", "float8_e4m3fnuz", jnp.float8_e4m3fnuz)),
  ({"gradient_dtype": np.dtype(ml_dtypes.float8_e5m2)}, {"gradient_dtype": E5M2}),
  ({"recipe": "current", "forward_dtype": "e4m3fnuz"}, AMD),
  *(({"recipe": name, "forward_dtype": "e4m3fnuz"}, dict.fromkeys(AMD, AMD["forward_dtype"]))
    for name in ("mx", "per_channel")),
  ({"recipe": "mx", "gradient_dtype": "e5m2"}, {"gradient_dtype": E5M2}),
  ({"forward_dtype": "e5m2", "gradient_dtype": "e4m3fn"}, {"forward_dtype": E5M2, "gradient_dtype": E4M3}),
  ({"forward_dtype": "e4m3b11fnuz"}, {"forward_dtype": "float8_e4m3b11fnuz", "gradient_dtype": E5M2}),
]  # fmt: skip


def parse_recipe(spec):
  return mpjax.get_policy({"base": "bf16", "fp8": spec}).fp8


def test_defaults_are_documented_ones_and_every_key_is_tested_here():
  assert dataclasses.asdict(Recipe()) == DEFAULTS
  assert set().union(*(fields for _, fields in GIVEN)) == set(DEFAULTS)
  assert mpjax.get_policy("fp8").fp8 == Recipe()
  assert [parse_recipe(empty) for empty in (None, {}, (), [])] == [None] * 4
  assert {name: Recipe(name).multiple for name in OWN} == {**dict.fromkeys(OWN, 16), "mx": 32}


@pytest.mark.parametrize(("given", "fields"), GIVEN, ids=str)
def test_what_is_given_sets_its_own_fields_and_comes_back_from_plain_data(given, fields):
  recipe = parse_recipe(given)
  name = fields.get("recipe", recipe.recipe)
  assert dataclasses.asdict(recipe) == DEFAULTS | {"recipe": name} | OWN[name] | fields
  for spec in (recipe.to_dict(), tuple(recipe.to_dict().items())):
    assert parse_recipe(spec) == recipe
    assert hash(parse_recipe(spec)) == hash(recipe)
  policy = mpjax.get_policy({"base": "bf16", "fp8": given})
  data = policy.to_dict()
  for through in (json.loads(json.dumps(data)), yaml.safe_load(yaml.safe_dump(data)), str(policy)):
    assert mpjax.get_policy(through) == policy


# (mapping, what the message names)
CHOICES = "auto, current, delayed, per_channel, mx, nvfp4"
WRONG = [
  ({"recip": "current"}, ["recip", "did you mean 'recipe'", *DEFAULTS]),
  ({"recipe": "curent"}, ["recipe", "'curent'", CHOICES, "did you mean 'current'"]),
  ({"recipe": None}, ["recipe", "None", CHOICES]),
  ({"forward_dtype": "e4m3"}, ["forward_dtype", "'e4m3'", "e4m3fn, e5m2, e4m3fnuz, e5m2fnuz, e4m3b11fnuz"]),
  ({"gradient_dtype": jnp.bfloat16}, ["gradient_dtype", "bfloat16", "e5m2fnuz"]),
  ({"forward_dtype": "e4m3fnuz", "gradient_dtype": "e5m2"}, ["forward_dtype", "gradient_dtype", "fnuz"]),
  ({"forward_dtype": "e5m2"}, ["forward_dtype", "gradient_dtype", "float8_e5m2", "e4m3"]),
  ({"recipe": "mx", "forward_dtype": FP4}, [FP4, "nvfp4", "mx"]),
  ({"recipe": "nvfp4", "forward_dtype": "e4m3fn"}, ["forward_dtype", "nvfp4"]),
  ({"keep_last": 1.5}, ["keep_last", "1.5", "from 0 to 1"]),
  ({"backward": "bf16"}, ["backward", "'bf16'", "policy, compute"]),
  ({"margin": -1}, ["margin", "-1", "at least 0"]),
  ({"margin": 1.0}, ["margin", "1.0", "integer"]),
  ({"emulate": "yes"}, ["emulate", "'yes'", "true or false"]),
  ({"min_dim": 0}, ["min_dim", "0", "at least 1"]),
  ({"saved_activations": "bf16"}, ["saved_activations", "'bf16'", "compute, fp8"]),
  ({"amax_history_len": 16}, ["amax_history_len", "delayed", "auto"]),
  ({"recipe": "mx", "margin": 1}, ["margin", "mx"]),
  ({"recipe": "mx", "saved_activations": "fp8"}, ["saved_activations", "mx"]),
  ({"include": ["mlp"]}, ["'include'", "overrides", "'.*': bf16"]),
  ({"exclude": ["mlp"]}, ["'exclude'", "overrides", "'.*/head': bf16"]),
  ({"recipe": "delayed", "amax_compute": "max"}, ["'amax_compute'", "leave it out"]),
  ({"pow2_scales": True}, ["'pow2_scales'", "leave it out"]),
  (7, ["fp8=7", "mapping"]),
]


@pytest.mark.parametrize(("spec", "named"), WRONG, ids=str)
def test_an_error_names_key_value_and_choices(spec, named):
  with pytest.raises(ValueError) as error:
    parse_recipe(spec)
  assert [part for part in named if part not in str(error.value)] == []


def test_inference_has_no_histories():
  recipe = Recipe(recipe="delayed", amax_history_len=4, margin=2, attention=True)
  assert recipe.without_histories() == Recipe(recipe="current", margin=2, attention=True)
  assert Recipe(recipe="mx").without_histories() == Recipe(recipe="mx")
