"""Heads over the mesh axis `tensor`: what crosses devices, and the losses."""

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import mpjax
from mpjax.planner import get_target, missing
from mpjax.planner.compiled._compile import compile_step
from mpjax.planner.compiled._worker import module_proto
from mpjax.zoo.models import GPT, ViT, gpt_sharding, vit_sharding
from tests.step.test_collectives import a_step, crossing

HEADS, DIM = 4, 32


def gpt_loss(model, batch):
  logits = model(batch["x"][:, :-1])
  return optax.softmax_cross_entropy_with_integer_labels(logits, batch["x"][:, 1:]).mean()


def gpt(heads):
  sizes = {"vocab_size": 128, "max_len": 8, "dim": 24 if heads == 3 else DIM, "layers": 2, "heads": heads}
  return GPT(**sizes, rngs=nnx.Rngs(0))


def gpt_rules(heads):
  return lambda path, shape: gpt_sharding(path, shape, heads=heads)


def vit(heads):
  model = ViT(num_classes=8, patch=2, dim=DIM, layers=2, heads=heads)
  first = lambda: model.init(jax.random.key(0), jnp.zeros((1, 8, 8, 1)), train=False)["params"]

  def loss(params, batch):
    logits = model.apply({"params": params}, batch["x"].astype(jnp.float32)[..., None], train=False)
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["x"][:, 0, 0] % 8).mean()

  rules = lambda path, shape: vit_sharding(path, shape, heads=heads)
  return {"loss": loss, "first": first, "rows": (16, 8, 8), "rules": rules}


CASES = {
  "gpt": {"loss": gpt_loss, "first": lambda: gpt(HEADS), "rows": (16, 9), "rules": gpt_rules(HEADS)},
  "vit": vit(HEADS),
  "three heads": {"loss": gpt_loss, "first": lambda: gpt(3), "rows": (16, 9), "rules": gpt_rules(3)},
}


@pytest.mark.parametrize(
  ("case", "tensor"), [("gpt", 4), pytest.param("vit", 4, marks=pytest.mark.slow), ("three heads", 2)]
)
def test_nothing_of_attention_moves_between_devices(case, tensor):
  step, args = a_step("fp32", {"data": 8 // tensor, "tensor": tensor}, 1, **CASES[case])
  everywhere, _ = crossing(module_proto(step.jitted.lower(*args).compile()))
  assert {operation for operation, _ in everywhere} == {"all-reduce"}


@pytest.mark.slow
@pytest.mark.aot
@pytest.mark.parametrize(
  ("target", "attention"), [("v5e:2x4", "xla"), ("v5e:2x4", "splash"), ("h200:8", "xla")]
)
def test_nothing_of_attention_moves_in_programs_for_described_devices(target, attention):
  described = get_target(target)
  if lacks := missing(described):
    pytest.skip(lacks)
  sizes = {"vocab_size": 512, "max_len": 128, "dim": 512, "layers": 1, "heads": HEADS}
  make = lambda: GPT(**sizes, attention=attention, rngs=nnx.Rngs(0))
  case = {"loss": gpt_loss, "first": make, "rows": (16, 129), "rules": gpt_rules(HEADS)}
  step, args = a_step("bf16", {"fsdp": 2, "tensor": 4}, 1, target, **case)
  everywhere, _ = crossing(compile_step(step.jitted, args, [], described).proto)
  assert {name for name, _ in everywhere} == {"all-gather", "all-reduce", "reduce-scatter"}
  # The parameters, which `tensor` divides.
  gathered = everywhere["all-gather", "bf16"] + everywhere["all-gather", "f32"]
  assert gathered <= (12 + 1) * 512 * 512 // 4 + 128


def test_heads_are_divided_where_tensor_divides_their_number():
  params = {"qkv": {"kernel": jax.ShapeDtypeStruct((48, 144), jnp.float32)}}
  for heads, tensor, spec in [
    (12, 4, ("fsdp", "tensor")),
    (6, 4, ("fsdp",)),
    (None, 4, ("fsdp", "tensor")),
    (None, 5, ("fsdp",)),
  ]:
    mesh = jax.sharding.AbstractMesh((2, tensor), ("fsdp", "tensor"))
    rules = mpjax.sharding.ShardingRules(model=lambda path, shape: gpt_sharding(path, shape, heads=heads))
    assert tuple(rules.specs(params, mesh)["qkv"]["kernel"]) == spec, (heads, tensor)
