"""Steps under `jax.lax.scan` give the bits of the jitted loop, as XLA optimises programs."""

import subprocess
import sys

import pytest

# XLA for CPU joins a product and a sum into one instruction, which rounds once, where its surroundings let it:
# plain optax differs by that, too. Without that instruction all else has to agree.
_PROGRAM = """
import jax, jax.numpy as jnp, numpy as np, optax, mpjax

def compare(tx, dtype):
  rng = np.random.default_rng(0)
  array = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
  params = {"w": array(16, 32) / 4, "b": jnp.zeros(32), "v": array(32, 4) / 4}
  x, y = array(200, 8, 16).at[jnp.array([50, 51, 120]), 0, 0].set(jnp.inf), array(200, 8, 4)

  def loss(params, x, y):
    low = mpjax.cast_floating(params, dtype)
    return jnp.mean(((jnp.tanh(x.astype(dtype) @ low["w"] + low["b"]) @ low["v"]).astype(jnp.float32) - y) ** 2)

  def step(carry, batch):
    params, state = carry
    updates, state = tx.update(jax.grad(lambda p: mpjax.scale_loss(loss(p, *batch), state))(params), state, params)
    return (optax.apply_updates(params, updates), state), state.scale

  first = params, tx.init(params)
  scanned, scales = jax.jit(lambda carry: jax.lax.scan(step, carry, (x, y)))(first)
  carry, jitted = first, jax.jit(step)
  for i in range(200):
    carry, scale = jitted(carry, (x[i], y[i]))
    assert scale == scales[i], i
  assert int(carry[1].skipped_steps) == 3
  assert len(set(np.asarray(scales).tolist())) > 3
  for (path, a), b in zip(jax.tree_util.tree_flatten_with_path(scanned)[0], jax.tree.leaves(carry), strict=True):
    assert np.asarray(a).tobytes() == np.asarray(b).tobytes(), jax.tree_util.keystr(path)

scaled = lambda inner: mpjax.dynamic_loss_scale(inner, init_scale=256.0, growth_interval=20)
compare(scaled(optax.sgd(0.1)), jnp.float32)
compare(scaled(optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))), jnp.float16)
"""


@pytest.mark.slow
def test_200_scanned_steps_are_bitwise_the_jitted_loop(monkeypatch):
  monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_max_isa=AVX")
  run = subprocess.run([sys.executable, "-c", _PROGRAM], capture_output=True, text=True, timeout=300)
  assert run.returncode == 0, run.stderr[-2000:]
