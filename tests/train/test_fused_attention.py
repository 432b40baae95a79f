"""`model.attention`: which kernel a run takes; splash attention beside the XLA path, on one device and a mesh."""

from __future__ import annotations

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import mpjax
from mpjax.train import ConfigError
from mpjax.train.data import ModelInfo
from mpjax.train.models import GPT, _fused_attention
from mpjax.train.models._attention import attention
from mpjax.train.models._fused_attention import chosen_attention
from tests.casting._jaxprs import equations


def info(backend: str, policy: str = "bf16") -> ModelInfo:
  return ModelInfo(8, 8, "", "", policy=mpjax.get_policy(policy), backend=backend, recompute="nothing")


def chosen(asked: str, told: ModelInfo, **sizes: int) -> str:
  return chosen_attention(asked, told, **({"heads": 8, "head_dim": 128, "length": 2048} | sizes))


@pytest.mark.parametrize(
  ("backend", "policy", "sizes", "expected"),
  [
    ("tpu", "bf16", {}, "splash"),
    ("tpu", "bf16", {"length": 1024}, "splash"),
    ("tpu", "bf16", {"length": 512}, "xla"),  # the scores of short rows take less than its statistics
    ("tpu", "bf16", {"length": 2000}, "xla"),
    ("tpu", "bf16", {"head_dim": 64}, "xla"),
    ("tpu", "fp16", {}, "xla"),
    ("tpu", "fp32", {}, "xla"),
    ("cpu", "bf16", {}, "xla"),
    ("gpu", "bf16", {}, "xla"),  # planned on a machine without one
  ],
)
def test_auto_takes_the_kernel_that_there_is(backend, policy, sizes, expected):
  assert chosen("auto", info(backend, policy), **sizes) == expected
  assert chosen("xla", info(backend, policy), **sizes) == "xla"


@pytest.fixture
def gpu(monkeypatch):
  """Makes this machine look as one with a GPU of the given capability, on which cuDNN takes some heads."""

  def of(capability: str) -> None:
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "local_devices", lambda: [types.SimpleNamespace(compute_capability=capability)])

    def cudnn(q, k, v, causal):
      if q.shape[-1] > 128:
        raise NotImplementedError(f"head dim {q.shape[-1]}")
      assert q.dtype.itemsize == 2
      return q + k + v

    monkeypatch.setattr(_fused_attention, "_cudnn", cudnn)

  return of


@pytest.mark.parametrize(
  ("capability", "policy", "head_dim", "expected"),
  [
    ("9.0", "bf16", 128, "cudnn"),
    ("12.0", "fp16", 64, "cudnn"),
    ("8.0", "bf16", 256, "xla"),
    ("7.5", "fp16", 64, "xla"),
    ("9.0", "fp32", 64, "xla"),
  ],
)
def test_auto_takes_what_cudnn_takes_on_this_gpu(gpu, capability, policy, head_dim, expected):
  gpu(capability)
  assert chosen("auto", info("gpu", policy), head_dim=head_dim) == expected
  if expected == "xla":
    with pytest.raises(ConfigError, match=r"model.attention=cudnn on gpu .*; use auto"):
      chosen("cudnn", info("gpu", policy), head_dim=head_dim)


@pytest.mark.parametrize(
  ("asked", "told", "sizes", "match"),
  [
    ("cudnn", info("tpu"), {}, "cudnn on tpu in bfloat16: the fused kernel needs an NVIDIA GPU"),
    ("cudnn", info("gpu"), {}, "on a machine that has the GPU"),
    ("splash", info("cpu"), {}, "splash on cpu in bfloat16: the fused kernel needs a TPU"),
    ("splash", info("tpu", "fp16"), {}, "a bfloat16 policy"),
    ("splash", info("tpu"), {"length": 100}, "multiples of 128, not 100 positions and 128"),
  ],
)
def test_a_kernel_asked_for_by_name_that_does_not_run_is_refused(asked, told, sizes, match):
  with pytest.raises(ConfigError, match=match):
    chosen(asked, told, **sizes)


@pytest.fixture
def interpreted(monkeypatch):
  """Runs splash attention on this CPU."""
  _fused_attention._splash_kernel.cache_clear()
  make = splash_attention_kernel.make_splash_mha
  monkeypatch.setattr(splash_attention_kernel, "make_splash_mha", functools.partial(make, interpret=True))
  yield
  _fused_attention._splash_kernel.cache_clear()


def qkv(heads: int = 2, rows: int = 2) -> list[jax.Array]:
  return [jax.random.normal(jax.random.key(i), (rows, 128, heads, 128)) for i in range(3)]


def gradients(implementation: str, causal: bool, policy: str | None = None):
  def loss(q, k, v):
    return jnp.square(attention(q, k, v, causal=causal, implementation=implementation)).sum()

  return jax.value_and_grad(mpjax.autocast(loss, policy) if policy else loss, (0, 1, 2))


def near(found, expected, tolerance):
  for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
    a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
    assert np.linalg.norm(a - b) <= tolerance * np.linalg.norm(b)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("policy", "tolerance"), [(None, 1e-5), ("bf16", 0.02)])
def test_splash_computes_what_the_xla_path_does(interpreted, causal, policy, tolerance):
  found = jax.jit(gradients("splash", causal, policy))(*qkv())
  near(found, gradients("xla", causal)(*qkv()), tolerance)


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
  near(jax.jit(step)(*args), gradients("xla", True)(*args)[1], 0.02)
  kernels = [e for e in equations(step, *args) if e.primitive.name == "pallas_call"]
  assert len(kernels) == 3
  assert {e.outvars[0].aval.shape[-3:] for e in kernels} == {(1, 128, 128)}  # one head of two


@pytest.mark.parametrize("sizes", [(2, 2, 2), (4, 2, 1)])
@pytest.mark.parametrize("manual", [(), ("data", "fsdp")], ids=["evaluation", "step"])
def test_it_is_lowered_for_tpus_on_a_mesh(sizes, manual):
  mesh = jax.make_mesh(sizes, ("data", "fsdp", "tensor"), axis_types=(AxisType.Auto,) * 3)
  place = NamedSharding(mesh, PartitionSpec(("data", "fsdp")))
  args = [jax.ShapeDtypeStruct((8, 128, 2, 128), jnp.float32, sharding=place)] * 3
  lowered = jax.jit(on_mesh(mesh, manual)).trace(*args).lower(lowering_platforms=("tpu",))
  assert lowered.as_text().count("tpu_custom_call") >= 3


def test_heads_that_a_mesh_does_not_divide_take_the_xla_path(interpreted):
  mesh = jax.make_mesh((1, 1, 2), ("data", "fsdp", "tensor"), axis_types=(AxisType.Auto,) * 3)
  with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
    names = {e.primitive.name for e in equations(gradients("splash", True), *qkv(heads=3))}
  assert "pallas_call" not in names


def test_a_model_lowered_for_a_tpu_has_kernels_of_bfloat16():
  model = GPT(vocab_size=16, max_len=128, dim=256, layers=2, heads=2, attention="splash", rngs=nnx.Rngs(0))
  tokens = jax.ShapeDtypeStruct((2, 128), jnp.int32)
  loss = lambda model, tokens: jax.nn.logsumexp(model(tokens)).mean()
  explained = mpjax.explain(jax.grad(loss), "bf16")(model, tokens)
  kernels = [row for row in explained.rows if row.operands]
  assert len(kernels) == 6
  assert {row.after for row in kernels} == {"bfloat16"}
