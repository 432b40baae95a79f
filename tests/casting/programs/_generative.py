"""Generative models: diffusion, radiance, energies."""

import jax
import jax.numpy as jnp

from tests.casting.programs._ideal import Out, program


def mlp(half, params, x):
  return half.dot(jax.nn.silu(half.dot(x, params["in"])), params["out"])


def clock(t, d=16):
  """Sines and cosines of times [B]."""
  angles = jnp.einsum(
    "b,f->bf", t.astype(jnp.float32), jnp.exp(-jnp.log(10000.0) * jnp.arange(d // 2) / (d // 2))
  )
  return jnp.concatenate([jnp.cos(angles), jnp.sin(angles)], -1)


DENOISER = {"in": (24, 64), "out": (64, 8), "clock": (16, 64), "classes": (4, 64)}


def denoise(half, params, x, t, label):
  hidden = half.dot(jnp.concatenate([x, clock(t)], -1), params["in"]) + half.dot(clock(t), params["clock"])
  return half.dot(jax.nn.silu(hidden + 3 * params["classes"][label]), params["out"])


@program(
  "images: a diffusion step, noise of a schedule at integer times",
  DENOISER,
  lambda rng: {
    "x": rng.standard_normal((64, 8)),
    "t": rng.integers(0, 1000, 64),
    "label": rng.integers(0, 4, 64),
    "seed": rng.integers(0, 2**31),
  },
)
def diffusion(half, params, inputs):
  kept = jnp.cumprod(1 - jnp.linspace(1e-4, 0.02, 1000))
  noise = jax.random.normal(jax.random.key(inputs["seed"]), (64, 8))
  at = kept[inputs["t"]][:, None]
  x = jnp.sqrt(at) * inputs["x"] + jnp.sqrt(1 - at) * noise
  guess = denoise(half, params, x, inputs["t"], inputs["label"])
  weight = jnp.minimum(at / (1 - at), 5.0)
  return Out(jnp.mean(weight * (guess - noise) ** 2), {"noised": x, "guess": guess})


@program(
  "images: sampling by diffusion with guidance, a sample that a scan carries",
  DENOISER,
  lambda rng: {"x": rng.standard_normal((16, 8)), "label": rng.integers(1, 4, 16)},
  # An element that a rounding takes over the edge of the clip has another gradient. In fp16 it is 2.9 times the
  # ideal error if XLA for the CPU compiles for AVX2, and 3.3 times for AVX-512.
  factor=4,
)
def guided_sampling(half, params, inputs):
  kept = jnp.cumprod(1 - jnp.linspace(1e-4, 0.02, 1000))
  times = jnp.arange(980, -1, -20)

  def step(x, now):
    t, following = now
    clocks = jnp.full(16, t)
    given = denoise(half, params, x, clocks, inputs["label"])
    free = denoise(half, params, x, clocks, jnp.zeros(16, int))
    noise = free + 2.0 * (given - free)
    a, b = kept[t], jnp.where(following >= 0, kept[following], 1.0)
    clean = jnp.clip((x - jnp.sqrt(1 - a) * noise) / jnp.sqrt(a), -3, 3)
    return jnp.sqrt(b) * clean + jnp.sqrt(1 - b) * noise, None

  x, _ = jax.lax.scan(step, inputs["x"], (times, times - 20))
  return Out(jnp.mean(x**2), x)


@program(
  "scenes: NeRF, frequencies of positions by einsum, transmittance along rays",
  {"in": (30, 64), "density": (64, 1), "colour": (64, 3)},
  lambda rng: {
    "origins": rng.uniform(-1, 1, (12, 3)),
    "directions": rng.standard_normal((12, 3)),
    "y": rng.random((12, 3)),
  },
)
def radiance_field(half, params, inputs):
  depth = jnp.linspace(0.5, 3.5, 24)
  points = inputs["origins"][:, None] + depth[:, None] * inputs["directions"][:, None]
  angles = jnp.einsum("rsi,f->rsif", points, 2.0 ** jnp.arange(5) * jnp.pi).reshape(12, 24, 15)
  hidden = jax.nn.relu(half.dot(jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], -1), params["in"]))
  density = jax.nn.softplus(half.dot(hidden, params["density"])[..., 0])
  colour = jax.nn.sigmoid(half.dot(hidden, params["colour"]))
  alpha = 1 - jnp.exp(-density * (depth[1] - depth[0]))
  through = jnp.cumprod(jnp.concatenate([jnp.ones((12, 1)), 1 - alpha[:, :-1] + 1e-10], -1), -1)
  weights = alpha * through
  seen = jnp.einsum("rs,rsc->rc", weights, colour)
  far = jnp.einsum("rs,s->r", weights, depth)
  return Out(jnp.mean((seen - inputs["y"]) ** 2), {"seen": seen, "depth": far, "angles": angles})


@program(
  "densities: an energy, sampled by Langevin's steps in a fori_loop",
  {"in": (4, 32), "out": (32, 1)},
  lambda rng: {
    "x": rng.standard_normal((16, 4)),
    "start": rng.standard_normal((16, 4)),
    "seed": rng.integers(0, 2**31),
  },
)
def langevin(half, params, inputs):
  energy = lambda params, x: mlp(half, params, x)[..., 0] + 0.5 * jnp.sum(x**2, -1)

  def step(i, x):
    slope = jax.grad(lambda x: energy(params, x).sum())(x)
    key = jax.random.fold_in(jax.random.key(inputs["seed"]), i)
    return x - 0.005 * slope + 0.1 * jax.random.normal(key, x.shape)

  sample = jax.lax.stop_gradient(jax.lax.fori_loop(0, 60, step, inputs["start"]))
  a, b = energy(params, inputs["x"]), energy(params, sample)
  return Out(a.mean() - b.mean() + 0.1 * jnp.mean(a**2 + b**2), {"sample": sample, "energy": b})
