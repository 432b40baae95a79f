"""`inspect_numerics` under a loss scale: a backward rule that is not linear is named by the leaves behind it."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import mpjax

KEYS = jax.random.split(jax.random.key(0), 4)
PARAMS = {
  "encoder": {"w": jax.random.normal(KEYS[0], (16, 32)) / 4, "b": jnp.zeros(32)},
  "head": {"w": jax.random.normal(KEYS[1], (32, 4)) / 6},
}
BATCH = {"x": jax.random.normal(KEYS[2], (64, 16)), "y": jax.random.normal(KEYS[3], (64, 4))}
AUTOCAST, CAST = "fp16", {"base": "fp16", "autocast": False}


def identity(backward):
  rule = jax.custom_vjp(lambda x: x)
  rule.defvjp(lambda x: (x, x), lambda x, g: (backward(x, g),))
  return rule


RULES = {
  "clip": lambda x, g: jnp.clip(g, -1e-3, 1e-3),
  "normalise": lambda x, g: g / (jnp.linalg.norm(g) + 1e-6),
  "penalty": lambda x, g: g + 1e-3 * x,  # which the scale makes nothing of
}


def loss_of(rule):
  def loss_fn(params, batch):
    with jax.named_scope("encoder"):
      x = jnp.tanh(batch["x"] @ params["encoder"]["w"] + params["encoder"]["b"])
    x = rule(x)
    with jax.named_scope("head"):
      return jnp.mean((x @ params["head"]["w"] - batch["y"]).astype(jnp.float32) ** 2)

  return loss_fn


def found(report):
  return [f for f in report.findings if f.kind == "loss scale"]


@pytest.mark.parametrize("policy", [AUTOCAST, CAST], ids=["autocast", "cast"])
@pytest.mark.parametrize("rule", RULES)
def test_a_rule_that_is_not_linear_is_found_and_its_leaves_are_named(rule, policy):
  loss_fn = loss_of(identity(RULES[rule]))
  report = mpjax.inspect_numerics(loss_fn, PARAMS, BATCH, policy, advise=False)
  assert {one.path for one in report.scale_dependent} == {"encoder/w", "encoder/b"}
  grads = lambda scale: jax.grad(lambda p: loss_fn(p, BATCH) * scale)(PARAMS)["encoder"]
  for one in report.scale_dependent:
    norms = [np.linalg.norm(grads(scale)[one.path[-1]]) / scale for scale in one.scales]
    assert one.scales == (1.0, report.loss_scale)
    np.testing.assert_allclose(one.norms, norms, rtol=1e-3)
  [finding] = found(report)
  assert (finding.severity, finding.module) == ("problem", "encoder/b")
  assert "mpjax.full_precision does not help; divide them by the loss scale" in finding.text
  assert not [f for f in report.findings if f.kind == "gradient error"]


def test_bfloat16_without_a_scale_is_advised_and_measured():
  report = mpjax.inspect_numerics(loss_of(identity(RULES["clip"])), PARAMS, BATCH, "fp16", tx=optax.sgd(1e-2))
  advised = mpjax.get_policy(report.advice.policy)
  assert (advised.compute_dtype, advised.loss_scaling) == (jnp.bfloat16, None)
  assert any(m.before > 0.9 and m.after < 0.05 for m in report.advice.measured)
  assert report.advice.left == ()
  assert "loss_scaling: none" in str(report)


def test_a_loss_scale_of_the_optimisers_own_is_named_without_a_policy():
  tx = mpjax.static_loss_scale(optax.sgd(1e-2), 1024.0)
  report = mpjax.inspect_numerics(loss_of(identity(RULES["clip"])), PARAMS, BATCH, "bf16", tx=tx)
  assert len(found(report)) == 1
  assert report.advice.unchanged


def in_float16(g):
  return g.astype(jnp.float16)


LINEAR = {
  "nothing": lambda x: x,
  "a bias before a norm": lambda x: x - x.mean(0),  # whose gradient is rounding
  "a scale of its own": identity(lambda x, g: g * 8),
  "float16 of its own": identity(lambda x, g: in_float16(g * 2**-16).astype(g.dtype) * 2.0**15 * 2),
}


@pytest.mark.parametrize("policy", [AUTOCAST, CAST], ids=["autocast", "cast"])
@pytest.mark.parametrize("rule", LINEAR)
def test_linear_rules_rounding_and_underflow_are_not_taken_for_it(rule, policy):
  report = mpjax.inspect_numerics(loss_of(LINEAR[rule]), PARAMS, BATCH, policy, advise=False)
  assert report.scale_dependent == ()
  assert not found(report)


def test_a_clip_is_found_beside_float16_of_the_models_own():
  both = lambda x: LINEAR["float16 of its own"](identity(RULES["clip"])(x))
  report = mpjax.inspect_numerics(loss_of(both), PARAMS, BATCH, "fp16", advise=False)
  assert {one.path for one in report.scale_dependent} == {"encoder/w", "encoder/b"}
  assert report.scale_dependent[0].scales == (2.0**14, 2.0**16)


@pytest.mark.parametrize("policy", ["bf16", "fp32"])
def test_without_a_loss_scale_nothing_is_compared(policy):
  report = mpjax.inspect_numerics(loss_of(identity(RULES["clip"])), PARAMS, BATCH, policy, advise=False)
  assert report.scale_dependent == ()


@pytest.mark.parametrize("divided", ["micro-batches", "devices"])
def test_a_step_that_divides_its_batch_is_compared(divided):
  options = {"micro-batches": {"accumulate": 4}, "devices": {"mesh": jax.make_mesh((4, 2), ("data", "fsdp"))}}
  step = mpjax.make_train_step(loss_of(identity(RULES["clip"])), optax.sgd(1e-2), "fp16", **options[divided])
  report = mpjax.inspect_numerics(step, step.init(PARAMS), BATCH, advise=False)
  assert {one.path for one in report.scale_dependent} == {"encoder/w", "encoder/b"}


def test_a_parameter_that_is_not_trained_is_not_compared():
  step = mpjax.make_train_step(
    loss_of(identity(RULES["clip"])), optax.sgd(1e-2), "fp16", wrt=["encoder/w", "head"]
  )
  report = mpjax.inspect_numerics(step, step.init(PARAMS), BATCH, advise=False)
  assert [one.path for one in report.scale_dependent] == ["encoder/w"]
  assert (
    {t.path for t in report.of("weight gradient")}
    == {t.path for t in report.of("update")}
    == {"encoder/w", "head/w"}
  )
