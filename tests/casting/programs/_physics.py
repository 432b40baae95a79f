"""Physics and geometry: integrators, chains of joints, graphs, an ODE by diffrax."""

import jax
import jax.numpy as jnp

from tests.casting.programs._ideal import Out, program


def mlp(half, params, x):
  return half.dot(jnp.tanh(half.dot(x, params["in"])), params["out"])


@program(
  "dynamics: a learnt Hamiltonian, leapfrog steps of its gradients",
  {"in": (4, 32), "out": (32, 1)},
  lambda rng: {"q": rng.standard_normal((8, 2)), "p": rng.standard_normal((8, 2))},
)
def hamiltonian(half, params, inputs):
  energy = lambda q, p: mlp(half, params, jnp.concatenate([q, p], -1)).sum() + 0.5 * jnp.sum(p**2)

  def step(carry, _):
    q, p = carry
    p = p - 0.01 * jax.grad(energy, 0)(q, p)
    q = q + 0.02 * jax.grad(energy, 1)(q, p)
    return (q, p - 0.01 * jax.grad(energy, 0)(q, p)), None

  (q, p), _ = jax.lax.scan(step, (inputs["q"], inputs["p"]), length=60)
  return Out(jnp.mean(q**2 + p**2), {"moved": q - inputs["q"], "pushed": p - inputs["p"]})


@program(
  "fluids: a finite-difference solver with a learnt correction, many small steps in a scan",
  {"first": (3, 3, 1, 8), "second": (3, 3, 8, 1)},
  lambda rng: {"u": rng.standard_normal((2, 12, 12)), "target": rng.standard_normal((2, 12, 12))},
)
def learnt_correction(half, params, inputs):
  def step(u, _):
    around = sum(jnp.roll(u, shift, axis) for shift in (1, -1) for axis in (1, 2)) - 4 * u
    learnt = half.conv(jax.nn.gelu(half.conv(u[..., None], params["first"])), params["second"])[..., 0]
    return u + 0.01 * (around + learnt), None

  u, _ = jax.lax.scan(step, inputs["u"], length=50)
  return Out(jnp.mean((u - inputs["target"]) ** 2), {"moved": u - inputs["u"]})


@program(
  "robots: a chain of joints, a product of small matrices, angles that a network corrects",
  {"in": (7, 32), "out": (32, 7)},
  lambda rng: {"angles": rng.uniform(-1, 1, (16, 7)), "reach": rng.standard_normal((16, 3))},
)
def chain_of_joints(half, params, inputs):
  angles = inputs["angles"] + 0.1 * mlp(half, params, inputs["angles"])

  def joint(angle, i):
    c, s, one, zero = jnp.cos(angle), jnp.sin(angle), jnp.ones(()), jnp.zeros(())
    about = jnp.where(
      i % 2 == 0,
      jnp.array([[c, -s, zero, one], [s, c, zero, zero], [zero, zero, one, zero], [zero, zero, zero, one]]),
      jnp.array([[c, zero, s, zero], [zero, one, zero, zero], [-s, zero, c, one], [zero, zero, zero, one]]),
    )
    return about

  def hand(angles):
    place = lambda pose, now: (pose @ joint(*now), None)
    pose, _ = jax.lax.scan(place, jnp.eye(4), (angles, jnp.arange(7)))
    return pose[:3, 3]

  hands = jax.vmap(hand)(angles)
  return Out(jnp.mean((hands - inputs["reach"]) ** 2), hands)


@program(
  "graphs: a personalised propagation, ten steps of a normalised adjacency",
  {"in": (8, 32), "out": (32, 4)},
  lambda rng: {
    "x": rng.standard_normal((30, 8)),
    "edges": rng.integers(0, 30, (2, 120)),
    "y": rng.integers(0, 4, 30),
  },
)
def propagation(half, params, inputs):
  source, target = inputs["edges"]
  adjacency = jnp.zeros((30, 30)).at[target, source].add(1) + jnp.eye(30)
  degree = adjacency.sum(-1)
  spread = adjacency / degree[:, None]
  h = mlp(half, params, inputs["x"])
  z = jax.lax.fori_loop(0, 10, lambda _, z: 0.9 * half.dot(spread, z) + 0.1 * h, h)
  losses = -jnp.take_along_axis(jax.nn.log_softmax(z), inputs["y"][:, None], -1)[:, 0]
  return Out(losses.mean(), z, degree.astype(int))


@program(
  "knowledge: relations as rotations of complex embeddings",
  {"real": (50, 8), "imaginary": (50, 8), "phase": lambda rng: rng.uniform(-3, 3, (5, 8)), "turn": (16, 16)},
  lambda rng: {
    "head": rng.integers(0, 50, 64),
    "tail": rng.integers(0, 50, 64),
    "relation": rng.integers(0, 5, 64),
  },
)
def complex_rotations(half, params, inputs):
  table = half.dot(jnp.concatenate([params["real"], params["imaginary"]], -1) * 7, params["turn"])
  entities = jax.lax.complex(table[:, :8], table[:, 8:])
  moved = entities[inputs["head"]] * jnp.exp(1j * params["phase"][inputs["relation"]])
  distance = jnp.sum(jnp.abs(moved - entities[inputs["tail"]] + 1e-6), -1)
  return Out(-jax.nn.log_sigmoid(6 - distance).mean(), distance)


@program(
  "dynamics: a neural ODE by diffrax, saved at given times",
  {"in": (2, 16), "out": (16, 2), "read": (2, 12)},
  lambda rng: {"y": rng.standard_normal(2), "target": rng.standard_normal((9, 12))},
  needs="diffrax",
)
def diffrax_ode(half, params, inputs):
  import diffrax

  term = diffrax.ODETerm(lambda t, y, _: jnp.tanh(y @ params["in"]) @ params["out"])  # it needs its digits
  times = jnp.linspace(0.0, 1.7, 9)
  found = diffrax.diffeqsolve(
    term,
    diffrax.Tsit5(),
    t0=0.0,
    t1=1.7,
    dt0=0.1,
    y0=inputs["y"],
    saveat=diffrax.SaveAt(ts=times),
    stepsize_controller=diffrax.PIDController(rtol=1e-4, atol=1e-6),
    max_steps=256,
  )
  loss = jnp.mean((half.dot(found.ys, params["read"]) - inputs["target"]) ** 2)
  return Out(loss, {"y": found.ys, "t": found.ts}, found.stats["num_steps"])
