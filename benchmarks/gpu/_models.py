"""The models that the gpu suite trains in JAX, and their training steps by mpjax, by hand and by mpx.

GPT and ViT are those of `mpjax.zoo.models`, the ResNet is here: none names a compute dtype, so casting the
parameters and the images is all that there is to casting by hand. Every step has the same AdamW.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import mpjax
from mpjax.zoo.models import GPT, ViT

EMULATED = {"emulate": True}


@dataclasses.dataclass(frozen=True)
class Training:
  """A training step and what it starts from.

  Attributes:
    step: jitted, `(state, batch) -> (state, metrics)`; the state is donated.
    params: makes the parameters, a tree of arrays.
    state: parameters to the first state.
    batch: makes a batch.
  """

  step: Any
  params: Callable[[], Any]
  state: Callable[[Any], Any]
  batch: Callable[[], Any]


class ResNet50(nn.Module):
  """Bottleneck blocks, the stride in the 3x3 convolution; paddings as PyTorch has them."""

  classes: int
  stages: tuple[int, ...] = (3, 4, 6, 3)
  width: int = 64

  @nn.compact
  def __call__(self, images: jax.Array) -> jax.Array:
    """[B, H, W, 3] -> [B, classes]."""
    x = nn.Conv(self.width, (7, 7), 2, padding=3, use_bias=False, name="stem")(images)
    x = nn.relu(_norm(name="stem_norm")(x))
    x = nn.max_pool(x, (3, 3), (2, 2), padding=((1, 1), (1, 1)))
    for stage, blocks in enumerate(self.stages):
      for i in range(blocks):
        stride = 2 if stage and not i else 1
        x = Bottleneck(self.width * 2**stage, stride, name=f"stage_{stage}_block_{i}")(x)
    return nn.Dense(self.classes, name="head")(x.mean((1, 2)))


class Bottleneck(nn.Module):
  channels: int
  stride: int

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    """[B, H, W, C] -> [B, H / stride, W / stride, 4 channels]."""
    conv = functools.partial(nn.Conv, use_bias=False)
    wide = 4 * self.channels
    y = nn.relu(_norm(name="norm_0")(conv(self.channels, (1, 1), name="conv_0")(x)))
    y = conv(self.channels, (3, 3), self.stride, padding=1, name="conv_1")(y)
    y = conv(wide, (1, 1), name="conv_2")(nn.relu(_norm(name="norm_1")(y)))
    y = _norm(name="norm_2", scale_init=nn.initializers.zeros)(y)
    if x.shape != y.shape:
      x = _norm(name="shortcut_norm")(conv(wide, (1, 1), self.stride, name="shortcut")(x))
    return nn.relu(x + y)


_norm = functools.partial(nn.BatchNorm, use_running_average=False, momentum=0.9)


class Model:
  """A model of some size, as a loss of `(parameters, batch, what it carries besides)`.

  Args:
    task: `kind` (gpt, vit, resnet), `sizes`, `batch`, `seq` or `image`, and `attention`.
  """

  def __init__(self, task: dict[str, Any]):
    self.kind, self._task = task["kind"], task
    sizes = task["sizes"]
    if self.kind == "gpt":
      self._make = lambda: GPT(
        vocab_size=sizes["vocab"],
        max_len=task["seq"],
        dim=sizes["dim"],
        layers=sizes["layers"],
        heads=sizes["heads"],
        attention=task["attention"],
        rngs=nnx.Rngs(0),
      )
      self._graphdef = nnx.graphdef(nnx.eval_shape(self._make))
    elif self.kind == "vit":
      self._module: nn.Module = ViT(
        sizes["classes"],
        patch=sizes["patch"],
        dim=sizes["dim"],
        layers=sizes["layers"],
        heads=sizes["heads"],
        attention=task["attention"],
      )
    else:
      self._module = ResNet50(sizes["classes"], tuple(sizes["stages"]), sizes["width"])

  def variables(self) -> dict[str, Any]:
    """New parameters under `params`, and what the model carries besides under other names."""
    if self.kind == "gpt":
      return {"params": nnx.as_pure(nnx.state(self._make(), nnx.Param))}
    side = self._task["image"]
    arguments, module = {}, self._module
    if self.kind == "vit":  # the fused attention takes no float32, which it would be given here
      arguments, module = {"train": False}, self._module.clone(attention="xla")
    return dict(module.init(jax.random.key(0), jnp.zeros((1, side, side, 3)), **arguments))

  def merge(self, params: Any) -> Any:
    """The nnx module of a GPT's parameters."""
    return nnx.merge(self._graphdef, params)

  def loss(self, params: Any, batch: Any, carried: Any) -> tuple[jax.Array, Any]:
    """Mean cross entropy, float32[], and what is carried on; a GPT may be given as its module."""
    if self.kind == "gpt":
      model = params if isinstance(params, GPT) else self.merge(params)
      return _cross_entropy(model(batch["tokens"][:, :-1]), batch["tokens"][:, 1:]), carried
    arguments = {"train": True} if self.kind == "vit" else {}
    logits, carried = self._module.apply(
      {"params": params, **carried}, batch["images"], **arguments, mutable=list(carried)
    )
    return _cross_entropy(logits, batch["labels"]), carried

  def batch(self) -> dict[str, jax.Array]:
    """Random tokens, or images and labels."""
    rng, rows = np.random.default_rng(0), self._task["batch"]
    if self.kind == "gpt":
      shape = (rows, self._task["seq"] + 1)
      return {"tokens": jnp.asarray(rng.integers(0, self._task["sizes"]["vocab"], shape), jnp.int32)}
    side = self._task["image"]
    images = jnp.asarray(rng.standard_normal((rows, side, side, 3), np.float32))
    labels = rng.integers(0, self._task["sizes"]["classes"], rows)
    return {"images": images, "labels": jnp.asarray(labels, jnp.int32)}


def _cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
  return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), labels).mean()


def training(task: dict[str, Any]) -> Training:
  """The training step of a task, which says by what: `mpjax`, `hand` or `mpx`."""
  adamw = dict(task["adamw"])
  tx = optax.adamw(adamw.pop("learning_rate"), **adamw)
  make = {"mpjax": _by_mpjax, "hand": _by_hand, "mpx": _by_mpx}[task["by"]]
  return make(Model(task), tx, task["policy"])


def policy_here(policy: dict[str, Any]) -> dict[str, Any]:
  """The policy, with FP8 emulated where there is none: on a CPU."""
  if "fp8" not in policy or jax.default_backend() != "cpu":
    return policy
  return policy | {"fp8": EMULATED | (policy["fp8"] or {})}


def _by_mpjax(model: Model, tx: Any, policy: Any) -> Training:
  step = mpjax.make_train_step(_loss_fn(model), tx, policy_here(policy))

  def state(variables: Any) -> Any:
    params, carried = _apart(variables)
    batch = jax.eval_shape(model.batch)
    if model.kind == "gpt":
      return step.init(model.merge(params), batch=batch)
    return step.init(params, model_state=carried or None, batch=batch)

  return Training(step.jitted, model.variables, state, model.batch)


def _loss_fn(model: Model) -> Callable[..., Any]:
  """The loss as `mpjax.make_train_step` takes it."""

  def stateless(params: Any, batch: Any) -> jax.Array:
    return model.loss(params, batch, {})[0]

  def stateful(params: Any, batch: Any, model_state: Any) -> Any:
    loss, model_state = model.loss(params, batch, model_state)
    return loss, {}, model_state

  return stateful if model.kind == "resnet" else stateless


def _by_hand(model: Model, tx: Any, dtype: str) -> Training:
  half = lambda tree: jax.tree.map(
    lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x, tree
  )

  def step(state: Any, batch: Any) -> Any:
    params, opt_state, carried = state
    loss = lambda params: model.loss(half(params), half(batch), carried)
    (value, carried), grads = jax.value_and_grad(loss, has_aux=True)(params)
    updates, opt_state = tx.update(grads, opt_state, params)
    return (optax.apply_updates(params, updates), opt_state, carried), {"loss": value}

  def state(variables: Any) -> Any:
    params, carried = _apart(variables)
    return params, tx.init(params), carried

  return Training(jax.jit(step, donate_argnums=0), model.variables, state, model.batch)


def _by_mpx(model: Model, tx: Any, dtype: str) -> Training:
  """As its README has it: gradients, scale and update are the package's."""
  import mpx

  mpx.set_half_precision_datatype(getattr(jnp, dtype))
  loss = lambda params, batch: model.loss(params, batch, {})[0]

  def step(state: Any, batch: Any) -> Any:
    params, opt_state, (value, least, counter) = state
    scale = mpx.DynamicLossScaling(value, least, factor=2, period=2000, counter=counter)
    value, scale, finite, grads = mpx.filter_value_and_grad(loss, scale)(params, batch)
    params, opt_state = mpx.optimizer_update(params, tx, opt_state, grads, finite)
    kept = (scale.loss_scaling, scale.min_loss_scaling, scale.counter)
    return (params, opt_state, kept), {"loss": value}

  def state(variables: Any) -> Any:
    params, _ = _apart(variables)
    return params, tx.init(params), (jnp.float32(2**15), jnp.float32(1), jnp.int32(0))

  return Training(jax.jit(step, donate_argnums=0), model.variables, state, model.batch)


def _apart(variables: Any) -> tuple[Any, dict[str, Any]]:
  return variables["params"], {name: tree for name, tree in variables.items() if name != "params"}


def figures(task: dict[str, Any], fp8: dict[str, Any] | None = None) -> dict[str, Any]:
  """What is known of a model without running it.

  Args:
    task: as for `Model`.
    fp8: policies in FP8 by name.

  Returns:
    `parameters`; `flops`, those of the products and convolutions of a step: three times the forward pass's
    as traced, less the gradient of the images, which nobody takes (nothing is taken off for a causal mask,
    nothing added for what is computed again); and `fp8_share`, the part of them that is FP8, by name.
  """
  model = Model(task | {"attention": "xla"})
  variables = jax.eval_shape(model.variables)
  params, carried = _apart(variables)
  given = model.merge(params) if model.kind == "gpt" else params
  extra: Any = {"model_state": carried} if carried else {}
  explained = lambda policy: mpjax.explain(
    _loss_fn(model), given, jax.eval_shape(model.batch), **extra, policy=policy
  )
  rows = [row for row in explained("bf16").rows if row.flops]
  forward = sum(row.flops for row in rows)
  shares = {}
  for name, policy in (fp8 or {}).items():
    policy = mpjax.get_policy(policy | {"fp8": EMULATED | policy.get("fp8", {})}).without_histories()
    done = sum(row.flops for row in explained(policy).rows if mpjax.formats.narrow_bits(row.after))
    shares[name] = done / forward
  return {
    "parameters": sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params)),
    "flops": 3 * forward - (0 if model.kind == "gpt" else rows[0].flops),
    "fp8_share": shares,
  }
