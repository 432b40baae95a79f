"""Every optimiser and transform of optax in a training step: the way of plain optax in float32, or one clear error.

The gradient is exact in any float, but for the rounding of parameters, so what is compared is the optimiser.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib as contrib
import pytest

import mpjax

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of optax, of what it still has

STEPS = 4
SHAPE = (64, 64)  # as many entries as few bytes are for
RNG = np.random.default_rng(0)
# What bfloat16 has exactly.
PARAMS = {
  "w": jnp.asarray(RNG.uniform(-0.5, 0.5, SHAPE), jnp.bfloat16).astype(jnp.float32),
  "b": jnp.zeros(64),
}
# Far from the start, so that no rounding turns a sign.
AWAY = RNG.choice([-1, 1], SHAPE) * RNG.uniform(0.5, 1.5, SHAPE)
BATCH = {"w": jnp.asarray(PARAMS["w"] + AWAY, jnp.float32), "b": jnp.full(64, 0.5)}
POLICIES = {
  "fp32": "fp32",
  "fp16": {"base": "fp16", "loss_scaling": {"init_scale": 256.0}},
  "bf16_lean": "bf16_lean",
}


def loss_fn(params, batch):
  return 0.5 * sum(jnp.sum((params[k] - batch[k]).astype(jnp.float32) ** 2) for k in params) / 64


@dataclasses.dataclass(frozen=True)
class Runs:
  """An optimiser that goes plain optax's way: `lean` is how far from it under bf16_lean, in the way's length.

  By 0.005 no leaf of the state is in few bytes, and by 0.08 moments alone are: were sums of gradients or parameters
  in a state stored so, each would be farther.
  """

  make: Callable[[], optax.GradientTransformation]
  lean: float = 0.005
  policies: tuple[str, ...] = tuple(POLICIES)


@dataclasses.dataclass(frozen=True)
class Refused:
  """An optimiser that cannot run in a step, and what the error says."""

  make: Callable[[], optax.GradientTransformation]
  match: str


words = str.split
few_bytes = functools.partial(Runs, lean=0.08)
half = {"w": True, "b": False}
NAMES = words(
  "adabelief adadelta adafactor adagrad adam adamax adamaxw adamw adan amsgrad fromage lamb lars lion nadam nadamw "
  "novograd optimistic_adam_v2 radam rmsprop rprop sign_sgd signum sm3 yogi"
)
CONTRIB = words("acprop ademamix adopt madgrad momo_adam muon simplified_ademamix")


def of(name):
  """Returns an optimiser by its name, with a learning rate."""
  return lambda: (getattr(optax, name, None) or getattr(contrib, name))(1e-2)


sgd = lambda: optax.sgd(0.1)
momentum = lambda: optax.sgd(0.1, momentum=0.9)

# Of `dog`, by the argument that this optax has for it.
old_dog = "reps_rel" in inspect.signature(contrib.dog).parameters
FIRST_STEP = {"reps_rel": 3e-2} if old_dog else {"init_step": ("learning_rate", 0.1)}

# By name; a text names the row that has the transform in it.
TABLE = {
  **{name: few_bytes(of(name)) for name in (*NAMES, *CONTRIB)},
  # optax
  "add_noise": "noisy_sgd",
  "apply_every": Runs(lambda: optax.chain(optax.apply_every(2), optax.sgd(0.1))),
  "apply_if_finite": few_bytes(lambda: optax.apply_if_finite(momentum(), 3)),
  "chain": "clip",
  "clip": Runs(
    lambda: optax.chain(
      optax.clip(0.01),
      optax.clip_by_block_rms(0.02),
      optax.adaptive_grad_clip(0.5),
      optax.clip_by_global_norm(1.0),
      optax.centralize(),
      optax.zero_nans(),
      optax.add_decayed_weights(1e-3),
      optax.scale(0.5),
      optax.scale_by_schedule(optax.linear_schedule(1.0, 0.5, 4)),
      optax.scale_by_param_block_norm(),
      optax.scale_by_param_block_rms(),
      optax.stateless(lambda updates, params: updates),
      optax.stateless_with_tree_map(lambda g, p: g),
      optax.with_extra_args_support(optax.identity()),
      optax.scale_by_learning_rate(0.1),
    )
  ),
  **dict.fromkeys(
    words(
      "clip_by_block_rms adaptive_grad_clip clip_by_global_norm centralize zero_nans add_decayed_weights scale identity "
      "scale_by_schedule scale_by_param_block_norm scale_by_param_block_rms stateless stateless_with_tree_map "
      "with_extra_args_support scale_by_learning_rate"
    ),
    "clip",
  ),
  "conditionally_mask": few_bytes(lambda: optax.conditionally_mask(momentum(), lambda step: step % 2 == 0)),
  "conditionally_transform": Runs(lambda: optax.conditionally_transform(sgd(), lambda step: step % 2 == 0)),
  "ema": few_bytes(lambda: optax.chain(optax.ema(0.9), sgd())),
  "flatten": few_bytes(lambda: optax.flatten(momentum())),
  "freeze": "set_to_zero",
  "inject_hyperparams": few_bytes(lambda: optax.inject_hyperparams(optax.adamw)(1e-2)),
  "inject_stateful_hyperparams": few_bytes(lambda: optax.inject_stateful_hyperparams(optax.adamw)(1e-2)),
  "keep_params_nonnegative": Runs(lambda: optax.chain(sgd(), optax.keep_params_nonnegative())),
  "lbfgs": Refused(optax.lbfgs, "value_fn"),
  "lookahead": Refused(lambda: optax.lookahead(sgd(), 2, 0.5), "LookaheadParams"),
  "masked": few_bytes(lambda: optax.chain(optax.masked(optax.trace(0.9), half), sgd())),
  "measure_with_ema": "monitor",
  "monitor": Runs(
    lambda: optax.chain(
      optax.monitor({"norm": optax.measure_with_ema(optax.tree_utils.tree_norm, 0.9)}),
      optax.snapshot("norm", optax.tree_utils.tree_norm),
      sgd(),
    ),
    policies=("fp32",),  # the first update gives its state another structure, which a loss scale refuses
  ),
  "multi_transform": "partition",
  "named_chain": Runs(lambda: optax.named_chain(("clip", optax.clip(0.01)), ("sgd", sgd()))),
  "noisy_sgd": Runs(lambda: optax.noisy_sgd(0.1, key=0)),
  "normalize_by_update_norm": Runs(lambda: optax.chain(optax.normalize_by_update_norm(), sgd())),
  "optimistic_adam": few_bytes(lambda: optax.optimistic_adam(1e-2, optimism=0.05)),
  "optimistic_gradient_descent": few_bytes(lambda: optax.optimistic_gradient_descent(0.1)),
  "partition": few_bytes(lambda: optax.partition({"a": momentum(), "b": sgd()}, {"w": "a", "b": "b"})),
  "polyak_sgd": Runs(lambda: optax.polyak_sgd(0.1)),
  "scale_by_adadelta": "adadelta",
  "scale_by_adam": "adam",
  "scale_by_adamax": "adamax",
  "scale_by_adan": "adan",
  "scale_by_amsgrad": "amsgrad",
  "scale_by_backtracking_linesearch": Refused(
    lambda: optax.chain(sgd(), optax.scale_by_backtracking_linesearch(5)), "value_fn"
  ),
  "scale_by_belief": "adabelief",
  "scale_by_distance_over_gradients": Runs(
    lambda: optax.chain(optax.scale_by_distance_over_gradients(reps_rel=0.1), optax.scale(-1.0))
  ),
  "scale_by_factored_rms": "adafactor",
  "scale_by_lbfgs": Runs(lambda: optax.lbfgs(0.1, linesearch=None), lean=0.4),
  "scale_by_lion": "lion",
  "scale_by_novograd": "novograd",
  "scale_by_optimistic_gradient": "optimistic_gradient_descent",
  "scale_by_polyak": "polyak_sgd",
  "scale_by_radam": "radam",
  "scale_by_rms": "rmsprop",
  "scale_by_rprop": "rprop",
  "scale_by_rss": "adagrad",
  "scale_by_sign": "sign_sgd",
  "scale_by_sm3": "sm3",
  "scale_by_stddev": few_bytes(lambda: optax.rmsprop(1e-2, centered=True)),
  "scale_by_trust_ratio": "lamb",
  "scale_by_yogi": "yogi",
  "scale_by_zoom_linesearch": Refused(
    lambda: optax.chain(sgd(), optax.scale_by_zoom_linesearch(5)), "value_fn"
  ),
  "selective_transform": Runs(lambda: optax.selective_transform(sgd(), freeze_mask=half)),
  "set_to_zero": Runs(lambda: optax.partition({True: optax.set_to_zero(), False: sgd()}, half)),
  "sgd": few_bytes(momentum),
  "snapshot": "monitor",
  "trace": "sgd",
  "MultiSteps": Runs(lambda: optax.MultiSteps(optax.sgd(0.1), 2).gradient_transformation()),
  # optax.contrib
  "cocob": few_bytes(contrib.cocob),
  "dadapt_adamw": few_bytes(lambda: contrib.dadapt_adamw(estim_lr0=1e-2)),
  "differentially_private_aggregate": "dpsgd",
  "dog": Runs(lambda: contrib.dog(**FIRST_STEP)),
  "dowg": Runs(lambda: contrib.dowg(init_estim_sq_dist=1.0)),
  "dpsgd": Refused(lambda: contrib.dpsgd(0.1, 1.0, 0.0, 0), "each example"),
  "galore": few_bytes(lambda: contrib.galore(1e-2, rank=4)),
  "hutchinson_estimator_diag_hessian": "sophia",
  "mechanize": few_bytes(lambda: contrib.mechanize(sgd(), s_init=0.1)),
  "momo": few_bytes(lambda: contrib.momo(0.1)),
  "normalize": "sam",
  "prodigy": few_bytes(lambda: contrib.prodigy(estim_lr0=1e-2)),
  "reduce_on_plateau": Runs(
    lambda: optax.chain(sgd(), contrib.reduce_on_plateau(patience=1, rtol=0.9, factor=0.5))
  ),
  "sam": Runs(lambda: contrib.sam(sgd(), optax.chain(contrib.normalize(), optax.sgd(0.5)), sync_period=2)),
  "sam, in a chain": Runs(
    lambda: optax.chain(optax.clip(1.0), contrib.sam(sgd(), optax.chain(contrib.normalize(), optax.sgd(0.5))))
  ),
  "sam, opaque": Refused(lambda: contrib.sam(sgd(), sgd(), opaque_mode=True), "grad_fn"),
  "scale_by_acprop": "acprop",
  "scale_by_ademamix": "ademamix",
  "scale_by_adopt": "adopt",
  "scale_by_cocob": "cocob",
  "scale_by_galore": "galore",
  "scale_by_madgrad": "madgrad",
  "scale_by_muon": "muon",
  "scale_by_simplified_ademamix": "simplified_ademamix",
  "schedule_free": "schedule_free_sgd",
  "schedule_free_adamw": few_bytes(lambda: contrib.schedule_free_adamw(1e-2)),
  "schedule_free_sgd": Runs(lambda: contrib.schedule_free_sgd(0.1)),
  "sophia": Refused(lambda: contrib.sophia(1e-2), "obj_fn"),
  "split_real_and_imaginary": few_bytes(lambda: contrib.split_real_and_imaginary(momentum())),
}
OTHERS = {
  "bias_correction",
  "matrix_inverse_pth_root",
  "sigmoid_binary_cross_entropy",
  "update_infinity_moment",
  "update_moment",
  "update_moment_per_elem_norm",
  "schedule_free_eval_params",
}


def transforms():
  """Returns the names of the functions of optax that make a transform, or do not say what they make."""
  for module in (optax, contrib):
    for name, value in vars(module).items():
      if not callable(value) or not name[0].islower():
        continue
      made = inspect.signature(value).return_annotation
      if made is inspect.Signature.empty or "GradientTransformation" in str(made):
        yield name


THERE = {*transforms(), "MultiSteps"} - OTHERS
ROWS = {name: row for name, row in TABLE.items() if not isinstance(row, str) and name.split(",")[0] in THERE}


def test_every_transform_of_optax_is_in_the_table():
  assert not THERE - TABLE.keys(), "give them a row, or the name of the row that has them in it"
  assert not {row for row in TABLE.values() if isinstance(row, str)} - TABLE.keys()


def way_of(params):
  return np.concatenate([np.ravel(np.asarray(params[k], np.float64) - PARAMS[k]) for k in ("w", "b")])


@functools.cache
def plain_way(name):
  """Returns how parameters move by plain optax in float32."""
  tx = optax.with_extra_args_support(ROWS[name].make())
  params, state = PARAMS, tx.init(PARAMS)
  for _ in range(STEPS):
    value, grads = jax.value_and_grad(loss_fn)(params, BATCH)
    takes_loss = not name.startswith("sam")
    updates, state = tx.update(grads, state, params, **({"value": value} if takes_loss else {}))
    params = optax.apply_updates(params, updates)
  return way_of(params)


# Of a loss scale others see no more than these.
UNDER_FP16 = words(
  "adam MultiSteps apply_if_finite polyak_sgd momo momo_adam reduce_on_plateau sam schedule_free_sgd mechanize"
)


@pytest.mark.parametrize(
  ("name", "policy"),
  [
    pytest.param(
      name, policy, marks=[pytest.mark.slow] if policy == "fp16" and name not in UNDER_FP16 else []
    )
    for name, row in ROWS.items()
    if isinstance(row, Runs)
    for policy in row.policies
  ],
)
def test_a_step_goes_the_way_of_plain_optax(name, policy):
  row, expected = ROWS[name], plain_way(name)
  if not np.isfinite(expected).all():
    pytest.skip("of this optax it makes NaN")
  assert np.linalg.norm(expected) > 1e-3
  step = mpjax.make_train_step(loss_fn, row.make(), POLICIES[policy])
  state = step.init(PARAMS)
  for _ in range(STEPS):
    state, _ = step(state, BATCH)
  way = way_of(step.user_state(state)[0])
  if policy == "bf16_lean":
    assert np.linalg.norm(way - expected) < row.lean * np.linalg.norm(expected)
  else:
    np.testing.assert_allclose(way, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
@pytest.mark.parametrize("name", [name for name, row in ROWS.items() if isinstance(row, Refused)])
def test_what_cannot_run_in_a_step_is_refused_by_init(name, policy):
  step = mpjax.make_train_step(loss_fn, ROWS[name].make(), policy)
  with pytest.raises(ValueError, match=ROWS[name].match) as raised:
    step.init(PARAMS)
  assert "write the loop yourself" in str(raised.value)
  assert "tx.update(grads, opt_state, params" in str(raised.value)
