"""`model.attention`: which kernel a run takes; splash attention beside the XLA path, on one device and a mesh."""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import mpjax

# Which kernel is taken, and a step in float32 beside another, of what no run of this machine shows.
# What an inspection compiles for another device is not seen from outside.
from mpjax.numerics import reference_state, reference_step
from mpjax.numerics._pass import passes
from mpjax.registry import ModelInfo
from mpjax.zoo.models import GPT, _attention, chosen_attention, gpt_sharding
from mpjax.zoo.models._attention import attention
from tests.casting._jaxprs import equations

FP8 = {"base": "fp8", "fp8": {"emulate": True}}


def info(backend, policy="bf16"):
  return ModelInfo(8, 8, "", "", policy=mpjax.get_policy(policy), backend=backend, recompute="nothing")


def chosen(asked, told, **sizes):
  return chosen_attention(asked, told, **({"heads": 8, "head_dim": 128, "length": 2048} | sizes))


def test_auto_takes_the_kernel_that_there_is():
  for backend, policy, sizes, expected in [
    ("tpu", "bf16", {}, "splash"),
    ("tpu", "bf16", {"length": 1024}, "splash"),
    ("tpu", "bf16", {"length": 512}, "xla"),  # the scores of short rows take less than its statistics
    ("tpu", "bf16", {"length": 2000}, "xla"),
    ("tpu", "bf16", {"head_dim": 64}, "xla"),
    ("tpu", "fp16", {}, "xla"),
    ("tpu", "fp32", {}, "xla"),
    ("cpu", "bf16", {}, "xla"),
    ("gpu", "bf16", {}, "xla"),  # planned on a machine without one
  ]:
    assert chosen("auto", info(backend, policy), **sizes) == expected, (backend, policy, sizes)
    assert chosen("xla", info(backend, policy), **sizes) == "xla"


def test_auto_takes_what_cudnn_takes_on_this_gpu(monkeypatch):
  def cudnn(q, k, v, causal):
    if q.shape[-1] > 128:
      raise NotImplementedError(f"head dim {q.shape[-1]}")
    return jax.lax.max(q, k + v)

  monkeypatch.setattr(_attention, "_cudnn", cudnn)
  monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
  for capability, policy, head_dim, expected in [
    ("9.0", "bf16", 128, "cudnn"),
    ("12.0", "fp16", 64, "cudnn"),
    ("8.0", "bf16", 256, "xla"),
    ("7.5", "fp16", 64, "xla"),
    ("9.0", "fp32", 64, "xla"),
    ("gfx942", "bf16", 64, "xla"),  # of AMD
  ]:
    device = types.SimpleNamespace(compute_capability=capability)
    monkeypatch.setattr(jax, "local_devices", lambda device=device: [device])
    assert chosen("auto", info("gpu", policy), head_dim=head_dim) == expected, (capability, policy)


@pytest.fixture
def interpreted(monkeypatch):
  """Runs splash attention on this CPU."""
  _attention._splash_kernel.cache_clear()
  make = splash_attention_kernel.make_splash_mha
  monkeypatch.setattr(splash_attention_kernel, "make_splash_mha", functools.partial(make, interpret=True))
  yield
  _attention._splash_kernel.cache_clear()


def qkv(heads=2, rows=2):
  return [np.random.default_rng(i).normal(size=(rows, 128, heads, 128)).astype(np.float32) for i in range(3)]


def gradients(implementation, causal, policy=None):
  def loss(q, k, v):
    return jnp.square(attention(q, k, v, causal=causal, implementation=implementation)).sum()

  return jax.value_and_grad(mpjax.autocast(loss, policy) if policy else loss, (0, 1, 2))


def near(found, expected, tolerance):
  for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
    a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
    assert np.linalg.norm(a - b) <= tolerance * np.linalg.norm(b)


@pytest.mark.parametrize("causal", [True, False])
def test_splash_computes_what_the_xla_path_does(interpreted, causal):
  expected = jax.jit(gradients("xla", causal))(*qkv())
  near(jax.jit(gradients("splash", causal, "bf16"))(*qkv()), expected, 0.02)
  if causal:  # the kernel itself, whose rounding is no part of it
    loss = lambda q, k, v: jnp.square(_attention._splash(q, k, v, causal)).sum()
    near(jax.jit(jax.value_and_grad(loss, (0, 1, 2)))(*qkv()), expected, 1e-5)


def on_mesh(mesh, manual):
  """Gradients as an evaluation computes them, all divided by the compiler, or as a step does."""
  grad = gradients("splash", True, "bf16")

  def step(*args):
    if not manual:
      with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        return grad(*args)[1]
    spec = PartitionSpec(manual)
    mapped = jax.shard_map(
      lambda *xs: grad(*xs)[1],
      mesh=mesh,
      in_specs=spec,
      out_specs=spec,
      axis_names=set(manual),
      check_vma=False,
    )
    return mapped(*args)

  return step


@pytest.mark.parametrize("manual", [(), ("data", "fsdp")], ids=["evaluation", "step"])
def test_on_a_mesh_each_device_has_its_rows_and_heads(interpreted, manual):
  mesh = jax.make_mesh((2, 2, 2), ("data", "fsdp", "tensor"), axis_types=(AxisType.Auto,) * 3)
  args = jax.device_put(qkv(rows=4), NamedSharding(mesh, PartitionSpec(("data", "fsdp"))))
  step = on_mesh(mesh, manual)
  if manual:
    near(jax.jit(step)(*args), jax.jit(gradients("xla", True))(*qkv(rows=4))[1], 0.02)
  kernels = [e for e in equations(step, *args) if e.primitive.name == "pallas_call"]
  assert len(kernels) == 3
  assert {e.outvars[-1].aval.shape[-3:] for e in kernels} == {(1, 128, 128)}  # one head of two


@functools.cache
def model(attention):
  return GPT(vocab_size=16, max_len=128, dim=256, layers=2, heads=2, attention=attention, rngs=nnx.Rngs(0))


@pytest.mark.parametrize(
  ("policy", "override", "expected"),
  [("bf16", "fp32", 3), ("fp16", "bf16", 3), ("fp16", "fp16", 0), (FP8, "bf16", 6)],
)
def test_splash_is_in_modules_that_compute_in_bfloat16_alone(policy, override, expected):
  loss = lambda model, tokens: jax.nn.logsumexp(model(tokens)).mean()
  gradient = jax.grad(mpjax.autocast(loss, policy, overrides={".*/blocks/0": override}))
  found = equations(gradient, model("splash"), jnp.zeros((2, 128), jnp.int32))
  assert sum(e.primitive.name == "pallas_call" for e in found) == expected


def step_of_shapes(sizes):
  """A step of a model with splash attention on a mesh, and shapes of a state and a batch for it."""
  loss = lambda model, batch: jax.nn.logsumexp(model(batch["tokens"])).mean()
  mesh = jax.make_mesh(sizes, ("data", "fsdp", "tensor"), axis_types=(AxisType.Auto,) * 3)
  step = mpjax.make_train_step(loss, optax.sgd(0.1), "bf16", mesh=mesh, sharding=gpt_sharding)
  net = model("splash")
  shapes = jax.eval_shape(lambda: step.init(net))
  place = NamedSharding(mesh, PartitionSpec(("data", "fsdp")))
  state = jax.tree.map(lambda leaf, at: leaf.update(sharding=at), shapes, step.layout.shardings(shapes))
  return step, state, {"tokens": jax.ShapeDtypeStruct((4, 128), jnp.int32, sharding=place)}


def kernels_on_tpus(jitted, *args):
  return jitted.trace(*args).lower(lowering_platforms=("tpu",)).as_text().count("tpu_custom_call")


def test_a_step_and_an_inspection_on_a_mesh_are_lowered_for_tpus():
  for sizes in ((1, 2, 1), (2, 1, 2)):
    step, state, batch = step_of_shapes(sizes)
    assert kernels_on_tpus(step.jitted, state, batch) >= 3
  sides = [(step, state), (reference_step(step), reference_state(state))]
  own, wide = (
    kernels_on_tpus(one.run, side[1], batch)
    for one, side in zip(passes(sides, batch, updates=True), sides, strict=True)
  )
  assert own >= 3
  assert wide == 0
