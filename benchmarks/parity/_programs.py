"""The programs that are compared: of functions, layers, loops, models and training steps."""

from __future__ import annotations

import functools
import hashlib
import itertools
import re
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import mpjax
from mpjax.train import load_config, make_setup
from tests.casting import test_functions, test_higher_order, test_layers
from tests.casting._conformance import Case, floating, gradients
from tests.models import _equinox, _flax, _haiku, _transformers

POLICIES = ("bf16", "fp16", "fp8")
CONFIGS = ("gpt_stdlib", "vit_digits", "resnet_digits")
STEP_POLICIES = ("bf16", "fp16", "fp8", "{base: fp8, fp8: {recipe: delayed}}")
DEVICES = 8
MESHES: tuple[dict[str, Any], ...] = (
  {"data": 1},
  {"data": 8},
  {"data": 2, "fsdp": 4},
  {"data": 2, "fsdp": 4, "gather": "block"},
)

Function = Callable[..., Any]
Jaxpr = Any
Programs = Iterator[tuple[str, Callable[[], Jaxpr]]]  # names, and what traces a closed jaxpr


def functions() -> Programs:
  """Yields those of every function of the conformance tests, behind a product and on its arguments."""
  for table, cases in test_functions.TABLES.items():
    for name, made in cases.items():
      yield from _of_case(f"{table}: {name}", functools.partial(_itself, made))
      alone = functools.partial(_case, made.alone, *made.args, grad=made.grad)
      yield from _of_case(f"{table}: {name} alone", alone)


def layers() -> Programs:
  """Yields those of every layer of Flax."""
  for table, cases in test_layers.TABLES.items():
    for name, make in cases.items():
      yield from _of_case(f"{table}: {name}", make)


def loops() -> Programs:
  """Yields those of scans, whiles, branches and other calls."""
  x = test_higher_order.X
  for name, fun in test_higher_order.BRANCHES.items():
    yield from _of_case(name, functools.partial(_case, fun, x))
  for name, kept in test_higher_order.KEPT.items():
    if name != "while":
      yield from _of_case(f"call, {name}", functools.partial(_case, kept[0], x))
  for name, (step, carry, _) in test_higher_order.SCANS.items():
    first: Any = {"int32 H": (0, x), "H f32": (x, 0.0), "H H": (x, x)}.get(carry, x)
    scan = functools.partial(_scan, step, first)
    yield from _of_case(f"scan, {name}", functools.partial(_case, scan, x))
  for name, (condition, body, initial, _) in test_higher_order.WHILES.items():
    loop = functools.partial(_while, condition, body, initial)
    yield from _of_case(f"while, {name}", functools.partial(_case, loop, x, grad=False))


def models() -> Programs:
  """Yields those of the models of the corpus."""
  corpus: dict[str, Callable[[], Any]] = {**_transformers.MODELS, **_haiku.MODELS}
  corpus |= {**_equinox.MODELS, **_flax.MODELS}
  for name, make in corpus.items():
    yield from _both(name, *_of_model(functools.cache(make)))


def steps() -> Programs:
  """Yields a training step of each config by policy and mesh, and with gradients accumulated."""
  for config, policy, mesh in itertools.product(CONFIGS, STEP_POLICIES, MESHES):
    where = ", ".join(f"{key} {value}" for key, value in mesh.items())
    for accumulate in (1, 2) if config == "gpt_stdlib" else (1,):
      changes = [f"policy={policy}", *(f"mesh.{key}={value}" for key, value in mesh.items())]
      changes += [f"train.accumulate={accumulate}"]
      name = f"{config}, {policy}, {where}" + (f", accumulate {accumulate}" if accumulate > 1 else "")
      yield name, functools.partial(_step, config, changes)


GROUPS = {"functions": functions, "layers": layers, "loops": loops, "models": models, "steps": steps}


def _of_case(name: str, make: Callable[[], Case]) -> Programs:
  made = functools.cache(make)
  derived = lambda cast: gradients(made(), made().build(cast))
  yield from _both(name, derived, lambda: (floating(made().args), made().args))


def _both(name: str, derived: Callable[[Any], Function], args: Callable[[], tuple[Any, ...]]) -> Programs:
  """Yields value and gradient of a function under each policy, in both orders.

  Args:
    name: what the programs are named after.
    derived: given what to apply to the function, its value and gradient.
    args: makes the arguments.
  """
  for policy in POLICIES:
    yield f"{name}, gradient of {policy}", functools.partial(_traced, derived, args, policy, True)
    yield f"{name}, {policy} of gradient", functools.partial(_traced, derived, args, policy, False)


def _traced(derived: Any, args: Any, policy: str, inside: bool) -> Jaxpr:
  cast = mpjax.autocast(policy=policy)
  return jax.make_jaxpr(derived(cast) if inside else cast(derived(_itself)))(*args())


def _itself(x: Any) -> Any:
  return x


def _case(fun: Any, *args: Any, grad: bool = True) -> Case:
  return Case(lambda cast: cast(fun), args, grad=grad)


def _scan(step: Function, first: Any, x: Any) -> Any:
  return jax.lax.scan(step, first, jnp.stack([x] * 3))


def _while(condition: Function, body: Function, initial: Function, x: Any) -> Any:
  return jax.lax.while_loop(condition, body, initial(x))


def _of_model(model: Any) -> tuple[Any, Any]:
  gradient = lambda cast: jax.value_and_grad(cast(model().loss))
  return gradient, lambda: (model().params, model().batch, jax.random.key(0))


def _step(config: str, changes: list[str]) -> Jaxpr:
  setup = make_setup(load_config(f"configs/{config}.yaml", changes))
  return setup.step.jitted.trace(*setup.shapes()).jaxpr


def text_of(closed: Jaxpr) -> str:
  """The text of a program, constants by their bytes, without addresses and names of Python functions."""
  shown = re.sub(r"<[^<>]*\bat 0x[0-9a-f]+>", "<>", str(closed))
  return "\n".join([re.sub(r"\b0x[0-9a-f]+\b", "0x", shown), *map(_constant, closed.consts)])


def _constant(value: Any) -> str:
  if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
    value = jax.random.key_data(value)
  array = np.asarray(value)
  return f"{array.dtype}{list(array.shape)} {hashlib.sha256(array.tobytes()).hexdigest()[:16]}"
