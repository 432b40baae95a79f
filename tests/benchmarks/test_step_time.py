"""Published rates of steps, and the decoder that stands for the models that were measured."""

import jax
import pytest

import mpjax
from benchmarks.step_time import _published, _six
from benchmarks.step_time._decoder import Run, Sizes, training
from mpjax.planner import get_target

SMALL = Sizes(dim=512, layers=2, heads=4, kv_heads=2, hidden=512, vocab=512)


# What the sources say in TFLOP/s of a device beside the rates that are read.
@pytest.mark.parametrize(
  ("name", "tflops"),
  [
    ("Llama 3.1 8B, v6e-8", 413.433),
    ("Llama 2 70B, v6e-256", 402.274),
    ("GPT-3 175B, v6e-256", 384.891),
    ("Llama 3.1 70B, 256 H200", 508.371),
    ("MaxText 128B, v5p-256", 315.0),
  ],
)
def test_published_rates_and_sizes_fit_the_published_flops(name, tflops):
  row = next(row for row in _published.rows() if row.name == name)
  tokens = row.rows * row.run.length / row.target.devices
  assert tokens * row.sizes.token_flops(row.run.length) / row.seconds == pytest.approx(
    tflops * 1e12, rel=1e-3
  )


def test_every_row_fits_its_devices():
  for row in _published.rows():
    shapes = {**row.sizes.shapes(), **row.sizes.shapes()["layers"]}
    assert row.seconds > 0
    assert row.source
    for shape, spec in (value for key, value in shapes.items() if key != "layers"):
      assert all(size % row.mesh.get(axis, 1) == 0 for size, axis in zip(shape, spec, strict=True)), row.name


@pytest.mark.parametrize(("target", "attention"), [("v6e:2x2", "splash"), ("h100:4", "stated")])
def test_decoder_has_its_attention_as_a_kernel_and_its_products_in_half_precision(target, attention):
  device = get_target(target)
  run = Run(256, save=("context",), attention=attention, blocks=128)
  step, state, batch = training(SMALL, run, device, {"fsdp": 2, "tensor": 2}, 4, "bf16")
  plan = mpjax.plan(step, state, batch, target=device, compile=False)
  assert sum(kernel.count for kernel in plan.fused) == 2 * SMALL.layers  # forward, and once backward
  assert {kernel.operands[0] for kernel in plan.fused} == {"bfloat16"}
  assert plan.parameters == sum(leaf.size for leaf in jax.tree.leaves(state.params))


def test_saved_activations_are_not_computed_again():
  device = get_target("h100:4")

  def flops(*save):
    run = Run(256, save=save, attention="stated")
    given = training(SMALL, run, device, {"fsdp": 4}, 4, "bf16")
    return sum(p.flops for p in mpjax.plan(*given, target=device, compile=False).products)

  assert flops("all") < flops("query_proj", "key_proj", "value_proj", "mlpwi_0", "mlpwi_1") < flops()


@pytest.mark.parametrize("name", _six.models(tiny=True))
def test_six_models_have_steps_of_their_shapes(name):
  model = _six.models(tiny=True)[name]
  step = _six.step_of(model, "bf16")
  made = [_six.filled(tree) for tree in (model.params, model.batch, model.model_state)]
  state = jax.eval_shape(lambda *given: _six.state_of(step, *given), *made)
  _, metrics = jax.eval_shape(step.jitted, state, made[1])
  assert metrics["loss"].shape == ()
