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


def parse_recipe(spec):
  return mpjax.get_policy({"base": "bf16", "fp8": spec}).fp8


# Every key with a value that is not its default, and what is parsed of it.
OTHER = {
  "recipe": ("nvfp4", "nvfp4"),
  "forward_dtype": (jnp.float8_e4m3b11fnuz, "float8_e4m3b11fnuz"),
  "gradient_dtype": ("e4m3fn", "float8_e4m3fn"),
  "backward": ("compute", "compute"),
  "margin": (3, 3),
  "amax_history_len": (16, 16),
  "emulate": (True, True),
  "first_layer": (True, True),
  "last_layer": (True, True),
  "keep_last": (1, 1.0),
  "attention": (True, True),
  "min_dim": (16, 16),
  "saved_activations": ("fp8", "fp8"),
}
# Fields of a recipe where they differ from the defaults: its formats, and what comes with them.
E4M3, E5M2, FP4 = "float8_e4m3fn", "float8_e5m2", "float4_e2m1fn"
OWN = {
  "auto": {},
  "current": {"forward_dtype": E4M3, "gradient_dtype": E5M2},
  "delayed": {"forward_dtype": E4M3, "gradient_dtype": E5M2},
  "per_channel": {"forward_dtype": E4M3, "gradient_dtype": E4M3},
  "mx": {"forward_dtype": E4M3, "gradient_dtype": E4M3},
  "nvfp4": {"forward_dtype": FP4, "gradient_dtype": FP4, "keep_last": 0.15},
}
MULTIPLES = {"mx": 32}


def test_defaults_are_documented_ones_and_every_key_is_tested_here():
  assert dataclasses.asdict(Recipe()) == DEFAULTS
  assert OTHER.keys() == DEFAULTS.keys()


@pytest.mark.parametrize("name", OWN)
def test_a_name_alone_is_a_recipe_with_its_own_formats(name):
  recipe = parse_recipe(name)
  assert dataclasses.asdict(recipe) == DEFAULTS | {"recipe": name} | OWN[name]
  assert recipe == Recipe(name) == parse_recipe({"recipe": name})
  assert recipe.multiple == MULTIPLES.get(name, 16)


def test_nothing_is_no_recipe_and_blocks_of_older_configs_are_mx():
  for empty in (None, {}, (), []):
    assert parse_recipe(empty) is None
  assert parse_recipe("block") == parse_recipe({"recipe": "block"}) == Recipe("block") == Recipe("mx")
  # As a run directory of that version has it.
  whole = {"recipe": "block", "forward_dtype": E4M3, "gradient_dtype": E4M3, "saved_activations": "compute"}
  assert parse_recipe(whole) == Recipe("mx")


def test_a_key_sets_its_own_field_and_no_other():
  for key, (given, want) in OTHER.items():
    name = "delayed" if key == "amax_history_len" else "nvfp4" if key == "recipe" else "current"
    recipe = parse_recipe({"recipe": name, key: given})
    assert dataclasses.asdict(recipe) == DEFAULTS | {"recipe": name} | OWN[name] | {key: want}, key
    hash(recipe)


def test_a_gradient_format_goes_with_the_forward_one():
  for name, forward, gradient in (
    ("current", "e4m3b11fnuz", E5M2),
    ("current", "e4m3fnuz", "float8_e5m2fnuz"),
    ("auto", "e4m3fnuz", "float8_e5m2fnuz"),
    ("per_channel", "e4m3fnuz", "float8_e4m3fnuz"),
    ("mx", "e4m3fnuz", "float8_e4m3fnuz"),
  ):
    assert parse_recipe({"recipe": name, "forward_dtype": forward}).gradient_dtype == gradient, name
  assert parse_recipe({"recipe": "mx", "gradient_dtype": "e5m2"}).gradient_dtype == E5M2


def test_a_format_goes_by_short_name_long_name_or_dtype():
  for name in ("e5m2", "float8_e5m2", jnp.float8_e5m2, np.dtype(ml_dtypes.float8_e5m2)):
    recipe = parse_recipe({"forward_dtype": name, "gradient_dtype": "e4m3fn"})
    assert recipe.forward == parse_recipe({"gradient_dtype": name}).gradient == np.dtype(jnp.float8_e5m2)
  short, long = (
    mpjax.get_policy({"base": "fp8", "fp8": {"forward_dtype": name}}) for name in ("e4m3fn", "float8_e4m3fn")
  )
  assert short == long


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


SPECS = [
  *OWN,
  "block",
  {"recipe": "nvfp4", "keep_last": 0, "backward": "compute"},
  {"recipe": "auto", "gradient_dtype": "e4m3fn", "keep_last": 0.25},
  {"margin": 1, "saved_activations": "fp8"},
  {"recipe": "delayed", "amax_history_len": 4},
  {"forward_dtype": jnp.float8_e4m3fn, "margin": 2, "emulate": True},
  [("recipe", "current"), ("min_dim", 16)],
  Recipe(margin=1, attention=True),
]


def test_a_recipe_and_its_policy_come_back_from_plain_data():
  for spec in SPECS:
    recipe = parse_recipe(spec)
    assert parse_recipe(recipe.to_dict()) == parse_recipe(tuple(recipe.to_dict().items())) == recipe
    assert hash(parse_recipe(recipe.to_dict())) == hash(recipe)
    policy = mpjax.get_policy({"base": "bf16", "fp8": spec})
    data = policy.to_dict()
    for through in (json.loads(json.dumps(data)), yaml.safe_load(yaml.safe_dump(data))):
      assert mpjax.get_policy(through) == policy, spec
    assert mpjax.get_policy(str(policy)) == policy, str(policy)


def test_the_preset_has_a_recipe():
  assert mpjax.get_policy("fp8").fp8 == Recipe()
  assert mpjax.get_policy("bf16").fp8 is None


def test_inference_has_no_histories():
  recipe = Recipe(recipe="delayed", amax_history_len=4, margin=2, attention=True)
  assert recipe.without_histories() == Recipe(recipe="current", margin=2, attention=True)
  assert Recipe(recipe="mx").without_histories() == Recipe(recipe="mx")
