"""What `make_train_step` and a step are given: what they refuse, and how they show themselves."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import mpjax
from tests.step._problems import BATCH, PARAMS, Model, loss_fn, nnx_loss


@pytest.mark.parametrize(
  ("policy", "word"),
  [
    ({"base": "fp8", "autocast": False}, "fp8.*autocast: true"),
    ({"base": "fp8", "compute_dtype": "float32"}, "fp8.*compute_dtype='float32'"),
    ({"base": "bf16", "autocast": False, "overrides": {"head": "fp32"}}, "overrides.*autocast: true"),
    ({"base": "bf16", "reduce_dtype": "float32"}, "reduce_dtype"),
    ({"base": "bf16", "autocast": False, "accum_dtype": "float32"}, "accum_dtype.*autocast: true"),
    ({"base": "bf16", "autocast": False, "grad_dtype": "bfloat16"}, "grad_dtype.*autocast: true"),
    ({"base": "bf16", "optimizer_dtype": "float16"}, "optimizer_dtype"),
    ("fp61", "fp61"),
  ],
)
def test_what_a_policy_asks_for_is_done_or_refused(policy, word):
  with pytest.raises(ValueError, match=word):
    mpjax.make_train_step(loss_fn, optax.sgd(0.1), policy)


def scaled_sgd():
  return mpjax.dynamic_loss_scale(optax.sgd(0.1))


@pytest.mark.parametrize(
  ("act", "words"),
  [
    (
      lambda: mpjax.make_train_step(loss_fn, scaled_sgd(), "fp16").init(PARAMS),
      ["2 loss scales", "take the others away"],
    ),
    (lambda: mpjax.make_train_step(loss_fn, optax.sgd(0.1), "fp32", accumulate=0), ["accumulate=0"]),
    (lambda: run(loss_fn, accumulate=3), ["16 rows", "accumulate=3"]),
    (lambda: run(lambda p, b: p["w"]), ["floating scalar", "[4, 1]"]),
    (lambda: run(lambda p, b: jnp.int32(1)), ["int32"]),
    (lambda: run(lambda p, b: (loss_fn(p, b), {}, {})), ["3 value(s)", "(loss, metrics)"]),
    (lambda: run(lambda p, b: (loss_fn(p, b), 1.0)), ["metrics", "dict"]),
    (lambda: run(lambda p, b: (loss_fn(p, b), {"loss": 1.0})), ["'loss'", "rename"]),
    (lambda: run(lambda p, b, rng: loss_fn(p, b)), ["takes 'rng'", "step.init(..., rng=...)"]),
    (lambda: run(lambda p, b, row_rngs: loss_fn(p, b)), ["takes 'row_rngs'", "step.init(..., rng=...)"]),
    (
      lambda: run(lambda p, b, model_state: loss_fn(p, b)),
      ["takes 'model_state'", "step.init(..., model_state=...)"],
    ),
    (lambda: run(loss_fn, rng=jax.random.key(0)), ["does not take 'rng'"]),
    (lambda: run(loss_fn, model_state={"a": jnp.ones(1)}), ["does not take 'model_state'"]),
    (lambda: run(lambda p, b, model_state: loss_fn(p, b), model_state={}), ["1 value(s)", "model_state"]),
    (lambda: in_place("bf16_pure", lambda step: step.tx), ["is float32", "param_dtype=bfloat16"]),
    (lambda: in_place("fp32", lambda step: optax.sgd(0.1)), ["step.tx"]),
    (
      lambda: in_place("fp32", lambda step: step.tx, nnx_dropout),
      ["takes 'rng'", "step(model, optimizer, batch, rng=...)"],
    ),
    (lambda: in_place("fp32", lambda step: step.tx, rng=jax.random.key(0)), ["does not take 'rng'"]),
    (
      lambda: used_twice(lambda step, state: step(state, BATCH)),
      ["this TrainState is deleted", "donate=False"],
    ),
    (lambda: used_twice(lambda step, state: step.gradients(state, BATCH)), ["deleted", "the one it returns"]),
    (lambda: used_twice(lambda step, state: step(state, BATCH), mesh=8), ["this TrainState is deleted"]),
    (lambda: run(lambda params, batch: None), ["loss of type NoneType"]),
    (lambda: run(lambda params, batch: [loss_fn(params, batch), {}]), ["loss of type list"]),
    (lambda: STEP.init({"w": 1.0}), ["parameter 'w' is a float", "an array"]),
  ],
)
def test_misuse_is_named(act, words):
  with pytest.raises(ValueError) as error:
    act()
  assert all(word in str(error.value) for word in words), error.value


@pytest.mark.parametrize(
  ("divided", "word"),
  [({"accumulate": 2}, "accumulate=2"), ({"mesh": 1}, "mesh="), ({"mesh": 2}, "mesh="), ({}, None)],
)
def test_leaves_of_different_numbers_of_rows_are_named_where_rows_are_divided(divided, word):
  mesh = {"mesh": jax.make_mesh((divided["mesh"],), ("data",))} if "mesh" in divided else {}
  loss = lambda p, b: jnp.mean(b["x"] @ p["w"]) + jnp.mean(b["more"]["y"]) + b["weight"]
  step = mpjax.make_train_step(loss, optax.sgd(0.1), "fp32", donate=False, **{**divided, **mesh})
  batch = {"x": jnp.ones((4, 4)), "more": {"y": jnp.ones((2, 1))}, "weight": jnp.ones(())}
  state = step.init({"w": jnp.ones((4, 1))})
  if word is None:  # nothing is divided: the loss may do as it likes
    step(state, batch)
    return
  for act in (step, step.gradients):
    with pytest.raises(ValueError, match="rows") as error:
      act(state, batch)
    assert all(part in str(error.value) for part in ("'x'", " 4", "'more/y'", " 2", word)), error.value


def run(loss, accumulate=1, **init):
  step = mpjax.make_train_step(loss, optax.sgd(0.1), "fp32", accumulate=accumulate)
  return step(step.init(PARAMS, **init), BATCH)


def in_place(policy, tx, loss=nnx_loss, **arguments):
  step = mpjax.make_train_step(loss, optax.sgd(0.1), policy)
  model = Model(nnx.Rngs(0))
  step(model, nnx.Optimizer(model, tx(step), wrt=nnx.Param), BATCH, **arguments)


def nnx_dropout(model, batch, rng):
  keep = jax.random.bernoulli(rng, 0.5, batch["x"].shape)
  return nnx_loss(model, batch | {"x": batch["x"] * keep})


def used_twice(again, mesh=1):
  mesh = jax.make_mesh((mesh,), ("data",)) if mesh > 1 else None
  step = mpjax.make_train_step(loss_fn, optax.sgd(0.1), "fp32", mesh=mesh)
  state = step.init(PARAMS)
  step(state, BATCH)
  again(step, state)


STEP = mpjax.make_train_step(loss_fn, optax.sgd(0.1), "fp32")


@pytest.mark.parametrize(
  ("act", "words"),
  [
    (lambda state: STEP(state, state), ["a TrainState in place of a batch"]),
    (lambda state: STEP(PARAMS, BATCH), ["expected a TrainState, not a dict", "step.init(params)"]),
    (lambda state: STEP(BATCH, state), ["swapped", "step(state, batch)"]),
    (lambda state: STEP.gradients(BATCH, state), ["swapped", "step(state, batch)"]),
    (lambda state: STEP.explain(PARAMS, BATCH), ["expected a TrainState, not a dict"]),
    (
      lambda state: STEP(Model(nnx.Rngs(0)), BATCH),
      ["expected a TrainState, not an nnx.Module", "step.init(model)", "optimizer"],
    ),
    (lambda state: STEP(state), ["1 argument(s)", "step(state, batch)"]),
    (lambda state: STEP(state, BATCH, rng=jax.random.key(0)), ["step.init(..., rng=...)"]),
    (lambda state: STEP(state, optax.sgd(0.1), BATCH), ["TrainState", "nnx.Module", "step(state, batch)"]),
  ],
)
def test_arguments_that_are_none_of_a_step_are_named(act, words):
  with pytest.raises(TypeError) as error:
    act(STEP.init(PARAMS))
  assert all(word in str(error.value) for word in words), error.value


@pytest.mark.parametrize(
  ("loss", "tx", "word"),
  [
    (optax.sgd(0.1), loss_fn, "swapped"),
    (loss_fn, 3, "tx is a int: expected an optax transform"),
    (3, optax.sgd(0.1), "loss_fn is a int: expected a function"),
  ],
)
def test_what_a_step_cannot_be_made_of_is_named(loss, tx, word):
  with pytest.raises(TypeError, match=word):
    mpjax.make_train_step(loss, tx, "fp32")


def test_an_error_of_the_loss_is_not_taken_for_a_deleted_state():
  def loss(params, batch):
    raise RuntimeError("of the loss")

  step = mpjax.make_train_step(loss, optax.sgd(0.1), "fp32")
  with pytest.raises(RuntimeError, match="of the loss"):
    step(step.init(PARAMS), BATCH)


def test_update_in_place_is_the_step_of_three_arguments():
  models = [Model(nnx.Rngs(0)), Model(nnx.Rngs(0))]
  step = mpjax.make_train_step(nnx_dropout, optax.sgd(0.1), "fp32")
  one, other = (nnx.Optimizer(model, step.tx, wrt=nnx.Param) for model in models)
  for _ in range(2):
    losses = [
      step(models[0], one, BATCH, rng=jax.random.key(1))["loss"],
      step.update_in_place(models[1], other, BATCH, rng=jax.random.key(1))["loss"],
    ]
    assert losses[0] == losses[1]
  np.testing.assert_array_equal(models[0].inner.kernel[...], models[1].inner.kernel[...])


def test_a_step_and_a_state_are_shown_in_a_few_words():
  devices = jax.make_mesh((2, 2), ("data", "fsdp"), devices=jax.devices()[:4])
  step = mpjax.make_train_step(loss_fn, optax.adam(0.1), "fp16", accumulate=2, mesh=devices)
  assert repr(step) == (
    "TrainStep(loss_fn, StepOptions(policy='fp16', accumulate=2, mesh={'data': 2, 'fsdp': 2}))"
  )
  state, _ = step(step.init(PARAMS), BATCH)
  assert repr(state).startswith("TrainState(step=1; params: 2 arrays, 20 B, float32; opt_state: ")
  assert len(repr(state)) < 160
  step(state, BATCH)
  assert "step=deleted" in repr(state)
  shapes = jax.eval_shape(step.init, PARAMS)
  assert "params: 2 arrays, 20 B, float32" in repr(shapes)
  assert "params: 2 of NamedSharding" in repr(step.layout.shardings(shapes))
  shown = []
  jax.jit(lambda state: shown.append(repr(state)) or state.step)(step.init(PARAMS, rng=None))
  assert "params: 2 arrays, 20 B, float32" in shown[0]


def test_other_policies_and_no_mesh_keep_the_other_options():
  devices = jax.make_mesh((4,), ("data",), devices=jax.devices()[:4])
  policy = {"base": "bf16", "reduce_dtype": "bfloat16"}
  tx = optax.sgd(0.1)
  step = mpjax.make_train_step(
    loss_fn, tx, policy, accumulate=2, recompute="dots", donate=False, mesh=devices
  )
  other, whole = step.with_policy("fp16"), step.without_mesh()
  for made in (other, whole):
    assert made.fun is loss_fn
    assert made.inner_tx is tx
    assert (made.accumulate, made.options.recompute, made.options.donate) == (2, "dots", False)
  assert other.layout is step.layout
  assert other.policy == mpjax.get_policy("fp16")
  assert whole.layout is None
  assert whole.policy.reduce_dtype is None
  assert whole.without_mesh() is whole


def test_integer_parameters_are_named():
  step = mpjax.make_train_step(lambda p, b: p["w"].sum(), optax.sgd(0.1), "fp32")
  with pytest.raises(ValueError, match=r"'i' is int32.*model_state"):
    step.init({"w": jnp.ones(2), "i": jnp.arange(2)})


def test_several_loss_scales_in_the_optimiser_are_refused():
  groups = {name: mpjax.dynamic_loss_scale(optax.sgd(0.1)) for name in "ab"}
  tx = optax.partition(groups, {"x": "a", "y": "b"})
  step = mpjax.make_train_step(lambda p, b: p["x"].sum() + p["y"].sum(), tx, "fp32")
  with pytest.raises(ValueError, match=r"2 loss scales, at.*round the whole"):
    step.init({"x": jnp.ones(2), "y": jnp.ones(2)})
