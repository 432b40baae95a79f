"""The examples in the docstrings of public names run as they stand, with small arrays under the usual names."""

import functools
import inspect
import re
import types

import flax
import flax.training.dynamic_scale
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import mpjax

PACKAGES = [mpjax, mpjax.loss_scale, mpjax.optim, mpjax.formats, mpjax.numerics, mpjax.train]
# Examples that take long, compile for a device that is not here, or need files: other tests run such calls.
NOT_RUN = {
  "mpjax.plan",
  *(f"mpjax.train.{name}" for name in ("ExportedModel", "Planner", "export_run", "load_plugins")),
  *(f"mpjax.train.{name}" for name in ("load_safetensors", "run")),
}


def _public():
  """Yields each package and each of its public names, in full, and what it is; once, if it is in two packages."""
  seen = set()
  for package in PACKAGES:
    yield package.__name__, package
    for name in package.__all__:
      value = getattr(package, name)
      if id(value) not in seen:
        seen.add(id(value))
        yield f"{package.__name__}.{name}", value


def _examples(value):
  """The examples in a docstring, and in those of a class's own public methods."""
  texts = [inspect.getdoc(value) or ""]
  if inspect.isclass(value):
    texts += [
      inspect.getdoc(member) or "" for name, member in vars(value).items() if not name.startswith("_")
    ]
  return [example for text in texts for example in re.findall(r"```python\n(.*?)```", text, re.DOTALL)]


PUBLIC = dict(_public())
WITH_EXAMPLES = {name for name, value in PUBLIC.items() if _examples(value)}


@functools.cache
def _names(scaled):
  """The names that examples use; with a loss scale in the optimiser where they are about that."""

  def loss_fn(params, batch):
    with jax.named_scope("body"):
      h = jnp.tanh(batch["x"] @ params["body"]["kernel"])
    with jax.named_scope("head"):
      return jnp.mean((h @ params["head"]["kernel"] - batch["y"]) ** 2)

  def my_step(params, opt_state, batch):
    _, grads = mpjax.value_and_grad(loss_fn, opt_state)(params, batch)
    updates, opt_state = tx.update(grads, opt_state, params)
    return mpjax.apply_updates(params, updates), opt_state

  def logits(variables, tokens):
    return jnp.tanh(variables["embed"][tokens]) @ variables["head"]

  rng = np.random.default_rng(0)
  array = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
  params = {"body": {"kernel": array(4, 8)}, "head": {"kernel": array(8, 2)}}
  batch = {"x": array(8, 4), "y": array(8, 2)}
  tx = mpjax.dynamic_loss_scale(optax.adamw(1e-3)) if scaled else optax.adamw(1e-3)
  opt_state = tx.init(params)
  loss, grads = mpjax.value_and_grad(loss_fn, opt_state)(params, batch)
  updates, opt_state = tx.update(grads, opt_state, params)
  step = mpjax.make_train_step(loss_fn, optax.adamw(1e-3), policy="fp16", donate=False)
  return {
    **{"flax": flax, "jax": jax, "jnp": jnp, "mpjax": mpjax, "np": np, "optax": optax},
    **{"batch": batch, "count": jnp.zeros([]), "grads": grads, "loss": loss, "loss_fn": loss_fn},
    **{"my_step": my_step, "opt_state": opt_state, "params": params, "policy": mpjax.get_policy("fp16")},
    **{"state": step.init(params), "step": step, "tx": tx, "updates": updates, "x": batch["x"]},
    **{"model": types.SimpleNamespace(apply=logits), "tokens": jnp.arange(12).reshape(2, 6)},
    **{"variables": {"embed": array(16, 8), "head": array(8, 16)}},
  }


@pytest.mark.parametrize("name", sorted(WITH_EXAMPLES - NOT_RUN))
def test_the_examples_of_a_docstring_run(name, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)  # some write files
  value = PUBLIC[name]
  scaled = "loss_scale" in getattr(value, "__module__", name)
  for example in _examples(value):
    exec(compile(example, name, "exec"), dict(_names(scaled)))


def test_every_public_function_has_an_example():
  functions = {name for name, value in PUBLIC.items() if callable(value) and not inspect.isclass(value)}
  assert functions <= WITH_EXAMPLES
  assert NOT_RUN <= WITH_EXAMPLES
