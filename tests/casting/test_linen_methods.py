"""Methods of linen modules under `mpjax.autocast`: their variables go in and out, as through `nn.jit`."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpjax
from tests.casting._jaxprs import run_together

BF16 = mpjax.autocast(policy="bf16")
X = jax.random.normal(jax.random.key(0), (4, 8))
KEYS = {"params": jax.random.key(1), "dropout": jax.random.key(2)}


class Parts(nn.Module):
  """Layers made in `setup`, and the calls of them that the models below put under autocast."""

  def setup(self):
    self.first, self.norm, self.drop = nn.Dense(16), nn.BatchNorm(), nn.Dropout(0.5)
    self.last = nn.Dense(3, param_dtype=jnp.bfloat16)

  def body(self, x, *, train=True):
    x = self.norm(self.first(x), use_running_average=not train)
    self.sow("intermediates", "normed", x)
    return self.last(self.drop(nn.gelu(x), deterministic=not train))


def compact(self, x, *, train=True):
  x = nn.BatchNorm(name="norm")(nn.Dense(16, name="first")(x), use_running_average=not train)
  self.sow("intermediates", "normed", x)
  x = nn.Dropout(0.5, name="drop")(nn.gelu(x), deterministic=not train)
  return nn.Dense(3, name="last", param_dtype=jnp.bfloat16)(x)


class Plain(Parts):
  __call__ = Parts.body


class Decorated(Parts):
  @BF16
  def __call__(self, x, *, train=True):
    return self.body(x, train=train)


class Compact(nn.Module):
  __call__ = nn.compact(BF16(compact))


class CompactInside(nn.Module):
  __call__ = BF16(nn.compact(compact))


class MethodOfItself(Parts):
  def __call__(self, x, **options):
    return mpjax.autocast(self.body, "bf16")(x, **options)


class Partial(Parts):
  def __call__(self, x, **options):
    return mpjax.autocast(functools.partial(self.body, **options), "bf16")(x)


class GivenItself(Parts):
  def __call__(self, x, **options):
    return mpjax.autocast(lambda x, model: model.body(x, **options), "bf16")(x, self)


FORMS = [Decorated, Compact, CompactInside, MethodOfItself, Partial, GivenItself]
RNGS = {"dropout": KEYS["dropout"]}


def applied(model, variables, x=X, mutable=("batch_stats", "intermediates")):
  return model.apply(variables, x, rngs=RNGS, mutable=list(mutable))


def both(f):
  """What `f` gives of variables, and the gradients of the sum of its output."""

  def loss(params, rest):
    out, changed = f({"params": params, **rest})
    return jnp.sum(out.astype(jnp.float32)), (out, changed)

  return lambda params, rest: jax.grad(loss, has_aux=True)(params, rest)


@functools.cache
def variables():
  return jax.jit(Plain().init)(KEYS, X)


def test_a_method_under_autocast_is_what_the_model_under_autocast_is():
  params, rest = variables()["params"], {"batch_stats": variables()["batch_stats"]}
  functions = {"plain": mpjax.autocast(functools.partial(applied, Plain()), "bf16")}
  functions |= {form.__name__: functools.partial(applied, form()) for form in FORMS}
  results, found = run_together({name: both(f) for name, f in functions.items()}, params, rest)
  wanted = results.pop("plain")
  for name, result in results.items():
    assert jax.tree.structure(result) == jax.tree.structure(wanted), name
    for ours, other in zip(jax.tree.leaves(result), jax.tree.leaves(wanted), strict=True):
      np.testing.assert_allclose(np.float32(ours), np.float32(other), rtol=0, atol=0, err_msg=name)
    assert found[name] == {"bf16 bf16"}, name


def test_variables_are_made_as_without_autocast():
  for form, made in jax.jit(lambda: {one.__name__: one().init(KEYS, X) for one in FORMS})().items():
    for ours, other in zip(*map(jax.tree.leaves, (made, variables())), strict=True):
      assert ours.dtype == other.dtype, form
      np.testing.assert_array_equal(np.float32(ours), np.float32(other), err_msg=form)


def test_variables_keep_their_dtypes_whatever_the_output_dtype():
  class Half(Parts):
    @mpjax.autocast(policy="params=float32,compute=bfloat16,output=bfloat16")
    def __call__(self, x):
      return self.body(x)

  out, changed = jax.eval_shape(functools.partial(applied, Half()), variables(), X)
  assert out.dtype == jnp.bfloat16
  assert {x.dtype for x in jax.tree.leaves(changed["batch_stats"])} == {np.dtype("float32")}
  # What a call makes later is given back, too.
  _, made = jax.eval_shape(lambda x: Half().apply({}, x, rngs=KEYS, mutable=True), X)
  assert made["params"]["first"]["kernel"].dtype == np.float32


class Layer(nn.Module):
  @nn.compact
  @BF16
  def __call__(self, x, _=None):
    return nn.tanh(nn.Dense(8, name="dense")(x)), None


class Deep(nn.Module):
  """A layer, the method of which is under autocast, under flax's transforms."""

  @nn.compact
  def __call__(self, x):
    parts = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}}
    x, _ = nn.scan(nn.remat(Layer), length=3, **parts)(name="layers")(x)
    x, _ = nn.jit(Layer)(name="compiled")(x)
    return nn.vmap(Layer, in_axes=0, **parts)(name="mapped")(x)[0]


class ByParts(nn.Module):
  """Layers under autocast by themselves, and one that is not."""

  @nn.compact
  def __call__(self, x):
    x = mpjax.autocast(nn.Dense(16), "bf16")(x)
    return nn.Dense(3)(mpjax.autocast(lambda layers, x: layers["a"](x), "bf16")({"a": nn.Dense(8)}, x))


class Overridden(nn.Module):
  @nn.compact
  def __call__(self, x):
    return mpjax.autocast(Plain(name="inner"), "bf16", overrides={".*/last": "fp32"})(x)


def test_under_other_transforms_by_parts_and_with_paths_of_modules():
  made = jax.eval_shape(Deep().init, KEYS, X)
  assert made["params"]["layers"]["dense"]["kernel"].shape == (3, 8, 8)
  assert {*jax.eval_shape(ByParts().init, KEYS, X)["params"]} == {"Dense_0", "Dense_1", "Dense_2"}
  mixed = {"bf16 bf16", "f32 f32"}
  for model, want in ((Deep(), {"bf16 bf16"}), (ByParts(), mixed), (Overridden(), mixed)):
    variables = jax.jit(model.init)(KEYS, X)
    loss = lambda v, x, model=model: model.apply(v, x, rngs=RNGS, mutable=True)[0].astype(jnp.float32).sum()
    results, found = run_together({"grad": jax.grad(loss)}, variables, X)
    assert found["grad"] == want
    grads = jax.tree.leaves(results["grad"]["params"])
    assert all(np.isfinite(x).all() and np.any(x) for x in grads)


def test_a_bound_module():
  bound = Plain().bind(variables(), rngs=RNGS)
  out = mpjax.autocast(bound, "bf16")(X, train=False)
  np.testing.assert_allclose(np.float32(out), np.float32(bound(X, train=False)), atol=0.05)
  closed_over = mpjax.autocast(lambda x: bound(x, train=False), "bf16")(X)
  np.testing.assert_allclose(np.float32(closed_over), np.float32(out), atol=0.05)


def test_a_module_that_is_no_argument_reads_its_variables():
  class Closure(nn.Module):
    @nn.compact
    def __call__(self, x):
      return mpjax.autocast(lambda x: nn.Dense(3)(x), "bf16")(x)

  made = {"params": {"Dense_0": {"kernel": jnp.ones((8, 3)), "bias": jnp.zeros(3)}}}
  assert Closure().apply(made, X).shape == (4, 3)
  with pytest.raises(jax.errors.JAXTypeError):  # what it makes cannot leave the trace
    jax.block_until_ready(jnp.add(Closure().init(KEYS, X)["params"]["Dense_0"]["bias"], 1))
