"""A deep float16 network that no single loss scale can train, and layer-wise scales can.

    python scripts/bench.py layerwise [--steps N] [--json FILE] [--plot FILE]

32 layers of 8 tanh units, each of which multiplies the gradient that passes by 3/8, as unrolled models do
(scale_gradient in MuZero). The gradient falls by 2^45 from the last layer to the first; float16 has 2^40 from
its largest number to its smallest. The first layer has to find one direction among 16 inputs, so a network
whose first layers stand still does not learn. Prints for each layer the share of its gradient that is zero,
then the losses after training.
"""

from __future__ import annotations

import argparse
import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import mpjax
from benchmarks._record import origin, write
from mpjax._render.picture_style import VERMILLION, new_figure, picture_style, save_figure, shades

DEPTH, WIDTH, INPUTS, BATCH = 32, 8, 16, 256
ATTENUATION = 0.375
NOISE = 0.3
EXPONENTS = tuple(range(0, 41, 4))
TRAINED = (0, 8, 16, 24)
DIRECTION = np.float32(np.random.default_rng(0).normal(size=INPUTS) / np.sqrt(INPUTS))


def initialise() -> list[dict[str, jax.Array]]:
  """Orthogonal weights, a little above 1 inside, and small biases."""
  rng = np.random.default_rng(1)
  sizes = [INPUTS, *[WIDTH] * (DEPTH - 1), 1]
  params = []
  for i, (n, m) in enumerate(itertools.pairwise(sizes)):
    orthogonal = np.linalg.qr(rng.normal(size=(max(n, m), min(n, m))))[0]
    gain = 1.2 if 0 < i < DEPTH - 1 else 1.0
    weights = orthogonal if n >= m else orthogonal.T
    params.append({"w": jnp.float32(gain * weights), "b": jnp.float32(0.1 * rng.normal(size=m))})
  return params


def draw(key: jax.Array, noise: float = NOISE, rows: int = BATCH) -> tuple[jax.Array, jax.Array]:
  """Inputs [rows, INPUTS] and noisy targets [rows, 1]."""
  key_x, key_noise = jax.random.split(key)
  x = jax.random.normal(key_x, (rows, INPUTS))
  return x, jnp.sin(2 * (x @ DIRECTION))[:, None] + noise * jax.random.normal(key_noise, (rows, 1))


def dense(p: dict[str, jax.Array], x: jax.Array) -> jax.Array:
  return x @ p["w"] + p["b"]


def activation(x: jax.Array) -> jax.Array:
  """Tanh, whose gradient is multiplied by ATTENUATION."""
  y, factor = jnp.tanh(x), jnp.asarray(ATTENUATION, x.dtype)
  return jax.lax.stop_gradient(y - y * factor) + y * factor


def plain_loss(params: Any, x: jax.Array, y: jax.Array, dtype: Any) -> jax.Array:
  h = x.astype(dtype)
  low = mpjax.cast_floating(params, dtype)
  for p in low[:-1]:
    h = activation(dense(p, h))
  return jnp.mean((dense(low[-1], h).astype(jnp.float32) - y) ** 2)


def layerwise_loss(params: Any, x: jax.Array, y: jax.Array, dtype: Any, scales: Any = None) -> jax.Array:
  """The same with adaptive scales; the gradient with respect to `scales` is what was used."""
  scaling = mpjax.loss_scale.layerwise_loss_scale()
  scales = [None] * DEPTH if scales is None else scales
  h = scaling.start(x, dtype)
  for p, scale in zip(params[:-1], scales, strict=False):
    h = scaling.apply(activation, scaling.layer(dense, p, h, scale=scale))
  return jnp.mean((scaling.finish(scaling.layer(dense, params[-1], h, scale=scales[-1])) - y) ** 2)


def gradient_table() -> dict[str, Any]:
  """By layer: largest gradient in float32, and the share of zeros in float16 at each scale."""
  params, (x, y) = initialise(), draw(jax.random.key(0))
  exact = jax.grad(plain_loss)(params, x, y, jnp.float32)
  weights = lambda grads: [np.asarray(g["w"]) for g in grads]
  zeros = lambda grads: [float((g == 0).mean()) for g in weights(grads)]
  report: dict[str, Any] = {"largest": [float(np.abs(g).max()) for g in weights(exact)], "single": {}}
  for exponent in EXPONENTS:
    grads = jax.grad(lambda p, k=exponent: plain_loss(p, x, y, jnp.float16) * 2.0**k)(params)
    report["single"][exponent] = {"zeros": zeros(grads), "finite": bool(mpjax.all_finite(grads))}
  unmeasured = [jnp.zeros([])] * DEPTH
  grads, scales = jax.grad(layerwise_loss, argnums=(0, 4))(params, x, y, jnp.float16, unmeasured)
  norm = np.linalg.norm
  errors = [float(norm(a - b) / norm(b)) for a, b in zip(weights(grads), weights(exact), strict=True)]
  report["layerwise"] = {"zeros": zeros(grads), "scales": [float(s) for s in scales], "errors": errors}
  return report


def train(loss: Callable[..., jax.Array], steps: int, scale: float = 1.0) -> dict[str, float]:
  """Adam on fresh batches; non-finite steps are skipped. Loss on 8192 noisy and noiseless targets."""
  adam = optax.adam(optax.cosine_decay_schedule(3e-3, steps), eps=1e-30)
  tx = mpjax.static_loss_scale(adam, scale)

  def step(carry: Any, i: jax.Array) -> tuple[Any, None]:
    params, state = carry
    x, y = draw(jax.random.fold_in(jax.random.key(1), i))
    grads = jax.grad(lambda p: mpjax.scale_loss(loss(p, x, y), state))(params)
    updates, state = tx.update(grads, state, params)
    return (optax.apply_updates(params, updates), state), None

  params = initialise()
  run = jax.jit(lambda carry: jax.lax.scan(step, carry, jnp.arange(steps))[0])
  params, state = run((params, tx.init(params)))
  evaluate = lambda noise: float(
    plain_loss(params, *draw(jax.random.key(2), noise=noise, rows=8192), jnp.float32)
  )
  skipped = int(state.skipped_steps)
  return {"eval_loss": evaluate(NOISE), "noiseless": evaluate(0.0), "skipped": skipped, "steps": steps}


def add_arguments(parser: argparse.ArgumentParser) -> None:
  parser.add_argument("--steps", type=int, default=1500)
  parser.add_argument("--plot", help="picture of the shares of zeros by layer (needs matplotlib)")


def run(options: argparse.Namespace) -> int:

  table = gradient_table()
  print("share of zeros in the weight gradients of float16, by layer")
  print(
    f"{'layer':>6}{'float32 max':>13}" + "".join(f"{f'2^{k}':>8}" for k in EXPONENTS) + f"{'layer-wise':>12}"
  )
  for i in range(DEPTH):
    row = "".join(f"{table['single'][k]['zeros'][i]:8.0%}" for k in EXPONENTS)
    largest = f"2^{np.log2(table['largest'][i]):.1f}"
    print(f"{i:6}{largest:>13}{row}{table['layerwise']['zeros'][i]:12.0%}")
  finite = "".join(f"{'yes' if table['single'][k]['finite'] else 'no':>8}" for k in EXPONENTS)
  print(f"{'finite':>19}{finite}{'yes':>12}")
  print(
    f"largest error of a layer's gradient with layer-wise scales: {max(table['layerwise']['errors']):.1%}\n"
  )

  in_half = functools.partial(plain_loss, dtype=jnp.float16)
  runs = {"float32": train(functools.partial(plain_loss, dtype=jnp.float32), options.steps)}
  runs["layer-wise"] = train(functools.partial(layerwise_loss, dtype=jnp.float16), options.steps)
  runs |= {f"2^{k}": train(in_half, options.steps, 2.0**k) for k in TRAINED}
  print(f"{'':12}{'eval loss':>10}{'noiseless':>11}{'skipped':>9}{'against float32':>17}")
  for name, run in runs.items():
    against = run["eval_loss"] / runs["float32"]["eval_loss"] - 1
    print(f"{name:12}{run['eval_loss']:10.4f}{run['noiseless']:11.4f}{run['skipped']:9}{against:17.1%}")
  report = origin(f"layerwise --steps {options.steps}", "optax") | {"gradients": table, "runs": runs}
  write(report, options.json)
  if options.plot:
    save_figure(picture(table), options.plot)
  return 0


@picture_style()
def picture(table: dict[str, Any]) -> Any:
  """Share of zeros by layer, a line for each scale that leaves any; the others overflow."""
  single = {int(k): row for k, row in table["single"].items()}  # JSON's keys are strings
  drawn = [k for k, row in single.items() if max(row["zeros"]) > 0]
  heading = f"Weight gradients of {DEPTH} layers in float16"
  larger = [k for k in single if k not in drawn]
  if larger:
    heading += f"\n(scales from $2^{{{larger[0]}}}$ on leave no zeros and overflow)"
  figure = new_figure(4.0, heading)
  axes = figure.subplots()
  for colour, k in zip(shades(len(drawn)), drawn, strict=True):
    name = f"loss scale $2^{{{k}}}$" + ("" if single[k]["finite"] else ", overflows")
    axes.plot(single[k]["zeros"], "-" if single[k]["finite"] else ":", color=colour, label=name)
  axes.plot(table["layerwise"]["zeros"], color=VERMILLION, linewidth=3, label="layer-wise scales")
  axes.set(xlabel="layer", ylabel="share of zeros", xlim=(-0.5, DEPTH - 0.5))
  axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:g}%")
  axes.grid(axis="y")
  figure.legend(loc="outside right upper")
  return figure
