"""`inspect_numerics` under a loss scale: a backward rule that is not linear is named by the leaves behind it."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import mpjax

RNG = np.random.default_rng(0)
NORMAL = lambda *shape: RNG.standard_normal(shape).astype(np.float32)
PARAMS = {
  "encoder": {"w": NORMAL(16, 32) / 4, "b": np.zeros(32, np.float32)},
  "head": {"w": NORMAL(32, 4) / 6},
}
BATCH = {"x": NORMAL(64, 16), "y": NORMAL(64, 4)}
CAST = {"base": "fp16", "autocast": False}


def identity(backward):
  rule = jax.custom_vjp(lambda x: x)
  rule.defvjp(lambda x: (x, x), lambda x, g: (backward(x, g),))
  return rule


def loss_of(rule):
  def loss_fn(params, batch):
    with jax.named_scope("encoder"):
      x = jnp.tanh(batch["x"] @ params["encoder"]["w"] + params["encoder"]["b"])
    x = rule(x)
    with jax.named_scope("head"):
      return jnp.mean((x @ params["head"]["w"] - batch["y"]).astype(jnp.float32) ** 2)

  return loss_fn


CLIP = identity(lambda x, g: jnp.clip(g, -1e-3, 1e-3))
CLIPPED = loss_of(CLIP)
RULES = {
  "clip": CLIP,
  "normalise": identity(lambda x, g: g / (jnp.linalg.norm(g) + 1e-6)),
  "penalty": identity(lambda x, g: g + 1e-3 * x),  # which the scale makes nothing of
}
OWN_FLOAT16 = identity(lambda x, g: (g * 2**-16).astype(jnp.float16).astype(g.dtype) * 2.0**15 * 2)
OWN_SCALE = identity(lambda x, g: g * 8)
LINEAR = {
  "a bias before a norm, and a scale": lambda x: OWN_SCALE(x) - x.mean(0),  # a gradient that is rounding
  "float16": OWN_FLOAT16,
}


def inspect(loss_fn, policy="fp16", **options):
  return mpjax.inspect_numerics(loss_fn, PARAMS, BATCH, policy=policy, **{"advise": False, **options})


def found(report):
  return [f for f in report.findings if f.kind == "loss scale"]


def paths(report):
  return [one.path for one in report.scale_dependent]


@pytest.mark.parametrize(("rule", "policy"), [*((rule, "fp16") for rule in RULES), ("clip", CAST)])
def test_a_rule_that_is_not_linear_is_found_and_its_leaves_are_named(rule, policy):
  loss_fn = loss_of(RULES[rule])
  report = inspect(loss_fn, policy)
  assert sorted(paths(report)) == ["encoder/b", "encoder/w"]
  gradients = jax.jit(lambda scale: jax.grad(lambda p: loss_fn(p, BATCH) * scale)(PARAMS)["encoder"])
  by_scale = {scale: gradients(scale) for scale in (1.0, report.loss_scale)}
  for one in report.scale_dependent:
    norms = [np.linalg.norm(grads[one.path[-1]]) / scale for scale, grads in by_scale.items()]
    assert one.scales == (1.0, report.loss_scale)
    np.testing.assert_allclose(one.norms, norms, rtol=1e-3)
  [finding] = found(report)
  assert (finding.severity, finding.module) == ("problem", "encoder/b")
  assert "mpjax.full_precision does not help; divide them by the loss scale" in finding.text
  assert not [f for f in report.findings if f.kind == "gradient error"]


def test_bfloat16_without_a_scale_is_advised_and_measured():
  report = inspect(CLIPPED, tx=optax.sgd(1e-2), advise=True)
  advised = mpjax.get_policy(report.advice.policy)
  assert (advised.compute_dtype, advised.loss_scaling) == (jnp.bfloat16, None)
  assert any(m.before > 0.9 and m.after < 0.05 for m in report.advice.measured)
  assert report.advice.left == ()
  assert "loss_scaling: none" in report.table("advice")
  assert "-> compute_dtype: bfloat16" in " ".join(str(report).split())


def test_a_loss_scale_of_the_optimisers_own_is_named_without_a_policy():
  tx = mpjax.static_loss_scale(optax.sgd(1e-2), 1024.0)
  report = inspect(CLIPPED, "bf16", tx=tx, advise=True)
  assert len(found(report)) == 1
  assert report.advice.unchanged


@pytest.mark.parametrize("policy", ["fp16", CAST], ids=["autocast", "cast"])
@pytest.mark.parametrize("rule", LINEAR)
def test_linear_rules_rounding_and_underflow_are_not_taken_for_it(rule, policy):
  report = inspect(loss_of(LINEAR[rule]), policy)
  assert report.scale_dependent == ()
  assert not found(report)


def test_a_clip_is_found_beside_float16_of_the_models_own():
  report = inspect(loss_of(lambda x: OWN_FLOAT16(CLIP(x))))
  assert sorted(paths(report)) == ["encoder/b", "encoder/w"]
  assert report.scale_dependent[0].scales == (2.0**14, 2.0**16)


def test_without_a_loss_scale_nothing_is_compared():
  assert inspect(CLIPPED, "bf16").scale_dependent == ()


def test_a_step_of_micro_batches_is_compared_in_what_it_trains():
  options = {"accumulate": 4, "wrt": ["encoder/w", "head"]}
  step = mpjax.make_train_step(CLIPPED, optax.sgd(1e-2), "fp16", **options)
  report = mpjax.inspect_numerics(step, step.init(PARAMS), BATCH, advise=False)
  assert paths(report) == ["encoder/w"]
  for kind in ("weight gradient", "update"):
    assert [t.path for t in report.of(kind)] == ["encoder/w", "head/w"]


def test_a_step_on_a_mesh_is_compared():
  loss = lambda params, batch: jnp.mean(CLIP(batch["x"] @ params["w"]) ** 2)
  mesh = jax.make_mesh((4, 2), ("data", "fsdp"))
  step = mpjax.make_train_step(loss, optax.identity(), "fp16", mesh=mesh)
  report = mpjax.inspect_numerics(step, step.init({"w": PARAMS["encoder"]["w"]}), BATCH, advise=False)
  assert paths(report) == ["w"]
