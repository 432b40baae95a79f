"""Science: solvers, differential equations, forces, graphs, spectra."""

import jax
import jax.numpy as jnp
import numpy as np

from tests.casting.programs._ideal import Out, program


def mlp(half, params, x):
  return half.dot(jnp.tanh(half.dot(x, params["in"]) + params["bias"]), params["out"])


@program(
  "physics: a Laplacian by forward over reverse mode, in a box",
  {"in": (3, 32), "bias": (32,), "out": (32, 1)},
  lambda rng: {"x": rng.uniform(-1, 1, (32, 3)), "source": rng.standard_normal(32)},
)
def poisson(half, params, inputs):
  u = lambda x: mlp(half, params, x)[0]

  def laplacian(x):
    push = lambda v: jax.jvp(jax.grad(u), (x,), (v,))[1]
    return jnp.trace(jax.vmap(push)(jnp.eye(3)))

  found = jax.vmap(laplacian)(inputs["x"])
  return Out(jnp.mean((found - inputs["source"]) ** 2), found)


@program(
  "dynamics: a neural ODE by Runge-Kutta steps in a scan, a time beside the state",
  {"in": (3, 32), "bias": (32,), "out": (32, 2)},
  lambda rng: {"y": rng.standard_normal((16, 2)), "target": rng.standard_normal((16, 2))},
)
def runge_kutta(half, params, inputs):
  h = 0.005

  @jax.checkpoint
  def field(t, y):
    return mlp(half, params, jnp.concatenate([y, jnp.broadcast_to(t, (*y.shape[:-1], 1))], -1))

  def step(carry, _):
    t, y = carry
    a = field(t, y)
    b = field(t + h / 2, y + h / 2 * a)
    c = field(t + h / 2, y + h / 2 * b)
    d = field(t + h, y + h * c)
    return (t + h, y + h / 6 * (a + 2 * b + 2 * c + d)), None

  (t, y), _ = jax.lax.scan(step, (0.0, inputs["y"]), length=200)
  return Out(jnp.mean((y - inputs["target"]) ** 2), {"y": y, "moved": y - inputs["y"], "t": t[None]})


@program(
  "dynamics: Euler steps whose field is a jitted function, over a long time",
  {"in": (2, 16), "bias": (16,), "out": (16, 2)},
  lambda rng: {"y": 3 + rng.standard_normal((8, 2))},
)
def euler_by_jit(half, params, inputs):
  field = jax.jit(lambda t, y: mlp(half, params, y) * jnp.cos(t))

  def step(carry, _):
    t, y = carry
    return (t + 1e-3, y + 1e-3 * field(t, y)), None

  (_, y), _ = jax.lax.scan(step, (jnp.zeros(()), inputs["y"]), length=1000)
  return Out(jnp.mean(y**2), {"moved": y - inputs["y"]})


@program(
  "dynamics: an adaptive step by equinox' checkpointed while_loop, as diffrax has it",
  {"in": (2, 16), "bias": (16,), "out": (16, 2), "read": (2, 12)},
  lambda rng: {"y": rng.standard_normal(2), "target": rng.standard_normal(12)},
  needs="equinox",
)
def adaptive_solver(half, params, inputs):
  import equinox.internal as eqxi

  def field(y):
    return jnp.tanh(y @ params["in"] + params["bias"]) @ params["out"]  # the solver needs its digits

  def step(carry):
    t, y, h, count = carry
    h = jnp.minimum(h, 2.0 - t)
    a = field(y)
    b = field(y + h * a)
    error = jax.lax.stop_gradient(jnp.sqrt(jnp.mean((h * (b - a) / 2 / 1e-4) ** 2)))
    accept = error < 1
    t, y = jnp.where(accept, t + h, t), jnp.where(accept, y + h / 2 * (a + b), y)
    return t, y, h * jnp.clip(0.9 * error**-0.5, 0.2, 5.0), count + 1

  carry = jnp.zeros(()), inputs["y"], jnp.array(0.1), 0
  t, y, _, count = eqxi.while_loop(lambda c: c[0] < 2.0, step, carry, max_steps=256, kind="checkpointed")
  out = half.dot(y, params["read"])
  return Out(jnp.mean((out - inputs["target"]) ** 2), {"y": y, "t": t[None]}, count)


@program(
  "layers: a deep equilibrium, a fixed point to a tolerance and its implicit gradient",
  {"w": lambda rng: 0.6 * rng.standard_normal((16, 16)) / 4, "in": (8, 16), "out": (16, 4)},
  lambda rng: {"x": rng.standard_normal((8, 8)), "y": rng.standard_normal((8, 4))},
)
def equilibrium(half, params, inputs):
  @jax.custom_vjp
  def solve(w, u):
    return iterate(lambda z: jnp.tanh(z @ w + u), jnp.zeros_like(u))

  def iterate(step, z):
    def body(carry):
      z, _, count = carry
      new = step(z)
      return new, jnp.max(jnp.abs(new - z)), count + 1

    z, _, count = jax.lax.while_loop(lambda c: (c[1] > 1e-5) & (c[2] < 500), body, (z, jnp.inf, 0))
    return z, count

  def forward(w, u):
    z, count = solve(w, u)
    return (z, count), (w, u, z)

  def backward(kept, cotangents):
    w, u, z = kept
    _, pull = jax.vjp(lambda w, u, z: jnp.tanh(z @ w + u), w, u, z)
    v, _ = iterate(lambda v: cotangents[0] + pull(v)[2], jnp.zeros_like(z))
    return pull(v)[:2]

  solve.defvjp(forward, backward)
  z, count = solve(params["w"], half.dot(inputs["x"], params["in"]))
  out = half.dot(z, params["out"])
  return Out(
    jnp.mean((out - inputs["y"]) ** 2), {"z": z, "out": out}, {"finished": (count < 500).astype(int)}
  )


@program(
  "molecules: an energy of distances in Gaussian features, and its forces",
  {"in": (16, 32), "bias": (32,), "out": (32, 1)},
  lambda rng: {"x": 3 * rng.random((12, 3)), "forces": rng.standard_normal((12, 3))},
)
def molecular_forces(half, params, inputs):
  centres = jnp.linspace(0, 5, 16)

  def energy(x):
    i, j = np.triu_indices(12, 1)
    distance = jnp.sqrt(jnp.sum((x[i] - x[j]) ** 2, -1) + 1e-6)
    features = jnp.exp(-4 * (distance[:, None] - centres) ** 2)
    envelope = 0.5 * (jnp.cos(jnp.pi * jnp.minimum(distance, 5) / 5) + 1)
    return jnp.sum(
      envelope
      * jax.nn.softplus(
        half.dot(jax.nn.silu(half.dot(features, params["in"]) + params["bias"]), params["out"])[:, 0]
      )
    )

  forces = -jax.grad(energy)(inputs["x"])
  return Out(jnp.mean((forces - inputs["forces"]) ** 2), forces)


@program(
  "graphs: attention over neighbours, by segment maxima and sums",
  {"in": (8, 16), "score": (32, 1), "out": (16, 4)},
  lambda rng: {
    "x": rng.standard_normal((20, 8)),
    "edges": rng.integers(0, 20, (2, 100)),
    "y": rng.standard_normal((20, 4)),
  },
)
def graph_attention(half, params, inputs):
  source, target = inputs["edges"]
  x = half.dot(inputs["x"], params["in"])
  pair = jnp.concatenate([x[source], x[target]], -1)
  score = jax.nn.leaky_relu(half.dot(pair, params["score"])[:, 0], 0.2)
  top = jax.ops.segment_max(score, target, 20)
  weight = jnp.exp(score - jnp.where(jnp.isfinite(top), top, 0)[target])
  weight = weight / (jax.ops.segment_sum(weight, target, 20)[target] + 1e-9)
  out = half.dot(jax.nn.elu(jax.ops.segment_sum(weight[:, None] * x[source], target, 20)), params["out"])
  return Out(jnp.mean((out - inputs["y"]) ** 2), {"weight": weight, "out": out})


@program(
  "fields: a Fourier layer, modes multiplied by complex weights",
  {"lift": (3, 16), "skip": (16, 16), "out": (16, 1), "real": (16, 16, 8), "imaginary": (16, 16, 8)},
  lambda rng: {"x": rng.standard_normal((4, 32, 3)), "y": rng.standard_normal((4, 32))},
)
def fourier_layer(half, params, inputs):
  x = half.dot(inputs["x"], params["lift"])
  modes = jnp.fft.rfft(x, axis=1)[:, :8]
  modes = jnp.einsum("bkc,cdk->bkd", modes, jax.lax.complex(params["real"], params["imaginary"]))
  mixed = jnp.fft.irfft(jnp.pad(modes, ((0, 0), (0, 9), (0, 0))), n=32, axis=1)
  x = jax.nn.gelu(mixed + half.dot(x, params["skip"]))
  out = half.dot(x, params["out"])[..., 0]
  return Out(jnp.mean((out - inputs["y"]) ** 2), {"mixed": mixed, "out": out})


@program(
  "control: a linear quadratic regulator, Riccati steps in a scan, of learnt costs",
  {"in": (8, 32), "bias": (32,), "out": (32, 3)},
  lambda rng: {"x": rng.standard_normal((4, 8)), "start": rng.standard_normal((4, 3))},
)
def riccati(half, params, inputs):
  a = jnp.eye(3) + 0.1 * jnp.array([[0.0, 1, 0], [0, 0, 1], [-0.5, -0.2, -0.1]])
  b = jnp.array([[0.0], [0.0], [0.1]])

  def cost(weights, start):
    q = jnp.diag(jax.nn.softplus(weights))

    def step(p, _):
      gain = jnp.linalg.solve(jnp.eye(1) * 0.1 + b.T @ p @ b, b.T @ p @ a)
      return q + a.T @ p @ (a - b @ gain), gain

    p, gains = jax.lax.scan(step, q, length=50)
    return start @ half.dot(p, start), gains[-1]

  costs, gains = jax.vmap(cost)(mlp(half, params, inputs["x"]), inputs["start"])
  return Out(costs.mean(), {"costs": costs, "gains": gains})
