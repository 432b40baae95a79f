"""nnx modules under autocast: paths of lists and shared modules, and state that is updated in place."""

from __future__ import annotations

import copy

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import mpjax
from tests.casting._conformance import TOLERANCE, leaf_failures, normal

# flax would rather have it under nnx.capture.
pytestmark = pytest.mark.filterwarnings("ignore:Using 'Module.sow")
X = jnp.asarray(normal(8, 4, seed=1))


class Net(nnx.Module):
  """Lists, a shared module, and every kind of mutable state."""

  def __init__(self, rngs):
    self.layers = nnx.List(
      [nnx.Linear(4, 4, rngs=rngs), nnx.Sequential(nnx.Linear(4, 4, rngs=rngs), nnx.relu)]
    )
    self.shared = self.layers[0]
    self.norm = nnx.BatchNorm(4, rngs=rngs)
    self.dropout = nnx.Dropout(0.5, rngs=rngs)
    self.calls = nnx.Variable(jnp.int32(0))
    self.head = nnx.Linear(4, 3, rngs=rngs)

  def __call__(self, x):
    for layer in self.layers:
      x = layer(x)
    x = self.dropout(self.norm(self.shared(x)))
    self.sow(nnx.Intermediate, "hidden", x)
    self.calls[...] += 1
    return self.head(x)


def net():
  return Net(nnx.Rngs(0))


loss = lambda model, x: jnp.mean(model(x) ** 2)
state_of = lambda model: jax.tree.map(
  lambda x: jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x,
  nnx.to_pure_dict(nnx.state(model)),
)
CALLS = {
  "function": lambda cast: lambda model, x: cast(loss)(model, x),
  "module": lambda cast: lambda model, x: cast(model)(x),
  "method": lambda cast: lambda model, x: cast(model.__call__)(x),
  "nnx.jit outside": lambda cast: nnx.jit(cast(loss)),
  "nnx.jit inside": lambda cast: cast(nnx.jit(loss)),
  "nnx.grad outside": lambda cast: nnx.grad(cast(loss)),
  "nnx.grad inside": lambda cast: cast(nnx.grad(loss)),
  "nnx.value_and_grad": lambda cast: nnx.value_and_grad(cast(loss)),
  "nnx.jit of nnx.value_and_grad": lambda cast: nnx.jit(nnx.value_and_grad(cast(loss))),
  "nnx.remat": lambda cast: cast(nnx.remat(loss)),
  "keyword": lambda cast: lambda model, x: cast(lambda *, model, x: loss(model, x))(model=model, x=x),
  "in a tree": lambda cast: lambda model, x: cast(lambda tree: loss(tree["m"][0], tree["x"]))({"m": [model], "x": x}),
}  # fmt: skip


@pytest.mark.parametrize("policy", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("name", CALLS)
def test_state_is_updated_in_place_as_without_autocast(name, policy):
  model, reference = net(), net()
  variables = dict(nnx.to_flat_state(nnx.state(model)))
  kinds = {path: type(node) for path, node in nnx.iter_graph(model)}
  got = CALLS[name](lambda f: mpjax.autocast(f, policy))(model, X)
  want = CALLS[name](lambda f: f)(reference, X)
  assert int(model.calls[...]) == 1
  assert int(model.dropout.rngs.count[...]) == int(reference.dropout.rngs.count[...])
  after, wanted = state_of(model), state_of(reference)
  assert [*leaf_failures("state", after, wanted, 2 * TOLERANCE["bf16"])] == []
  if policy == "fp32":
    jax.tree.map(np.testing.assert_array_equal, after, wanted)
  plain = lambda x: nnx.to_pure_dict(x) if isinstance(x, nnx.State) else x
  got, want = (jax.tree.map(plain, x, is_leaf=lambda x: isinstance(x, nnx.State)) for x in (got, want))
  assert [*leaf_failures("result", got, want, 4 * TOLERANCE["bf16"])] == []
  # The caller's own module, with its own variables and classes.
  assert type(model) is Net
  now = {path: type(node) for path, node in nnx.iter_graph(model)}
  assert {path: now[path] for path in kinds} == kinds
  assert model.shared is model.layers[0]
  assert set(variables) <= set(dict(nnx.to_flat_state(nnx.state(model))))


def test_statistics_are_float32_and_computed_in_float32():
  model = net()
  mpjax.autocast(loss, "bf16")(model, 100 * X)
  assert model.norm.mean[...].dtype == model.norm.var[...].dtype == np.float32
  rounded = model.norm.var[...].astype(jnp.bfloat16).astype(jnp.float32)
  assert not np.array_equal(rounded, model.norm.var[...])


def test_sown_values_keep_the_dtype_of_the_program():
  model = net()
  mpjax.autocast(loss, "bf16")(model, X)
  (hidden,) = jax.tree.leaves(nnx.state(model, nnx.Intermediate))
  assert (hidden.dtype, hidden.shape) == (np.float32, (8, 4))


def test_dropout_draws_what_it_draws_without_autocast():
  class Drop(nnx.Module):
    def __init__(self):
      self.dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(3))

    def __call__(self, x):
      return self.dropout(x @ jnp.eye(4)) @ jnp.eye(4)

  models = Drop(), Drop()
  for _ in range(2):
    got, want = mpjax.autocast(models[0], "bf16")(X), models[1](X)
    np.testing.assert_array_equal(got == 0, want == 0)


def test_gradients_are_float32_and_only_of_parameters():
  model = net()
  grads = nnx.grad(mpjax.autocast(loss, "fp16"))(model, X)
  assert {leaf.dtype for leaf in jax.tree.leaves(grads)} == {np.dtype("float32")}
  params = nnx.to_pure_dict(nnx.state(model, nnx.Param))
  assert jax.tree.structure(nnx.to_pure_dict(grads)) == jax.tree.structure(params)


def test_paths_of_lists_and_shared_modules():
  rows = mpjax.explain(loss, "bf16")(net(), X).rows
  paths = [row.path for row in rows if row.flops]
  assert paths[0] == "Net/layers/0"
  assert paths[1].startswith("Net/layers/1")
  # A shared module has the path of where it is met first in the module.
  assert paths[2] in ("Net/layers/0", "Net/shared")
  assert paths[3] == "Net/head"


def test_modules_of_the_user_are_left_alone():
  model = net()
  seen = []

  def fun(model, x):
    seen.append((type(model).__name__, isinstance(model, Net), isinstance(model.head, nnx.Linear)))
    return model(x)

  params = lambda: jax.tree.map(np.array, nnx.to_pure_dict(nnx.state(model, nnx.Param)))
  before = params()
  mpjax.autocast(fun, "bf16")(model, X)
  assert seen == [("Net", True, True)]
  assert "Scoped" not in repr(model)
  jax.tree.map(np.testing.assert_array_equal, params(), before)
  assert Net.__call__.__qualname__ == "Net.__call__"
  # It can still be split, copied and called without autocast.
  for same in (copy.deepcopy(model), nnx.merge(*nnx.split(model)), model):
    assert same(X).shape == (8, 3)


def test_the_structure_of_a_called_module_is_that_without_autocast():
  model, reference = net(), net()
  mpjax.autocast(loss, "bf16")(model, X)
  loss(reference, X)
  assert nnx.graphdef(model) == nnx.graphdef(reference)


def test_an_error_inside_leaves_the_module_as_it_was():
  model = net()

  def fails(model, x):
    model(x)
    raise RuntimeError("inside")

  before = state_of(model)
  with pytest.raises(RuntimeError, match="inside"):
    mpjax.autocast(fails, "bf16")(model, X)
  jax.tree.map(np.testing.assert_array_equal, state_of(model), before)


def test_modules_and_optimizers_in_a_training_step():
  import optax

  def step(model, optimizer, x):
    value, grads = nnx.value_and_grad(mpjax.autocast(loss, "bf16"))(model, x)
    optimizer.update(model, grads)
    nnx.pop(model, nnx.Intermediate)  # else what is sown grows, and every step is traced again
    return value

  model = net()
  optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
  jitted = nnx.jit(step)
  values = [float(jitted(model, optimizer, X)) for _ in range(12)]
  assert np.mean(values[-3:]) < np.mean(values[:3])
  assert int(model.calls[...]) == int(optimizer.step[...]) == 12
  assert model.head.kernel[...].dtype == np.float32


def test_methods_other_than_call_have_the_modules_path():
  class Tied(nnx.Module):
    def __init__(self, rngs):
      self.embed = nnx.Embed(16, 4, rngs=rngs)

    def __call__(self, tokens):
      return self.embed.attend(self.embed(tokens))

  rows = mpjax.explain(lambda m, t: m(t), "bf16", overrides={"embed": "fp32"})(
    Tied(nnx.Rngs(0)), jnp.arange(3)
  ).rows
  assert [(row.path, row.after) for row in rows if row.flops] == [("Tied/embed", "float32")]
