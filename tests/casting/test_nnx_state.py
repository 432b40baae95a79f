"""nnx modules under autocast: state that is updated in place."""

from __future__ import annotations

import copy

import flax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import mpjax
from tests.casting._conformance import TOLERANCE, filled, leaf_failures, normal
from tests.casting._jaxprs import jit

# flax would rather have it under nnx.capture.
pytestmark = pytest.mark.filterwarnings("ignore:Using 'Module.sow")
X = jnp.asarray(normal(8, 4, seed=1))


class Net(nnx.Module):
  """Lists, a shared module, and every kind of mutable state."""

  def __init__(self, rngs):
    linear = lambda: nnx.Linear(4, 4, rngs=rngs)
    self.layers = nnx.List([linear(), nnx.Sequential(linear(), nnx.relu)])
    self.shared = self.layers[0]
    self.norm = nnx.BatchNorm(4, rngs=rngs)
    self.dropout = nnx.Dropout(0.5, rngs=rngs)
    self.calls = nnx.Variable(np.int32(0))
    self.head = nnx.Linear(4, 3, rngs=rngs)

  def __call__(self, x):
    for layer in self.layers:
      x = layer(x)
    x = self.dropout(self.norm(self.shared(x)))
    self.sow(nnx.Intermediate, "hidden", x)
    self.calls[...] += 1
    return self.head(x)


GRAPH, SHAPES = jax.eval_shape(lambda: nnx.split(Net(nnx.Rngs(0))))
STATE = jax.tree.map(jnp.asarray, filled(SHAPES))  # an array of NumPy would be added to in place
net = lambda state=STATE: nnx.merge(GRAPH, state, copy=True)
loss = lambda model, x: jnp.mean(model(x) ** 2)
pure = lambda x: nnx.to_pure_dict(x) if isinstance(x, nnx.State) else x
CALLS = {
  "function": lambda cast: cast(loss),
  "module": lambda cast: lambda model, x: cast(model)(x),
  "method": lambda cast: lambda model, x: cast(model.__call__)(x),
  "nnx.jit outside": lambda cast: nnx.jit(cast(loss)),
  "nnx.jit inside": lambda cast: cast(nnx.jit(loss)),
  "nnx.grad outside": lambda cast: nnx.grad(cast(loss)),
  "nnx.grad inside": lambda cast: cast(nnx.grad(loss)),
  "nnx.jit of nnx.value_and_grad": lambda cast: nnx.jit(nnx.value_and_grad(cast(loss))),
  "nnx.remat": lambda cast: cast(nnx.remat(loss)),
  "keyword": lambda cast: lambda model, x: cast(lambda *, model, x: loss(model, x))(model=model, x=x),
  "in a tree": lambda cast: lambda model, x: cast(lambda tree: loss(tree["m"][0], tree["x"]))({"m": [model], "x": x}),
}  # fmt: skip


def called(name, cast):
  """The result of a call of a module, and its state after it; it is still the caller's own module."""

  def run(state, x):
    model = net(state)
    variables, kinds = (
      dict(nnx.to_flat_state(nnx.state(model))),
      {p: type(n) for p, n in nnx.iter_graph(model)},
    )
    result = jax.tree.map(pure, CALLS[name](cast)(model, x), is_leaf=lambda x: isinstance(x, nnx.State))
    now = {path: type(node) for path, node in nnx.iter_graph(model)}
    assert {path: now[path] for path in kinds} == kinds, name
    assert type(model) is Net, name
    assert model.shared is model.layers[0], name
    after = nnx.state(model)
    assert set(variables) <= set(dict(nnx.to_flat_state(after))), name
    return {"result": result, "state": pure(after)}

  return run


def test_state_is_updated_in_place_as_without_autocast():
  under = lambda cast: lambda state, x: {name: called(name, cast)(state, x) for name in CALLS}
  casts = mpjax.autocast(policy="bf16"), lambda f: f
  found, wanted = jit(lambda state, x: [under(cast)(state, x) for cast in casts])(STATE, X)
  for name in CALLS:
    got, want = found[name], wanted[name]
    assert int(got["state"]["calls"]) == int(got["state"]["dropout"]["rngs"]["count"]) == 1, name
    assert [*leaf_failures("state", got["state"], want["state"], 2 * TOLERANCE["bf16"])] == [], name
    assert [*leaf_failures("result", got["result"], want["result"], 4 * TOLERANCE["bf16"])] == [], name


def test_a_module_that_is_called_without_jit():
  """Statistics are float32 and computed in it, draws are the same, nothing of the user's is replaced."""
  model, reference = net(), net()
  seen = []

  def fun(model, x):
    seen.append((type(model).__name__, isinstance(model, Net), isinstance(model.head, nnx.Linear)))
    return loss(model, x)

  params = lambda: jax.tree.map(np.array, pure(nnx.state(model, nnx.Param)))
  before = params()
  mpjax.autocast(fun, "bf16")(model, 100 * X)
  loss(reference, 100 * X)
  assert seen == [("Net", True, True)]
  assert "Scoped" not in repr(model)
  assert Net.__call__.__qualname__ == "Net.__call__"
  assert nnx.graphdef(model) == nnx.graphdef(reference)
  jax.tree.map(np.testing.assert_array_equal, params(), before)
  variance, (hidden,) = model.norm.var[...], jax.tree.leaves(nnx.state(model, nnx.Intermediate))
  assert model.norm.mean[...].dtype == variance.dtype == hidden.dtype == np.float32
  assert not np.array_equal(np.asarray(variance.astype(jnp.bfloat16), np.float32), variance)
  (drawn,) = jax.tree.leaves(nnx.state(reference, nnx.Intermediate))
  np.testing.assert_array_equal(np.asarray(hidden) == 0, np.asarray(drawn) == 0)
  # It can still be split, copied and called without autocast.
  for same in (copy.deepcopy(model), nnx.merge(*nnx.split(model)), model):
    assert nnx.eval_shape(lambda model: model(X), same).shape == (8, 3)


def test_gradients_are_float32_and_only_of_parameters():
  grads = nnx.eval_shape(nnx.grad(mpjax.autocast(loss, "fp16")), net(), X)
  assert {leaf.dtype for leaf in jax.tree.leaves(grads)} == {np.dtype("float32")}
  assert jax.tree.structure(pure(grads)) == jax.tree.structure(pure(nnx.state(net(), nnx.Param)))


def test_a_module_that_is_closed_over_cannot_be_mutated():
  module = net()
  with pytest.raises(flax.errors.TraceContextError, match="Cannot mutate"):
    mpjax.autocast(lambda x: module(x), "bf16")(X)


def test_an_error_inside_leaves_the_module_as_it_was():
  def fails(model, x):
    model(x)
    raise RuntimeError("inside")

  model = net()
  with pytest.raises(RuntimeError, match="inside"):
    mpjax.autocast(fails, "bf16")(model, X)
  numbers = lambda state: [
    x for x in jax.tree.leaves(state) if not jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
  ]
  jax.tree.map(np.testing.assert_array_equal, numbers(nnx.state(model)), numbers(STATE))
