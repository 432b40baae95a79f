"""`check_loss_scaling` finds compositions that are wrong, and passes those that are right."""

import jax
import jax.numpy as jnp
import optax
import pytest

import mpjax

PARAMS = {"w": jnp.asarray([[0.5, -1.25], [2.0, 0.125]]), "b": jnp.asarray([0.1, -0.2]), "none": None}
LABELS = {"w": "a", "b": "b", "none": "a"}
SCALED = mpjax.dynamic_loss_scale

RIGHT = {
  "adamw": lambda: SCALED(optax.adamw(0.1)),
  "clip inside": lambda: SCALED(optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(0.1))),
  "static": lambda: mpjax.static_loss_scale(optax.sgd(0.1), 8.0),
  "masked inside": lambda: SCALED(optax.masked(optax.adam(0.1), {"w": True, "b": False, "none": False})),
  "MultiSteps inside": lambda: SCALED(optax.MultiSteps(optax.adam(0.1), 2).gradient_transformation()),
  "noise": lambda: SCALED(optax.chain(optax.add_noise(0.1, 0.5, jax.random.key(1)), optax.sgd(0.1))),
  "a scale in each group": lambda: optax.partition(
    {"a": SCALED(optax.adam(0.1)), "b": SCALED(optax.sgd(0.1))}, LABELS
  ),
  "flatten outside": lambda: optax.flatten(SCALED(optax.adam(0.1))),
  "tracked": lambda: mpjax.track_skips(SCALED(optax.adam(0.1))),
  "stateless outside": lambda: optax.chain(SCALED(optax.scale_by_adam()), optax.scale(-0.1)),
}
WRONG = {
  "clip outside": (
    lambda: optax.chain(optax.clip_by_global_norm(1.0), SCALED(optax.adamw(0.1))),
    "depends on the loss scale",
  ),
  "values clipped outside": (
    lambda: optax.chain(optax.clip(1.0), SCALED(optax.sgd(0.1))),
    "depends on the loss scale",
  ),
  "a clip far away": (
    lambda: optax.chain(optax.clip_by_global_norm(1e6), SCALED(optax.sgd(0.1))),
    "depends on the loss scale",
  ),
  "infinities clipped": (
    lambda: optax.chain(optax.clip(1e30), SCALED(optax.sgd(0.1))),
    "is not finite still updates",
  ),
  "moments outside": (
    lambda: optax.chain(optax.scale_by_adam(), SCALED(optax.sgd(0.1))),
    "depends on the loss scale",
  ),
  "a group without": (
    lambda: optax.partition({"a": SCALED(optax.adam(0.1)), "b": optax.sgd(0.1)}, LABELS),
    "depends on the loss scale",
  ),
  "a normalised group without": (
    lambda: optax.partition({"a": SCALED(optax.adam(0.1)), "b": optax.sign_sgd(0.1)}, LABELS),
    r"\['b'\] is not finite still updates",
  ),
  "schedule outside": (
    lambda: optax.chain(
      SCALED(optax.scale_by_adam()), optax.scale_by_learning_rate(optax.linear_schedule(0.1, 0.0, 10))
    ),
    r"still changes the state.*count",
  ),
  "weight decay outside": (
    lambda: optax.chain(SCALED(optax.scale_by_adam()), optax.add_decayed_weights(0.1), optax.scale(-0.1)),
    r"is not finite still updates",
  ),
  "apply_if_finite outside": (
    lambda: optax.apply_if_finite(SCALED(optax.adam(0.1)), 3),
    r"still changes the state.*notfinite_count",
  ),
  "MultiSteps outside": (
    lambda: optax.MultiSteps(SCALED(optax.adam(0.1)), 2).gradient_transformation(),
    "MultiSteps stands outside",
  ),
  "none": (lambda: optax.adam(0.1), "no loss scale"),
}


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_composition_passes(name):
  mpjax.check_loss_scaling(RIGHT[name](), PARAMS)


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_composition_is_explained(name):
  make, match = WRONG[name]
  with pytest.raises(ValueError, match=match):
    mpjax.check_loss_scaling(make(), PARAMS)


def test_parameters_in_eight_bits():
  mpjax.check_loss_scaling(SCALED(optax.sgd(0.1)), {"w": jnp.ones(3, jnp.float8_e4m3fn)})


def test_extra_arguments_are_passed_on():
  tx = SCALED(optax.chain(optax.sgd(0.1), optax.contrib.reduce_on_plateau()))
  mpjax.check_loss_scaling(tx, PARAMS, value=1.0)


def test_overwritten_leaves_and_integers_are_left_alone():
  params = {"params": {"w": jnp.ones(3)}, "_overwrite_with_gradient": {"scale": jnp.ones(())}}
  mpjax.check_loss_scaling(SCALED(optax.adam(0.1)), params)
  outside = optax.chain(SCALED(optax.adam(0.1)), optax.scale(-1.0))
  with pytest.raises(ValueError, match=r"_overwrite_with_gradient.*not the value"):
    mpjax.check_loss_scaling(outside, params)
  integers = {"w": jnp.ones(3), "i": jnp.arange(3)}
  mpjax.check_loss_scaling(SCALED(optax.masked(optax.adam(0.1), {"w": True, "i": False})), integers)
