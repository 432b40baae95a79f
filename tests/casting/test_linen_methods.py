"""Methods of linen modules under `mpjax.autocast`: their variables go in and out, as through `nn.jit`."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

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
