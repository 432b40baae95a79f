"""`make_train_step` inside `jax.set_mesh` of explicit axes, with and without a mesh of its own."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import mpjax

X = np.random.default_rng(0).normal(size=(16, 64)).astype(np.float32)
Y = np.random.default_rng(1).integers(0, 8, 16)
WEIGHTS = {
  "in": np.random.default_rng(2).normal(size=(64, 64)).astype(np.float32) / 8,
  "out": np.random.default_rng(3).normal(size=(64, 8)).astype(np.float32) / 8,
}
FP16 = {"base": "fp16", "loss_scaling": {"init_scale": 1024}}


def explicit_mesh():
  return jax.make_mesh((4, 2), ("fsdp", "tensor"), axis_types=(AxisType.Explicit,) * 2)


def at(*spec):
  return None if jax.sharding.get_abstract_mesh().empty else P(*spec)


def divided(p, batch):
  """Says itself how its products are divided."""
  x = jax.nn.gelu(jnp.dot(batch["x"], p["in"], out_sharding=at("fsdp", "tensor")))
  logits = jnp.dot(x, p["out"], out_sharding=at("fsdp", None))
  right = (logits.argmax(-1) == batch["y"]).sum()
  return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean(), {"right": right}


def plain(p, batch):
  logits = jax.nn.gelu(batch["x"] @ p["in"]) @ p["out"]
  return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()


class Divided(nnx.Module):
  def __init__(self, rngs):
    spec = {} if at() is None else {"kernel_metadata": {"out_sharding": ("fsdp", "tensor")}}
    self.layer = nnx.Linear(64, 8, rngs=rngs, **spec)

  def __call__(self, x):
    return self.layer(x, out_sharding=at("fsdp", None))


def nnx_loss(model, batch):
  return optax.softmax_cross_entropy_with_integer_labels(model(batch["x"]), batch["y"]).mean()


def types(tree):
  return jax.tree.map(jax.typeof, tree)


def take_steps(step, state, batch, count=3):
  losses = []
  for _ in range(count):
    state, metrics = step(state, batch)
    losses.append(metrics["loss"].item())
  return state, losses


def counted(fun):
  """Returns a function and the list to which each of its traces adds an entry."""
  traces = []

  def run(p, batch):
    traces.append(1)
    return fun(p, batch)

  return run, traces


@pytest.mark.parametrize("policy", ["bf16", FP16], ids=str)
def test_a_step_leaves_arrays_as_their_types_say(policy):
  tx = optax.adam(1e-2)
  _, expected = take_steps(*one_device(divided, tx, "fp32"))
  with jax.set_mesh(explicit_mesh()):
    fun, traces = counted(divided)
    step = mpjax.make_train_step(fun, tx, policy, accumulate=2)
    params = {
      "in": jax.device_put(WEIGHTS["in"], P(None, "tensor")),
      "out": jax.device_put(WEIGHTS["out"], P()),
    }
    before = step.init(params)
    assert types(before.params) == types(params)
    batch = jax.device_put({"x": X, "y": Y}, P("fsdp"))
    expected_types = types(before)
    state, losses = take_steps(step, before, batch, 1)
    once = len(traces)
    state, more = take_steps(step, state, batch, 2)
    assert types(state) == expected_types
    assert len(traces) == once
  np.testing.assert_allclose(losses + more, expected, rtol=1e-2)


def test_moments_of_weakly_typed_parameters_are_divided_as_they_are():
  with jax.set_mesh(explicit_mesh()):
    params = {"w": jax.device_put(jnp.full((8, 8), 0.1), P(None, "tensor"))}
    state = mpjax.make_train_step(lambda p, batch: (p["w"] * batch).mean(), optax.adam(1e-2), "fp16").init(
      params
    )
    moments = [leaf for leaf in jax.tree.leaves(state.opt_state) if leaf.ndim]
    assert [jax.typeof(leaf) for leaf in moments] == [jax.typeof(state.params["w"])] * 2


def one_device(fun, tx, policy):
  step = mpjax.make_train_step(fun, tx, policy)
  return step, step.init(WEIGHTS), {"x": X, "y": Y}


def test_a_module_of_nnx_keeps_its_shardings():
  def losses():
    model = Divided(nnx.Rngs(0))
    step = mpjax.make_train_step(nnx_loss, optax.adam(1e-2), "bf16")
    state = step.init(model)
    before = types(state)
    batch = {"x": jnp.asarray(X), "y": jnp.asarray(Y)}
    state, found = take_steps(step, state, batch if at() is None else jax.device_put(batch, P("fsdp")))
    assert types(state) == before
    return found, before

  expected, _ = losses()
  with jax.set_mesh(explicit_mesh()):
    found, kept = losses()
  assert kept.params["layer"]["kernel"].sharding.spec == P("fsdp", "tensor")
  np.testing.assert_allclose(found, expected, rtol=1e-2)


@pytest.mark.parametrize("placed", [False, True])
def test_a_mesh_of_its_own_may_be_the_one_that_is_set(placed):
  mesh = explicit_mesh()

  def run():
    fun, traces = counted(plain)
    step = mpjax.make_train_step(fun, optax.adam(1e-2), FP16, mesh=mesh)
    state = step.init(WEIGHTS)
    before = types(state)
    batch = jax.device_put({"x": X, "y": Y}, step.layout.batch_sharding) if placed else {"x": X, "y": Y}
    _, grads = step.gradients(state, batch)
    state, losses = take_steps(step, state, batch, 1)
    once = len(traces)
    state, more = take_steps(step, state, batch, 2)
    assert types(state) == before
    assert types(grads) == types(state.params)
    assert len(traces) == once
    return losses + more, state.params["in"].sharding

  losses, _ = run()
  with jax.set_mesh(mesh):
    inside, sharding = run()
  assert inside == losses
  assert sharding == jax.NamedSharding(mesh, P("fsdp", None))


def test_a_state_may_be_made_where_it_lies():
  with jax.set_mesh(explicit_mesh()):
    step = mpjax.make_train_step(plain, optax.adam(1e-2), "bf16", mesh=explicit_mesh())
    make = lambda: step.init(jax.tree.map(jnp.asarray, WEIGHTS))
    state = jax.jit(make, out_shardings=step.layout.shardings(jax.eval_shape(make)))()
    assert types(state) == types(step.init(WEIGHTS))
