"""Optimisers and transforms of optax in a training step: the way of plain optax, or one clear error.

The gradient is exact in any float, but for the rounding of parameters, so what is compared is the optimiser.
"""

import collections
import functools

import jax
import numpy as np
import optax
import optax.contrib as contrib
import pytest

import mpjax
from mpjax.optim import is_quantized

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of optax, of what it still has

STEPS = 4
SHAPE = (64, 64)  # as many entries as few bytes are for
RNG = np.random.default_rng(0)
# What bfloat16 has exactly.
PARAMS = {"w": (RNG.integers(-64, 64, SHAPE) / 128).astype(np.float32), "b": np.zeros(64, np.float32)}
# Far from the start, so that no rounding turns a sign.
AWAY = RNG.choice([-1, 1], SHAPE) * RNG.uniform(0.5, 1.5, SHAPE)
BATCH = {"w": (PARAMS["w"] + AWAY).astype(np.float32), "b": np.full(64, 0.5, np.float32)}
POLICIES = {
  "fp32": "fp32",
  "fp16": {"base": "fp16", "loss_scaling": {"init_scale": 256.0}},
  "bf16_lean": "bf16_lean",
}


def loss_fn(params, batch):
  return 0.5 * sum(((params[k] - batch[k]).astype(np.float32) ** 2).sum() for k in params) / 64


# A function that makes an optimiser, and the fields of its state that bf16_lean has in few bytes.
Runs = collections.namedtuple("Runs", "make few", defaults=[""])
words = str.split
half = {"w": True, "b": False}
sgd = lambda: optax.sgd(0.1)
momentum = lambda: optax.sgd(0.1, momentum=0.9)
# With a learning rate alone.
BY_NAME = {
  "adabelief adam adamax adamw lamb radam": "mu nu",
  "lion novograd muon": "mu",
  "rmsprop sm3": "nu",
  "fromage sign_sgd": "",
  "adadelta": "e_g e_x",
  "adafactor": "v",
  "adagrad": "sum_of_squares",
  "adan": "m v n g",
  "amsgrad": "mu nu nu_max",
  "signum": "ema",
  "optimistic_adam_v2": "mu nu previous_gradient",
  "rprop": "step_sizes prev_updates",
  "ademamix": "m1 m2 nu",
  "madgrad": "grad_sum_sq s",
  "momo_adam": "exp_avg exp_avg_sq",
  "simplified_ademamix": "m n",
}


def named(name):
  return lambda: (getattr(optax, name, None) or getattr(contrib, name))(1e-2)


sam = lambda **options: contrib.sam(sgd(), optax.chain(contrib.normalize(), optax.sgd(0.5)), **options)

# fmt: off
TABLE = {
  **{name: Runs(named(name), few) for names, few in BY_NAME.items() for name in words(names)},
  # optax
  "lars": Runs(named("lars"), "trace"),
  "apply_every": Runs(lambda: optax.chain(optax.apply_every(2), optax.sgd(0.1))),
  "apply_if_finite": Runs(lambda: optax.apply_if_finite(momentum(), 3), "trace"),
  "clip": Runs(lambda: optax.chain(
    optax.clip(0.01), optax.clip_by_block_rms(0.02), optax.adaptive_grad_clip(0.5),
    optax.clip_by_global_norm(1.0),
    optax.centralize(), optax.zero_nans(), optax.add_decayed_weights(1e-3), optax.scale(0.5),
    optax.scale_by_schedule(optax.linear_schedule(1.0, 0.5, 4)), optax.scale_by_param_block_norm(),
    optax.scale_by_param_block_rms(), optax.stateless(lambda updates, params: updates),
    optax.stateless_with_tree_map(lambda g, p: g), optax.with_extra_args_support(optax.identity()),
    optax.scale_by_learning_rate(0.1),
  )),
  "inject_hyperparams": Runs(lambda: optax.inject_hyperparams(optax.adamw)(1e-2), "mu nu"),
  "masked": Runs(lambda: optax.chain(optax.masked(optax.trace(0.9), half), sgd()), "trace"),
  "monitor": Runs(lambda: optax.chain(
    optax.monitor({"norm": optax.measure_with_ema(optax.tree_utils.tree_norm, 0.9)}),
    optax.snapshot("norm", optax.tree_utils.tree_norm),
    sgd(),
  )),
  "partition": Runs(lambda: optax.partition({"a": momentum(), "b": sgd()}, {"w": "a", "b": "b"}), "trace"),
  "polyak_sgd": Runs(lambda: optax.polyak_sgd(0.1)),
  "scale_by_lbfgs": Runs(lambda: optax.lbfgs(0.1, linesearch=None)),
  "set_to_zero": Runs(lambda: optax.partition({True: optax.set_to_zero(), False: sgd()}, half)),
  "sgd": Runs(momentum, "trace"),
  "MultiSteps": Runs(lambda: optax.MultiSteps(optax.sgd(0.1), 2).gradient_transformation()),
  # optax.contrib
  "prodigy": Runs(lambda: contrib.prodigy(estim_lr0=1e-2), "exp_avg exp_avg_sq grad_sum"),
  "reduce_on_plateau": Runs(
    lambda: optax.chain(sgd(), contrib.reduce_on_plateau(patience=1, rtol=0.9, factor=0.5))),
  "sam": Runs(lambda: sam(sync_period=2)),
  "schedule_free_sgd": Runs(lambda: contrib.schedule_free_sgd(0.1)),
}
# fmt: on
# What cannot run in a step, and what the error says.
REFUSED = {
  "lbfgs": (optax.lbfgs, "value_fn"),
  "lookahead": (lambda: optax.lookahead(sgd(), 2, 0.5), "'fast'"),
  "scale_by_backtracking_linesearch": (lambda: optax.scale_by_backtracking_linesearch(5), "value_fn"),
  "scale_by_zoom_linesearch": (lambda: optax.scale_by_zoom_linesearch(5), "value_fn"),
  "dpsgd": (lambda: contrib.dpsgd(0.1, 1.0, 0.0, 0), "each example"),
  "sam, opaque": (lambda: contrib.sam(sgd(), sgd(), opaque_mode=True), "grad_fn"),
  "sophia": (lambda: contrib.sophia(1e-2), "obj_fn"),
}
# The first update gives its state another structure, which a loss scale refuses.
IN_FLOAT32_ALONE = ("monitor",)
# How far bf16_lean goes from plain optax's way, in its length; else 0.005, and 0.08 with moments.
FAR = {
  "lars": 0.16,  # its updates are as small as a step of 24 bits
  "scale_by_lbfgs": 0.4,
}
THERE = {*vars(optax), *vars(contrib)}  # not all of them in older versions
RUNS = {name: row for name, row in TABLE.items() if name in THERE}


def given(name, value, grads):
  """Returns what an update of plain optax is given beside gradients, state and parameters."""
  return {} if name.startswith("sam") else {"value": value, "grad": grads}


def test_a_float32_step_has_an_optimiser_compute_what_plain_optax_does():
  for name, row in RUNS.items():
    step, tx = make_step(name, "fp32"), optax.with_extra_args_support(row.make())
    state = jax.eval_shape(step.init, PARAMS)
    program = lambda fun, state=state: str(
      jax.make_jaxpr(fun)(np.float32(0), PARAMS, state.opt_state, state.params)
    )
    ours = program(lambda value, grads, *args: step.tx.update(grads, *args, value=value))
    plain = lambda value, grads, *args: tx.update(grads, *args, **given(name, value, grads))
    assert ours == program(plain), name
    read = jax.tree.leaves(jax.eval_shape(step.loss_and_gradients, state, BATCH)[1])
    assert len(read) == (1 if name == "set_to_zero" else 2), name


def test_moments_alone_are_in_few_bytes():
  for name, row in RUNS.items():
    if name in IN_FLOAT32_ALONE:
      continue
    state = jax.eval_shape(make_step(name, "bf16_lean").init, PARAMS)
    leaves = jax.tree_util.tree_leaves_with_path(state.opt_state, is_leaf=is_quantized)
    fields = [[key.name for key in path if hasattr(key, "name")][-1] for path, x in leaves if is_quantized(x)]
    assert fields == row.few.split(), name
    assert state.params["w"].dtype == "bfloat16", name


def make_step(name, policy):
  return mpjax.make_train_step(loss_fn, RUNS[name].make(), POLICIES[policy])


def way_of(params):
  return np.concatenate([np.ravel(np.asarray(params[k], np.float64) - PARAMS[k]) for k in ("w", "b")])


@functools.cache
def plain_way(name):
  """Returns how parameters move by plain optax in float32."""
  tx = optax.with_extra_args_support(RUNS[name].make())

  @jax.jit
  def step(params, state):
    value, grads = jax.value_and_grad(loss_fn)(params, BATCH)
    updates, state = tx.update(grads, state, params, **given(name, value, grads))
    return optax.apply_updates(params, updates), state

  params, state = jax.tree.map(jax.numpy.asarray, PARAMS), tx.init(PARAMS)
  for _ in range(STEPS):
    params, state = step(params, state)
  return way_of(params)


# What differs by policy: kinds of state in few bytes, and what of the loss and of a skip an optimiser sees.
QUICK = {
  "fp32": words("adamw monitor set_to_zero"),
  "fp16": words("MultiSteps apply_if_finite polyak_sgd momo_adam reduce_on_plateau sam schedule_free_sgd"),
  "bf16_lean": words("adam MultiSteps muon scale_by_lbfgs schedule_free_sgd"),
}


@pytest.mark.parametrize(
  ("name", "policy"),
  [
    pytest.param(name, policy, marks=[] if name in QUICK[policy] else [pytest.mark.slow])
    for policy in POLICIES
    for name in RUNS
    if (name in QUICK["fp32"] if policy == "fp32" else name not in IN_FLOAT32_ALONE)
  ],
)
def test_a_step_goes_the_way_of_plain_optax(name, policy):
  expected = plain_way(name)
  if not np.isfinite(expected).all():
    pytest.skip("of this optax it makes NaN")
  assert np.linalg.norm(expected) > 1e-3
  step = make_step(name, policy)
  state = step.init(PARAMS)
  for _ in range(STEPS):
    state, _ = step(state, BATCH)
  way = way_of(step.user_state(state)[0])
  if policy == "bf16_lean":
    far = FAR.get(name, 0.08 if RUNS[name].few else 0.005)
    assert np.linalg.norm(way - expected) < far * np.linalg.norm(expected)
  elif policy == "fp32":
    np.testing.assert_array_equal(way, expected)
  else:
    np.testing.assert_allclose(way, expected, rtol=1e-5, atol=1e-6)


def test_what_cannot_run_in_a_step_is_refused_by_init():
  for name, (make, word) in REFUSED.items():
    for policy in POLICIES if name == "lbfgs" else ("fp32",):
      step = mpjax.make_train_step(loss_fn, make(), POLICIES[policy])
      with pytest.raises(ValueError, match=f"(?=.*{word}).*write the loop yourself.*tx.update"):
        step.init(PARAMS)
