"""`make_train_step` inside `jax.set_mesh` of explicit axes, with and without a mesh of its own."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import AxisType, PartitionSpec as P

import mpjax

RNG = np.random.default_rng(0)
BATCH = {"x": RNG.normal(size=(16, 64)).astype(np.float32), "y": RNG.integers(0, 8, 16)}
WEIGHTS = {
  "in": RNG.normal(size=(64, 64)).astype(np.float32) / 8,
  "out": RNG.normal(size=(64, 8)).astype(np.float32) / 8,
}
FP16 = {"base": "fp16", "loss_scaling": {"init_scale": 1024}}
MESH = jax.make_mesh((4, 2), ("fsdp", "tensor"), axis_types=(AxisType.Explicit,) * 2)


def at(*spec):
  return None if jax.sharding.get_abstract_mesh().empty else P(*spec)


def cross_entropy(logits, batch):
  return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()


def divided(p, batch):
  """Says itself how its products are divided."""
  x = jax.nn.gelu(jnp.dot(batch["x"], p["in"], out_sharding=at("fsdp", "tensor")))
  logits = jnp.dot(x, p["out"], out_sharding=at("fsdp", None))
  return cross_entropy(logits, batch), {"right": (logits.argmax(-1) == batch["y"]).sum()}


def plain(p, batch):
  return cross_entropy(jax.nn.gelu(batch["x"] @ p["in"]) @ p["out"], batch)


class Divided(nnx.Module):
  def __init__(self, rngs):
    spec = {} if at() is None else {"kernel_metadata": {"out_sharding": ("fsdp", "tensor")}}
    self.layer = nnx.Linear(64, 8, rngs=rngs, **spec)

  def __call__(self, x):
    return self.layer(x, out_sharding=at("fsdp", None))


def nnx_loss(model, batch):
  return cross_entropy(model(batch["x"]), batch)


def types(tree):
  return jax.tree.map(jax.typeof, tree)


def trained(loss, policy, params, batch, **options):
  """Takes three steps: the types of a state stay, and the first of them alone traces the loss."""
  traces = []
  counted = lambda p, batch: traces.append(1) or loss(p, batch)
  step = mpjax.make_train_step(counted, optax.adam(1e-2), policy, **options)
  state = step.init(params)
  before, losses, after_first = types(state), [], None
  for _ in range(3):
    state, metrics = step(state, batch)
    losses.append(metrics["loss"].item())
    after_first = len(traces) if after_first is None else after_first
  assert types(state) == before
  assert len(traces) == after_first
  return step, state, losses


def test_a_step_leaves_arrays_as_their_types_say():
  _, _, expected = trained(divided, "fp32", WEIGHTS, BATCH)
  with jax.set_mesh(MESH):
    specs = {"in": P(None, "tensor"), "out": P()}
    params = {name: jax.device_put(x, specs[name]) for name, x in WEIGHTS.items()}
    _, state, losses = trained(divided, FP16, params, jax.device_put(BATCH, P("fsdp")), accumulate=2)
    assert types(state.params) == types(params)
  np.testing.assert_allclose(losses, expected, rtol=1e-2)


def test_a_module_of_nnx_keeps_its_shardings():
  _, _, expected = trained(nnx_loss, "bf16", Divided(nnx.Rngs(0)), BATCH)
  with jax.set_mesh(MESH):
    _, state, found = trained(nnx_loss, "bf16", Divided(nnx.Rngs(0)), jax.device_put(BATCH, P("fsdp")))
    assert jax.typeof(state.params["layer"]["kernel"]).sharding.spec == P("fsdp", "tensor")
  np.testing.assert_allclose(found, expected, rtol=1e-2)


def test_a_mesh_of_its_own_may_be_the_one_that_is_set():
  step, state, losses = trained(plain, FP16, WEIGHTS, BATCH, mesh=MESH)
  with jax.set_mesh(MESH):
    for placed in (BATCH, jax.device_put(BATCH, step.layout.batch_sharding)):
      step, state, inside = trained(plain, FP16, WEIGHTS, placed, mesh=MESH)
      assert inside == losses
      assert state.params["in"].sharding == jax.NamedSharding(MESH, P("fsdp", None))
    for same in (step.gradients(state, placed)[1], jax.jit(step.user_state)(state)[0]):
      assert types(same) == types(state.params)
