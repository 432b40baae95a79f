"""Representations: whitening, variances, distances."""

import jax
import jax.numpy as jnp

from tests.casting.programs._ideal import Out, mlp, program


def views(rng, n=48):
  x = rng.standard_normal((n, 16))
  return {"a": x + 0.3 * rng.standard_normal((n, 16)), "b": x + 0.3 * rng.standard_normal((n, 16))}


MLP = {"in": (16, 32), "out": (32, 16)}


@program("vision: whitening by the Cholesky factor of a covariance (W-MSE)", MLP, views)
def whitening(half, params, inputs):
  def whitened(x):
    z = mlp(half, params, x)
    z = z - z.mean(0)
    factor = jnp.linalg.cholesky(z.T @ z / len(z) + 1e-4 * jnp.eye(16))
    return jax.scipy.linalg.solve_triangular(factor, z.T, lower=True).T

  a, b = whitened(inputs["a"]), whitened(inputs["b"])
  return Out(jnp.mean((a - b) ** 2), a)


@program(
  "vision: variance, invariance and covariance (VICReg), with eigenvalues of the covariance", MLP, views
)
def vicreg(half, params, inputs):
  a, b = mlp(half, params, inputs["a"]), mlp(half, params, inputs["b"])

  def terms(z):
    z = z - z.mean(0)
    covariance = jnp.einsum("ni,nj->ij", z, z) / (len(z) - 1)
    variance = jax.nn.relu(1 - jnp.sqrt(jnp.diag(covariance) + 1e-4))
    return variance.mean() + (jnp.sum(covariance**2) - jnp.sum(jnp.diag(covariance) ** 2)) / 16, covariance

  (loss_a, covariance), (loss_b, _) = terms(a), terms(b)
  rank = jnp.linalg.eigvalsh(jax.lax.stop_gradient(covariance))
  return Out(loss_a + loss_b + jnp.mean((a - b) ** 2), {"covariance": covariance, "eigenvalues": rank})


@program(
  "hierarchies: distances in a Poincare ball",
  {"points": lambda rng: 0.15 * rng.standard_normal((40, 8)), "turn": (8, 8)},
  lambda rng: {"a": rng.integers(0, 40, 64), "b": rng.integers(0, 40, 64), "y": rng.uniform(0.5, 3, 64)},
)
def poincare(half, params, inputs):
  points = half.dot(params["points"], params["turn"])
  points = points / jnp.maximum(1.0, jnp.linalg.norm(points, axis=-1, keepdims=True) / (1 - 1e-3))
  a, b = points[inputs["a"]], points[inputs["b"] + (inputs["a"] == inputs["b"])]
  square = lambda x: jnp.sum(x**2, -1)
  distance = jnp.arccosh(1 + 2 * square(a - b) / ((1 - square(a)) * (1 - square(b))) + 1e-7)
  return Out(jnp.mean((distance - inputs["y"]) ** 2), distance)
