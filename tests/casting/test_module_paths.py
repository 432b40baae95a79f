"""Precision by module: paths of linen, nnx, Equinox, Haiku and named scopes."""

import equinox as eqx
import jax
import pytest
from flax import linen as nn, nnx

import mpjax
from tests.casting._conformance import filled, normal
from tests.casting._jaxprs import multiplied, walk

X = normal(8, 4, seed=1)


def by_path(fun, policy, overrides, *args):
  """{last parts of the path: dtype} of the matrix products."""
  rows = mpjax.explain(fun, *args, policy=policy, overrides=overrides).rows
  return {
    row.path: {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}[row.after]
    for row in rows
    if row.flops
  }


# Of one network, in several libraries.
PATHS = ("GPT/h0/attn", "GPT/h0/mlp", "GPT/h1/attn", "GPT/h1/mlp", "GPT/head")


def linen():
  class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
      x = x + nn.Dense(4, name="attn")(nn.LayerNorm(name="norm")(x))
      return x + nn.Dense(4, name="mlp")(x)

  class GPT(nn.Module):
    @nn.compact
    def __call__(self, x):
      return nn.Dense(3, name="head")(Block(name="h1")(Block(name="h0")(x)))

  return GPT().apply, (filled(jax.eval_shape(GPT().init, jax.random.key(0), X)), X)


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


def nnx_model():
  """With values that no operation had to be compiled for."""
  graphdef, state = nnx.split(nnx.eval_shape(lambda: GPT(nnx.Rngs(0))))
  return nnx.merge(graphdef, filled(state))


def equinox():
  """Modules whose paths are scopes of the user's."""
  linear = lambda out: eqx.filter_eval_shape(eqx.nn.Linear, 4, out, key=jax.random.key(0))
  layers = {path: linear(3 if path == "GPT/head" else 4) for path in PATHS}

  def fun(layers, x):
    for path, layer in layers.items():
      with jax.named_scope(path):
        y = jax.vmap(layer)(x)
      x = y if path == "GPT/head" else x + y
    return x

  return fun, (filled(layers), X)


def haiku():
  hk = pytest.importorskip("haiku")

  class Block(hk.Module):
    def __call__(self, x):
      x = x + hk.Linear(4, name="attn")(x)
      return x + hk.Linear(4, name="mlp")(x)

  class HaikuGPT(hk.Module):
    def __call__(self, x):
      return hk.Linear(3, name="head")(Block(name="h1")(Block(name="h0")(x)))

  model = hk.without_apply_rng(hk.transform(lambda x: HaikuGPT(name="GPT")(x)))
  return model.apply, (filled(jax.eval_shape(model.init, jax.random.key(0), X)), X)


NETWORKS = {  # name: returns a function and its arguments
  "linen": linen,
  "nnx argument": lambda: ((lambda model, x: model(x)), (nnx_model(), X)),
  "nnx module itself": lambda: (nnx_model(), (X,)),
  "nnx bound method": lambda: (nnx_model().logits, (X,)),
  "nnx in a tree": lambda: ((lambda tree, x: tree["models"][0](x)), ({"models": [nnx_model()]}, X)),
  "equinox": equinox,
  "haiku": haiku,
}
OVERRIDES = [  # ({regex: policy}, the policies at PATHS)
  ({}, "bf16 bf16 bf16 bf16 bf16"),
  ({"head": "fp32"}, "bf16 bf16 bf16 bf16 fp32"),
  ({"h0": "fp32"}, "fp32 fp32 bf16 bf16 bf16"),  # and all under it
  ({r"h\d/mlp": "fp16"}, "bf16 fp16 bf16 fp16 bf16"),
  ({".*/head": "fp32"}, "bf16 bf16 bf16 bf16 fp32"),
  ({"h0/attn": "fp16", "h0": "fp32", "attn": "fp32"}, "fp16 fp32 fp32 bf16 bf16"),  # the first that matches
  ({"h1/mlp": "bf16", "GPT": "fp32"}, "fp32 fp32 fp32 bf16 fp32"),
]


def dots(jaxpr):
  """Dtypes of the first operands of the products, in the order of the program."""
  return [multiplied(e).split()[0] for e in walk(jaxpr) if e.primitive.name == "dot_general"]


@pytest.mark.parametrize("network", NETWORKS)
def test_paths_of_modules(network):
  fun, args = NETWORKS[network]()
  overrides = {"h0": "fp32", "head": "fp16"}
  found = by_path(fun, "bf16", overrides, *args)
  # Equinox's own layers are scopes too.
  short = {path.removesuffix("/eqx.nn.Linear"): policy for path, policy in found.items()}
  assert short == dict(zip(PATHS, ["fp32", "fp32", "bf16", "bf16", "fp16"], strict=True))
  # What is done is what is explained.
  cast = mpjax.autocast(fun, "bf16", overrides=overrides)
  assert dots(jax.make_jaxpr(lambda _: cast(*args))(X).jaxpr) == ["f32", "f32", "bf16", "bf16", "f16"]
  with pytest.raises(ValueError, match=r"'hea' matches no module path.*h0/attn.*head"):
    mpjax.autocast(fun, "bf16", overrides={"hea": "fp32"})(*args)


def test_overrides_by_module():
  fun, args = NETWORKS["nnx argument"]()
  for overrides, want in OVERRIDES:
    assert by_path(fun, "bf16", overrides, *args) == dict(zip(PATHS, want.split(), strict=True)), overrides
  for regex in ("ead", "h", "GPT/h", "mlp/GPT", "h0//mlp"):  # no whole components
    with pytest.raises(ValueError, match=f"'{regex}' matches no module path.*h0/attn.*head"):
      mpjax.autocast(fun, "bf16", overrides={regex: "fp32"})(*args)
  own = mpjax.get_policy({"base": "fp16", "overrides": {"head": "params=float32,compute=float32"}})
  for policy, overrides in (
    ({"base": "fp16", "overrides": [[".*/head", "fp32"]]}, None),
    # The policy's own matches nothing that is left, and is not an error for that.
    ({"base": "fp16", "overrides": {"head": "bf16"}}, {"GPT/head": "fp32"}),
    (own, None),
  ):
    found = by_path(fun, policy, overrides, *args)
    assert found == dict(zip(PATHS, ["fp16"] * 4 + ["fp32"], strict=True)), (policy, overrides)
