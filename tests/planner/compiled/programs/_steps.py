"""The functions whose compiled programs are kept, with the shapes of their arguments."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

f32, bf16 = jnp.float32, jnp.bfloat16


@dataclasses.dataclass(frozen=True)
class Step:
  """A function to compile.

  Attributes:
    function: of arrays.
    args: their shapes, with shardings where it runs on several devices.
    donated: numbers of the arguments whose memory results may take.
  """

  function: Callable[..., Any]
  args: tuple[Any, ...]
  donated: tuple[int, ...] = ()

  @property
  def donated_leaves(self):
    """Returns the positions of what is donated among the leaves of all arguments."""
    owner = [k for k, argument in enumerate(self.args) for _ in jax.tree.leaves(argument)]
    return [i for i, k in enumerate(owner) if k in self.donated]


def a_shape(*shape, dtype=f32):
  return jax.ShapeDtypeStruct(shape, dtype)


def adamw_step(loss, params, *batch):
  """An AdamW step of a loss, with its state given up."""
  tx = optax.adamw(1e-3)

  def step(params, state, x):
    value, grads = jax.value_and_grad(loss)(params, x)
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state, value

  return Step(step, (params, jax.eval_shape(tx.init, params), *batch), (0, 1))


def training():
  """A step with a loop over layers."""

  def loss(params, x):
    layer = lambda x, w: (jnp.tanh(x @ w), None)
    return jnp.mean(lax.scan(layer, x, params)[0] ** 2)

  return adamw_step(loss, a_shape(3, 64, 64), a_shape(128, 64))


def perceptron(layers, width, batch, dtype=f32, *, scan=False, remat=False):
  """A step of a chain of products."""
  layer = lambda x, w: jnp.tanh(x @ w.astype(dtype))
  layer = jax.checkpoint(layer) if remat else layer

  def loss(params, x):
    x = x.astype(dtype)
    if scan:
      x, _ = lax.scan(lambda c, w: (layer(c, w), None), x, params)
    else:
      for w in params:
        x = layer(x, w)
    return (x.astype(f32) ** 2).mean()

  params = a_shape(layers, width, width) if scan else [a_shape(width, width)] * layers
  return adamw_step(loss, params, a_shape(batch, width))


def convolutions():
  def step(params, x):
    def loss(params):
      h = x
      for w in params:
        h = jax.nn.relu(
          lax.conv_general_dilated(h, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        )
      return (h**2).mean()

    value, grads = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda w, g: w - 0.1 * g, params, grads), value

  return Step(step, ([a_shape(3, 3, 16, 16)] * 4, a_shape(32, 16, 16, 16)), (0,))


def updating(rows, width):
  def update(a, x, at):
    a = jnp.sin(a)
    for i in range(3):
      a = lax.dynamic_update_slice(a, x[None] * (i + 1), (at[i], 0))
    return jnp.cos(a) @ jnp.ones((width, width))

  return Step(update, (a_shape(rows, width), a_shape(width), a_shape(3, dtype=jnp.int32)))


def branching(width):
  branches = (lambda x: (x @ x @ x).sum(), lambda x: jnp.sin(x).sum())
  return Step(lambda x, c: lax.cond(c > 0, *branches, x), (a_shape(width, width), a_shape()))


def a_mesh(**sizes):
  return AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))


# Of [4096, 128] on each of four devices: what is done with it, dtype, operation, and how much more comes out.
CROSSINGS = [
  (lambda x: lax.psum(x, "data"), f32, "all-reduce", 1),
  (lambda x: lax.psum_scatter(x, "data", tiled=True), f32, "reduce-scatter", 1 / 4),
  (lambda x: lax.all_gather(x, "data", tiled=True), bf16, "all-gather", 4),
  (lambda x: lax.ppermute(x, "data", [(i, (i + 1) % 4) for i in range(4)]), bf16, "collective-permute", 1),
  (lambda x: lax.all_to_all(x, "data", 0, 0, tiled=True), f32, "all-to-all", 1),
]


def crossing():
  """Every kind of collective once."""
  mesh, spec = a_mesh(data=4), PartitionSpec("data")

  def local(*given):
    # Small results that depend on all of what crosses.
    moved = [move(x * 2) for (move, *_), x in zip(CROSSINGS, given, strict=True)]
    return [jnp.sum(jnp.tanh(x), axis=0, keepdims=True) for x in moved]

  sharded = jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
  place = NamedSharding(mesh, spec)
  shapes = [jax.ShapeDtypeStruct((4 * 4096, 128), dtype, sharding=place) for _, dtype, *_ in CROSSINGS]
  return Step(sharded, tuple(shapes))


def over_a_mesh(**sizes):
  """A bfloat16 step whose weights are divided over `fsdp`, and its rows over all devices."""
  mesh = a_mesh(**sizes)
  place = lambda *spec: NamedSharding(mesh, PartitionSpec(*spec))
  put = lambda shape, *spec: jax.ShapeDtypeStruct(shape, f32, sharding=place(*spec))

  def loss(params, x):
    up, down = (params[name].astype(bf16) for name in ("up", "down"))
    return jnp.mean(((jnp.tanh(x.astype(bf16) @ up) @ down).astype(f32) - x) ** 2)

  axis = "fsdp" if "fsdp" in sizes else None
  params = {"up": put((512, 2048), axis), "down": put((2048, 512), axis)}
  step = adamw_step(loss, params, put((4096, 512), tuple(sizes)))
  at = {x.shape: x.sharding for x in params.values()}
  laid = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at.get(x.shape, place()))
  params, state, batch = step.args
  return dataclasses.replace(step, args=(params, jax.tree.map(laid, state), batch))


# By name: the function, and the targets that it is compiled for.
ALONE = ("here", "v5e", "h200")
STEPS = {
  "training": (training, ALONE),
  "step": (lambda: perceptron(6, 256, 2048), ALONE),
  "half precision": (lambda: perceptron(6, 256, 512, bf16), ALONE),
  "wide layers": (lambda: perceptron(4, 512, 32), ALONE),
  "computing again": (lambda: perceptron(6, 256, 2048, remat=True), ALONE),
  "scan": (lambda: perceptron(6, 128, 2048, scan=True), ALONE),
  "scan in half precision": (lambda: perceptron(6, 256, 512, bf16, scan=True), ALONE),
  "convolutions": (convolutions, ALONE),
  "updating": (lambda: updating(64, 512), ALONE),
  "branching": (lambda: branching(256), ALONE),
  "crossing": (crossing, ("v5e:2x2", "h200:4")),
  "data": (lambda: over_a_mesh(data=4), ("v5e:2x2", "h200:4")),
  "fsdp": (lambda: over_a_mesh(data=2, fsdp=4), ("v5e:2x4", "h200:8")),
}
