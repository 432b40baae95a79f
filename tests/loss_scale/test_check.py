"""`check_loss_scaling` of optimisers: compositions that are wrong are explained, and those that are right pass."""

import jax
import numpy as np
import optax
import pytest

import mpjax

F32 = np.float32
PARAMS = {"w": np.asarray([[0.5, -1.25], [2.0, 0.125]], F32), "b": np.asarray([0.1, -0.2], F32), "none": None}
LABELS = {"w": "a", "b": "b", "none": "a"}
SCALED = mpjax.dynamic_loss_scale
ADAM, SGD = optax.adam(0.1), optax.sgd(0.1)
OVERWRITTEN = {"params": {"w": np.ones(3, F32)}, "_overwrite_with_gradient": {"scale": np.ones((), F32)}}
INTEGERS = {"w": np.ones(3, F32), "i": np.arange(3)}
DECAY = optax.linear_schedule(0.1, 0.0, 10)
PLATEAU = SCALED(optax.chain(SGD, optax.contrib.reduce_on_plateau()))
# Name to (optimiser, parameters, keyword arguments).
RIGHT = {
  "clip inside": (SCALED(optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(0.1))), PARAMS, {}),
  "MultiSteps inside": (SCALED(optax.MultiSteps(ADAM, 2).gradient_transformation()), PARAMS, {}),
  "frozen": (optax.partition({"a": SCALED(ADAM), "b": optax.set_to_zero()}, LABELS), PARAMS, {}),
  "a scale in each group": (optax.partition({"a": SCALED(ADAM), "b": SCALED(SGD)}, LABELS), PARAMS, {}),
  "extra arguments": (PLATEAU, PARAMS, {"value": 1.0}),
  "overwritten leaves": (SCALED(ADAM), OVERWRITTEN, {}),
  "integers": (SCALED(optax.masked(ADAM, {"w": True, "i": False})), INTEGERS, {}),
}
DEPENDS = "depends on the loss scale"
UPDATES = "is not finite still updates"
# Name to (optimiser, what is wrong with it).
WRONG = {
  "clip outside": (optax.chain(optax.clip_by_global_norm(1.0), SCALED(ADAM)), DEPENDS),
  "infinities clipped": (optax.chain(optax.clip(1e30), SCALED(SGD)), UPDATES),
  "a group without": (optax.partition({"a": SCALED(ADAM), "b": SGD}, LABELS), DEPENDS),
  "schedule outside": (
    optax.chain(SCALED(optax.scale_by_adam()), optax.scale_by_learning_rate(DECAY)),
    r"still changes the state.*count",
  ),
  "weight decay outside": (
    optax.chain(SCALED(optax.scale_by_adam()), optax.add_decayed_weights(0.1), optax.scale(-0.1)),
    UPDATES,
  ),
  "apply_if_finite outside": (
    optax.apply_if_finite(SCALED(ADAM), 3),
    r"still changes the state.*notfinite_count",
  ),
  "none": (ADAM, "no loss scale"),
}


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_composition_passes(name):
  tx, params, keywords = RIGHT[name]
  mpjax.loss_scale.check_loss_scaling(tx, params, **keywords)


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_composition_is_explained(name):
  tx, message = WRONG[name]
  with pytest.raises(ValueError, match=message):
    mpjax.loss_scale.check_loss_scaling(tx, PARAMS)


def test_nothing_outside_may_touch_overwritten_leaves():
  with pytest.raises(ValueError, match=r"_overwrite_with_gradient.*differs from the value"):
    mpjax.loss_scale.check_loss_scaling(optax.chain(SCALED(ADAM), optax.scale(-1.0)), OVERWRITTEN)


def test_multi_steps_outside_is_refused_by_whoever_sees_the_transform():
  multi = optax.MultiSteps(optax.chain(SCALED(SGD)), 2)
  tx = optax.masked(multi.gradient_transformation(), True)
  assert float(mpjax.get_loss_scale(tx.init(PARAMS)).scale) == 2.0**16
  step = mpjax.make_train_step(lambda params, batch: params["w"].sum(), tx, "fp32")
  for see in (
    lambda: mpjax.loss_scale.check_loss_scaling(tx, PARAMS),
    lambda: step.init(PARAMS),
    lambda: jax.eval_shape(step.tx.init, PARAMS),
  ):
    with pytest.raises(ValueError, match=r"MultiSteps is outside.*put it inside.*accumulate="):
      see()
