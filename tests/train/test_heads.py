"""Heads over the mesh axis `tensor`: what crosses devices, the losses, and files with q, k and v apart."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import safetensors.numpy
from flax import nnx
from jax.sharding import NamedSharding

import mpjax
from mpjax.cli import main
from mpjax.planner import get_target
from mpjax.planner.compiled import _compile as compilers
from mpjax.train import load_safetensors

# The order of columns, which files of before have otherwise.
from mpjax.train._head_order import reordered_state
from mpjax.train.checkpoints import Checkpoints
from mpjax.train.models import GPT, ViT, gpt_sharding, vit_sharding
from mpjax.train.models._attention import by_head, split_heads
from tests.step.test_collectives import a_step, crossing
from tests.train._runs import assert_same_bits, state_of, train
from tests.train._tiny_gpt import write_tiny_gpt

HEADS, DIM = 4, 32


def apart(x, heads, axis=-1):
  """Returns columns by head as they were before: those of q, of k, and of v."""
  x = np.moveaxis(np.asarray(x), axis, -1)
  by_head = x.reshape(*x.shape[:-1], heads, 3, -1)
  parts = [by_head[..., i, :].reshape(*x.shape[:-1], -1) for i in range(3)]
  return np.moveaxis(np.concatenate(parts, -1), -1, axis)


def test_a_kernel_has_the_values_that_it_had_with_q_k_and_v_apart():
  x = np.random.default_rng(0).normal(size=(2, 5, DIM)).astype(np.float32)
  init = jax.nn.initializers.normal(0.02)
  before = init(jax.random.key(1), (DIM, 3 * DIM), jnp.float32)
  kernel = by_head(init, HEADS)(jax.random.key(1), (DIM, 3 * DIM), jnp.float32)
  np.testing.assert_array_equal(apart(kernel, HEADS), before)
  wanted = [y.reshape(2, 5, HEADS, -1) for y in np.split(x @ np.asarray(before), 3, axis=-1)]
  for found, want in zip(split_heads(x @ np.asarray(kernel), HEADS), wanted, strict=True):
    np.testing.assert_allclose(found, want, rtol=1e-5, atol=1e-6)


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
  ("case", "tensor"),
  [("gpt", 4), pytest.param("vit", 4, marks=pytest.mark.slow), ("three heads", 2)],
)
def test_nothing_of_attention_moves_between_devices(case, tensor):
  step, args = a_step("fp32", {"data": 8 // tensor, "tensor": tensor}, **CASES[case])
  everywhere, _ = crossing(step.jitted.lower(*args).compile().as_text())
  assert {operation for operation, _ in everywhere} == {"all-reduce"}


@pytest.mark.slow
@pytest.mark.aot
@pytest.mark.parametrize(
  ("target", "attention"), [("v5e:2x4", "xla"), ("v5e:2x4", "splash"), ("h200:8", "xla")]
)
def test_nothing_of_attention_moves_in_programs_for_described_devices(target, attention):
  described = get_target(target)
  if lacks := compilers.missing(described):
    pytest.skip(lacks)
  sizes = {"vocab_size": 512, "max_len": 128, "dim": 512, "layers": 1, "heads": HEADS}
  make = lambda: GPT(**sizes, attention=attention, rngs=nnx.Rngs(0))
  case = {"loss": gpt_loss, "first": make, "rows": (16, 129), "rules": gpt_rules(HEADS)}
  step, args = a_step("bf16", {"fsdp": 2, "tensor": 4}, target=target, **case)
  everywhere, _ = crossing(compilers.compile_step(step.jitted, args, [], described).text)
  assert {name for name, _ in everywhere} == {"all-gather", "all-reduce", "reduce-scatter"}
  # The parameters, which `tensor` divides.
  gathered = everywhere["all-gather", "bf16"] + everywhere["all-gather", "f32"]
  assert gathered <= (12 + 1) * 512 * 512 // 4 + 128


@pytest.mark.slow
def test_losses_are_those_of_one_device():
  """Also of heads that the mesh does not divide."""
  loss, first, rows, rules = CASES["three heads"].values()
  batch = {"x": np.random.default_rng(0).integers(0, 128, rows)}
  found = []
  for sizes in ({"fsdp": 2, "tensor": 2}, {"data": 1}):
    devices = jax.devices()[: np.prod([*sizes.values()])]
    mesh = jax.make_mesh(tuple(sizes.values()), tuple(sizes), devices=devices)
    step = mpjax.make_train_step(loss, optax.adamw(1e-2), "fp32", mesh=mesh, sharding=rules)
    state = step.init(first())
    for _ in range(3):
      state, metrics = step(state, batch)
      found.append(float(metrics["loss"]))
  np.testing.assert_allclose(found[:3], found[3:], rtol=1e-6)


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


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn", "bfloat16"])
def test_quantised_moments_keep_their_values_nearly_where_groups_are_divided(dtype):
  heads, columns = 3, 288  # three groups: first q, k and v, then heads
  values = np.random.default_rng(0).uniform(-1, 1, (4, columns)).astype(np.float32)
  tx = mpjax.quantized_state(optax.trace(0.9), dtype, min_size=0)

  @jax.jit
  def moments(values):
    params = {"qkv": {"kernel": jnp.zeros((4, columns))}}
    _, state = tx.update({"qkv": {"kernel": values}}, tx.init(params), params)
    states = reordered_state(state, params, {"qkv": heads}), state
    return [mpjax.optim.dequantize_state(each).trace["qkv"]["kernel"] for each in states]

  found, want = moments(values)
  assert not np.array_equal(found, want)
  np.testing.assert_allclose(apart(found, heads), want, rtol=2**-4, atol=1e-4)


RUNS = [
  "policy=fp32",
  pytest.param("policy=bf16_lean", marks=pytest.mark.slow),
  pytest.param("optimizer.name=adafactor", marks=pytest.mark.slow),
]


@pytest.fixture(scope="module", params=RUNS)
def runs(request, tmp_path_factory):
  """Directories of a run of three steps, and of the same as it was with q, k and v apart; their arguments."""
  folder = tmp_path_factory.mktemp("runs")
  options = ["train.eval_every=4", "train.checkpoint_every=3", "optimizer.schedule_steps=6", request.param]
  arguments = [*write_tiny_gpt(folder, layers=1), *options]
  now, before = folder / "now", folder / "before"
  train(arguments, now, "train.steps=3")
  shutil.copytree(now, before)
  state, old = state_of(now), Checkpoints(now / "checkpoints", read_only=True)
  restored = old.restore(3, state)
  old.close()
  shutil.rmtree(before / "checkpoints")
  checkpoints = Checkpoints(before / "checkpoints")
  moved = state.replace(params=all_apart(state.params), opt_state=all_apart(state.opt_state))
  checkpoints.save(3, moved, restored.data, restored.loop, None)
  checkpoints.close()
  return now, before, arguments


def all_apart(tree):
  """Returns a state as it was before; a row of a quantised array is one group here, and moves whole."""

  def of(path, leaf):
    if "qkv" not in jax.tree_util.keystr(path):
      return leaf
    moved = leaf
    for axis in (i for i, size in enumerate(leaf.shape) if size == 3 * DIM):
      moved = apart(moved, heads=2, axis=axis)
    return jax.device_put(moved, leaf.sharding)

  return jax.tree_util.tree_map_with_path(of, tree)


def test_a_checkpoint_of_before_is_the_same_state(runs):
  now, before, _ = runs
  assert_same_bits(state_of(before), state_of(now))
  on_mesh = state_of(before, "mesh={data: 2, fsdp: 2, tensor: 2}")
  assert_same_bits(on_mesh, state_of(now))
  kernel = on_mesh.params["blocks"][0]["qkv"]["kernel"]
  assert isinstance(kernel.sharding, NamedSharding)
  assert tuple(kernel.sharding.spec) == ("fsdp", "tensor")


def test_what_a_run_saves_is_another_state_to_releases_of_before(runs):
  now, before, _ = runs
  kinds = lambda folder: json.loads((folder / "checkpoints/3/integrity/metadata").read_text())["kinds"]
  name = "params/blocks/0/qkv/kernel"
  assert kinds(before)[name] in ("float32[32,96]", "bfloat16[32,96]")
  assert kinds(now)[name] == kinds(before)[name] + " by head"


def test_a_run_of_before_is_exported_as_it_was(runs, tmp_path, capsys):
  now, before, _ = runs
  files = [tmp_path / "now.safetensors", tmp_path / "before.safetensors"]
  for folder, file in zip((now, before), files, strict=True):
    assert main(["export", str(folder), "dtype=float32", "step=latest", f"out={file}"]) == 0
  one, other = map(safetensors.numpy.load_file, files)
  assert {name: x.tobytes() for name, x in one.items()} == {name: x.tobytes() for name, x in other.items()}
  name = "params/blocks/0/qkv/kernel"
  masters = state_of(now).params["blocks"][0]["qkv"]["kernel"]
  if masters.dtype == jnp.float32:
    np.testing.assert_array_equal(one[name], apart(masters, heads=2))
    read = load_safetensors(files[1]).params["blocks"][0]["qkv"]["kernel"]
    np.testing.assert_array_equal(read, masters)


def test_a_run_of_before_goes_on_and_begins_others(runs, tmp_path):
  now, before, arguments = runs
  for name, folder in (("now", now), ("before", before)):
    shutil.copytree(folder, tmp_path / name)
    train(arguments, tmp_path / name, "train.steps=4")
    begin = [f"train.init_from={folder}", "train.init_optimizer=true"]
    train(arguments, tmp_path / f"{name}-new", "train.steps=1", *begin)
  assert_same_bits(state_of(tmp_path / "before"), state_of(tmp_path / "now"))
  assert_same_bits(state_of(tmp_path / "before-new"), state_of(tmp_path / "now-new"))
