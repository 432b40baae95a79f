"""What made NaN or infinity, where the batch is divided over devices."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import mpjax


def log_of(p, batch):
  with jax.named_scope("head"):
    return jnp.log(p["w"] * batch["x"]).mean()


def test_an_operation_is_named_as_on_one_device():
  mesh = jax.make_mesh((8,), ("data",))
  step = mpjax.make_train_step(log_of, optax.sgd(0.1), "fp32", skip_nonfinite=True, mesh=mesh)
  x = np.ones(16, np.float32)
  x[13] = 0
  report = mpjax.find_nonfinite(step, step.init({"w": jnp.ones(())}), {"x": x})
  assert (report.origin.primitive, report.origin.module) == ("log", "head")
  assert "logarithm of zero" in str(report)


def test_an_overflow_of_the_sum_alone_is_told_as_such():
  mesh = jax.make_mesh((8,), ("data",))
  policy = {"base": "fp16", "reduce_dtype": "float16", "loss_scaling": {"init_scale": 16}}
  steep = lambda p, batch: (p["w"] * batch["g"]).mean()
  step = mpjax.make_train_step(steep, optax.sgd(0.1), policy, mesh=mesh)
  report = mpjax.find_nonfinite(step, step.init({"w": jnp.zeros(())}), {"g": np.full(16, 1000, np.float32)})
  assert report.origin is None
  assert "the sum of gradients in float16 over 8 devices overflowed" in str(report)
  assert "reduce_dtype: float32" in str(report)
