"""Precision by module: paths of linen, nnx, Equinox, Haiku and named scopes, and the state of nnx modules."""

from __future__ import annotations

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

import mpjax
from tests.casting._conformance import normal

X = jnp.asarray(normal(8, 4, seed=1))


def by_path(fun, policy, overrides, *args):
  """{last parts of the path: dtype} of the matrix products."""
  rows = mpjax.explain(fun, policy, overrides=overrides)(*args).rows
  return {
    row.path: {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}[row.after]
    for row in rows
    if row.flops
  }


# One network, five ways: GPT/h0/attn, GPT/h0/mlp, GPT/h1/attn, GPT/h1/mlp, GPT/head


class LinenBlock(nn.Module):
  @nn.compact
  def __call__(self, x):
    x = x + nn.Dense(4, name="attn")(nn.LayerNorm(name="norm")(x))
    return x + nn.Dense(4, name="mlp")(x)


class LinenGPT(nn.Module):
  @nn.compact
  def __call__(self, x):
    for i in range(2):
      x = LinenBlock(name=f"h{i}")(x)
    return nn.Dense(3, name="head")(x)


def linen():
  class GPT(LinenGPT):
    pass

  model = GPT()
  params = model.init(jax.random.key(0), X)
  return model.apply, (params, X)


class Block(nnx.Module):
  def __init__(self, rngs):
    self.norm = nnx.LayerNorm(4, rngs=rngs)
    self.attn, self.mlp = (nnx.Linear(4, 4, rngs=rngs) for _ in range(2))

  def __call__(self, x):
    x = x + self.attn(self.norm(x))
    return x + self.mlp(x)


class GPT(nnx.Module):
  def __init__(self, rngs):
    self.h0, self.h1 = Block(rngs), Block(rngs)
    self.head = nnx.Linear(4, 3, rngs=rngs)

  def __call__(self, x):
    return self.head(self.h1(self.h0(x)))

  def logits(self, x):
    return self(x)


def nnx_argument():
  return (lambda model, x: model(x)), (GPT(nnx.Rngs(0)), X)


def nnx_module_itself():
  return GPT(nnx.Rngs(0)), (X,)


def nnx_bound_method():
  return GPT(nnx.Rngs(0)).logits, (X,)


def nnx_in_a_tree():
  return (lambda tree, x: tree["models"][0](x)), ({"models": [GPT(nnx.Rngs(0))]}, X)


def nnx_split():
  graphdef, state = nnx.split(GPT(nnx.Rngs(0)))

  def fun(state, x):
    # Not ours to name: a module that the function makes itself, named by the user.
    model = nnx.merge(graphdef, state)
    with jax.named_scope("GPT"):
      for name in ("h0", "h1"):
        with jax.named_scope(name):
          block = getattr(model, name)
          with jax.named_scope("attn"):
            x = x + block.attn(block.norm(x))
          with jax.named_scope("mlp"):
            x = x + block.mlp(x)
      with jax.named_scope("head"):
        return model.head(x)

  return fun, (state, X)


class EqxBlock(eqx.Module):
  attn: eqx.nn.Linear
  mlp: eqx.nn.Linear

  def __call__(self, x):
    with jax.named_scope("attn"):
      x = x + self.attn(x)
    with jax.named_scope("mlp"):
      return x + self.mlp(x)


def equinox():
  keys = jax.random.split(jax.random.key(0), 5)
  blocks = [
    EqxBlock(eqx.nn.Linear(4, 4, key=keys[2 * i]), eqx.nn.Linear(4, 4, key=keys[2 * i + 1])) for i in range(2)
  ]
  head = eqx.nn.Linear(4, 3, key=keys[4])

  @jax.named_scope("GPT")
  def one(blocks, head, x):
    for i, block in enumerate(blocks):
      with jax.named_scope(f"h{i}"):
        x = block(x)
    with jax.named_scope("head"):
      return head(x)

  return (lambda blocks, head, x: jax.vmap(one, (None, None, 0))(blocks, head, x)), (blocks, head, X)


def haiku():
  hk = pytest.importorskip("haiku")

  class Block(hk.Module):
    def __call__(self, x):
      x = x + hk.Linear(4, name="attn")(x)
      return x + hk.Linear(4, name="mlp")(x)

  class HaikuGPT(hk.Module):
    def __call__(self, x):
      for i in range(2):
        x = Block(name=f"h{i}")(x)
      return hk.Linear(3, name="head")(x)

  model = hk.without_apply_rng(hk.transform(lambda x: HaikuGPT(name="GPT")(x)))
  return model.apply, (model.init(jax.random.key(0), X), X)


NETWORKS = (
  linen,
  nnx_argument,
  nnx_module_itself,
  nnx_bound_method,
  nnx_in_a_tree,
  nnx_split,
  equinox,
  haiku,
)
PATHS = ("GPT/h0/attn", "GPT/h0/mlp", "GPT/h1/attn", "GPT/h1/mlp", "GPT/head")
OVERRIDES = {  # {regex: policy}: the policies at PATHS
  "none": ({}, "bf16 bf16 bf16 bf16 bf16"),
  "a name": ({"head": "fp32"}, "bf16 bf16 bf16 bf16 fp32"),
  "a name anywhere": ({"attn": "fp32"}, "fp32 bf16 fp32 bf16 bf16"),
  "a module and all under it": ({"h0": "fp32"}, "fp32 fp32 bf16 bf16 bf16"),
  "regular expression": ({r"h\d/mlp": "fp16"}, "bf16 fp16 bf16 fp16 bf16"),
  "from the front": ({".*/head": "fp32"}, "bf16 bf16 bf16 bf16 fp32"),
  "alternatives": ({"h0/attn|head": "fp32"}, "fp32 bf16 bf16 bf16 fp32"),
  "first match wins": ({"h0/attn": "fp16", "h0": "fp32", "attn": "fp32"}, "fp16 fp32 fp32 bf16 bf16"),
  "exception within": ({"h1/mlp": "bf16", "GPT": "fp32"}, "fp32 fp32 fp32 bf16 fp32"),
  "everything": ({".*": "fp32"}, "fp32 fp32 fp32 fp32 fp32"),
}  # fmt: skip


@pytest.mark.parametrize("network", NETWORKS, ids=lambda f: f.__name__)
def test_overrides_by_module(network):
  fun, args = network()
  for name, (overrides, want) in OVERRIDES.items():
    found = by_path(fun, "bf16", overrides, *args)
    # Equinox's own layers are scopes too.
    short = {path.removesuffix("/eqx.nn.Linear"): policy for path, policy in found.items()}
    assert short == dict(zip(PATHS, want.split(), strict=True)), name
  # What is done is what is explained.
  cast = mpjax.autocast(fun, "bf16", overrides={"h0": "fp32", "head": "fp16"})
  text = jax.jit(lambda *_: cast(*args)).trace(X).lower(lowering_platforms=("tpu",)).as_text()
  dots = [
    line.split(": (tensor<")[1].split(">")[0].split("x")[-1]
    for line in text.splitlines()
    if "dot_general" in line
  ]
  assert dots == ["f32", "f32", "bf16", "bf16", "f16"]


@pytest.mark.parametrize("network", NETWORKS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("regex", ["hea", "ead", "h", "GPT/h", "mlp/GPT", "h0//mlp"])
def test_a_regex_matches_whole_components_and_errors_list_the_paths(network, regex):
  fun, args = network()
  with pytest.raises(ValueError, match=f"'{regex}' matches no module path.*h0/attn.*head"):
    mpjax.autocast(fun, "bf16", overrides={regex: "fp32"})(*args)


SPECS = {
  "argument": ("fp16", {".*/head": "fp32"}),
  "policy mapping": ({"base": "fp16", "overrides": {".*/head": "fp32"}}, None),
  "policy list": ({"base": "fp16", "overrides": [[".*/head", "fp32"]]}, None),
  "argument before policy": ({"base": "fp16", "overrides": {"head": "bf16"}}, {"head": "fp32"}),
  "of its own": (mpjax.get_policy({"base": "fp16", "overrides": {"head": "params=float32,compute=float32"}}), None),
}  # fmt: skip


@pytest.mark.parametrize("name", SPECS)
def test_overrides_in_a_policy(name):
  policy, overrides = SPECS[name]
  fun, args = nnx_argument()
  if name == "argument before policy":
    # The policy's own matches nothing that is left, and is not an error for that.
    overrides = {"GPT/head": "fp32"}
  found = by_path(fun, policy, overrides, *args)
  assert found == dict(zip(PATHS, ["fp16"] * 4 + ["fp32"], strict=True))


def test_overrides_in_make_train_step():
  policy = {"base": "bf16", "autocast": True, "overrides": {".*/head": "fp32"}}
  model = GPT(nnx.Rngs(0))
  step = mpjax.make_train_step(lambda model, x: jnp.mean(model(x) ** 2), optax.sgd(0.1), policy)
  state = step.init(model)
  text = step.jitted.trace(state, X).lower(lowering_platforms=("tpu",)).as_text()
  dots = [line for line in text.splitlines() if "dot_general" in line]
  # Each has one product forward and two backward.
  count = lambda kind: sum(f"x{kind}>" in line.split(": (")[1].split(")")[0] for line in dots)
  assert (count("f32"), count("bf16")) == (3, 12)
  state, metrics = step(state, X)
  assert np.isfinite(metrics["loss"])
  bad = mpjax.make_train_step(
    lambda model, x: jnp.mean(model(x) ** 2), optax.sgd(0.1), {**policy, "overrides": {"haed": "fp32"}}
  )
  with pytest.raises(ValueError, match=r"'haed' matches no module path.*GPT/head"):
    bad(bad.init(model), X)


TRANSFORMED = {
  "jit": lambda m, x: jax.jit(lambda x: m(x))(x),
  "checkpoint": lambda m, x: jax.checkpoint(lambda x: m(x))(x),
  "vmap": lambda m, x: jax.vmap(lambda x: m(x))(x),
  "grad": lambda m, x: jax.grad(lambda x: jnp.sum(m(x)))(x),
  "scan": lambda m, x: jax.lax.scan(lambda c, x: (c, m(x)), 0, x)[1],
  "cond": lambda m, x: jax.lax.cond(x.sum() > 0, lambda x: m(x), lambda x: x[:, :3], x),
  "nnx.jit": lambda m, x: nnx.jit(lambda m, x: m(x))(m, x),
  "nnx.remat": lambda m, x: nnx.remat(lambda m, x: m(x))(m, x),
  "nnx.grad": lambda m, x: nnx.grad(lambda m, x: m(x).sum())(m, x),
  "nnx.vmap": lambda m, x: nnx.vmap(lambda m, x: m(x), in_axes=(None, 0))(m, x),
  "nnx.cond": lambda m, x: nnx.cond(x.sum() > 0, lambda m, x: m(x), lambda m, x: x[:, :3], m, x),
  "a copy": lambda m, x: nnx.merge(*nnx.split(m))(x),
}


@pytest.mark.parametrize("name", TRANSFORMED)
def test_paths_under_transformations(name):
  found = {}
  overrides = {"GPT/head": "fp32"}
  for path, policy in by_path(TRANSFORMED[name], "bf16", overrides, GPT(nnx.Rngs(0)), X).items():
    found.setdefault("head" in path.split("/"), set()).add(policy)
  assert found == {True: {"fp32"}, False: {"bf16"}}
