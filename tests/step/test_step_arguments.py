"""What `make_train_step` and a step are given: what they refuse, and how they show themselves."""

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import mpjax
from tests.step._problems import BATCH, PARAMS, Model, loss_fn, mesh, nnx_loss


def make(loss=loss_fn, tx=None, policy="fp32", **options):
  return mpjax.make_train_step(loss, tx or optax.sgd(0.1), policy, **options)


STEP = make()


def run(loss, accumulate=1, mesh=None, **init):
  step = make(loss, accumulate=accumulate, mesh=mesh)
  return step(step.init(PARAMS, **init), BATCH)


def in_place(policy="fp32", tx=lambda step: step.tx, loss=nnx_loss, **arguments):
  step = make(loss, policy=policy)
  model = Model(nnx.Rngs(0))
  step(model, nnx.Optimizer(model, tx(step), wrt=nnx.Param), BATCH, **arguments)


def nnx_dropout(model, batch, rng):
  keep = jax.random.bernoulli(rng, 0.5, batch["x"].shape)
  return nnx_loss(model, batch | {"x": batch["x"] * keep})


def used_twice(step, again=lambda step: step):
  state = step.init(PARAMS)
  step(state, BATCH)
  again(step)(state, BATCH)


KEY = jax.random.key(0)
by_casts = {"base": "bf16", "autocast": False}
to_gather = lambda dtype: {"base": "bf16", "gather_dtype": dtype}
TO_FP8 = {"base": "bf16", "reduce_dtype": "float8_e5m2"}
SCALED = mpjax.dynamic_loss_scale(optax.sgd(0.1))
INTEGERS = {"w": np.ones(2, np.float32), "i": np.arange(2)}
stateful = lambda p, b, model_state: loss_fn(p, b)
VALUE_ERRORS = [
  (lambda: make(policy={"base": "fp8", "autocast": False}), ["fp8", "autocast: true"]),
  (lambda: make(policy=by_casts | {"overrides": {"head": "fp32"}}), ["overrides", "autocast: true"]),
  (lambda: make(policy={"base": "bf16", "reduce_dtype": "float32"}), ["reduce_dtype='float32'", "mesh="]),
  (lambda: make(policy=TO_FP8, mesh=mesh(data=8)), ["float8_e5m2", "float32"]),
  (lambda: make(mesh=jax.make_mesh((8,), ("rows",))), ["'rows'", "data, fsdp, tensor"]),
  (lambda: make(sharding={}), ["mesh="]),
  (lambda: run(loss_fn, mesh=mesh(data=3)), ["batch['x']", "[16, 4]", "3 devices"]),
  (lambda: make(gather="block"), ["gather='block' says when to gather", "pass mesh="]),
  (lambda: make(gather="block", mesh=mesh(data=8)), ["gather='block' needs", "axis fsdp: the mesh has"]),
  (lambda: make(policy=to_gather("float64")), ["gather_dtype='float64': expected compute_dtype"]),
  (lambda: make(policy=to_gather("float8_e4m3fn")), ["gather_dtype='float8_e4m3fn'", "needs a mesh"]),
  (lambda: make(lambda p, b, rng, row_rngs: 0.0), ["'rng' and 'row_rngs'"]),
  (lambda: make(policy=by_casts | {"accum_dtype": "float32"}), ["accum_dtype", "autocast: true"]),
  (lambda: make(tx=SCALED, policy="fp16").init(PARAMS), ["2 loss scales", "pass tx without its own"]),
  (lambda: make(offload="optimizer"), ["pass mesh=", "one device is enough"]),
  (lambda: make(lambda p, b: p["w"].sum()).init(INTEGERS), ["'i' is int", "model_state"]),
  (lambda: run(loss_fn, accumulate=3), ["16 rows", "accumulate=3"]),
  (lambda: run(lambda p, b: p["w"]), ["floating scalar", "[4,1]"]),
  (lambda: run(lambda p, b: (loss_fn(p, b), 1.0)), ["metrics", "dict"]),
  (lambda: run(lambda p, b: (loss_fn(p, b), {"loss": 1.0})), ["'loss'", "rename"]),
  (lambda: run(lambda p, b, rng: loss_fn(p, b)), ["takes 'rng'", "step.init(..., rng=...)"]),
  (lambda: run(lambda p, b, row_rngs: loss_fn(p, b)), ["takes 'row_rngs'", "step.init(..., rng=...)"]),
  (lambda: run(stateful), ["takes 'model_state'", "step.init(..., model_state=...)"]),
  (lambda: run(loss_fn, rng=KEY), ["does not take 'rng'"]),
  (lambda: run(loss_fn, model_state={"a": np.ones(1)}), ["does not take 'model_state'"]),
  (lambda: run(stateful, model_state={}), ["1 value(s)", "model_state"]),
  (lambda: in_place("bf16_pure"), ["is float32", "param_dtype=bfloat16"]),
  (lambda: in_place(tx=lambda step: optax.sgd(0.1)), ["step.tx"]),
  (lambda: in_place(loss=nnx_dropout), ["takes 'rng'", "step(model, optimizer, batch, rng=...)"]),
  (lambda: in_place(rng=KEY), ["does not take 'rng'"]),
  (lambda: used_twice(STEP), ["this TrainState is deleted", "donate=False"]),
  (lambda: run(lambda params, batch: None), ["loss of type NoneType"]),
  (lambda: STEP.init({"w": 1.0}), ["parameter 'w' is a float", "an array"]),
]
first = lambda: STEP.init(PARAMS)
TYPE_ERRORS = [
  (lambda: STEP(first(), first()), ["a TrainState instead of a batch"]),
  (lambda: STEP(PARAMS, BATCH), ["expected a TrainState, not a dict", "step.init(params)"]),
  (lambda: STEP(BATCH, first()), ["swapped", "step(state, batch)"]),
  (lambda: STEP(Model(nnx.Rngs(0)), BATCH), ["not a Model", "step.init(model)", "optimizer"]),
  (lambda: STEP(first()), ["1 argument(s)", "step(state, batch)"]),
  (lambda: STEP(first(), optax.sgd(0.1), BATCH), ["3 arguments", "step(state, (x, y))"]),
  (lambda: mpjax.make_train_step(optax.sgd(0.1), loss_fn, "fp32"), ["swapped"]),
  (lambda: make(3), ["loss_fn is a int: expected a function"]),
]


@pytest.mark.parametrize(
  ("kind", "act", "words"),
  [(kind, *row) for kind, rows in ((ValueError, VALUE_ERRORS), (TypeError, TYPE_ERRORS)) for row in rows],
  ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_misuse_is_named(kind, act, words):
  with pytest.raises(kind) as error:
    act()
  assert [word for word in words if word not in str(error.value)] == []


def test_leaves_of_different_numbers_of_rows_are_named_where_rows_are_divided():
  loss = lambda p, b: (b["x"] @ p["w"]).mean() + b["more"]["y"].mean() + b["weight"]
  batch = {"x": np.ones((4, 4)), "more": {"y": np.ones((2, 1))}, "weight": np.ones(())}
  whole = make(loss, donate=False)  # nothing is divided: the loss may do as it likes
  state = whole.init(PARAMS)
  whole(state, batch)
  for divided, word in (
    ({"accumulate": 2}, "accumulate=2"),
    ({"mesh": mesh(data=1)}, "mesh="),
    ({"mesh": mesh(data=2)}, "mesh="),
  ):
    step = make(loss, donate=False, **divided)
    for act in (step, step.gradients):
      with pytest.raises(ValueError, match="rows") as error:
        act(state, batch)
      assert all(part in str(error.value) for part in ("'x'", " 4", "'more/y'", " 2", word)), error.value


def test_a_step_and_a_state_are_shown_in_a_few_words():
  step = make(tx=optax.adam(0.1), policy="fp16", accumulate=2, mesh=mesh(data=2, fsdp=2))
  assert repr(step) == (
    "TrainStep(loss_fn, StepOptions(policy='fp16', accumulate=2, mesh={'data': 2, 'fsdp': 2}))"
  )
  state, _ = step(step.init(PARAMS), BATCH)
  assert repr(state).startswith("TrainState(step=1; params: 2 arrays, 20 B, float32; opt_state: ")
  assert len(repr(state)) < 160
  shapes = jax.eval_shape(step.init, PARAMS)
  assert "params: 2 arrays, 20 B, float32" in repr(shapes)
  assert "NamedSharding" in repr(step.layout.shardings(shapes))
