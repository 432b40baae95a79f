"""Every primitive of the installed JAX has a decision, and the decisions agree with PyTorch's and TensorFlow's."""

import collections
import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpjax.jaxpr._primitives import GROUPS, OPERATIONS, TENSORFLOW, TORCH

LISTS = {"allow", "deny", "infer", "opaque", "call"}

# In a process of its own: other test modules import libraries that register primitives of their own.
ENUMERATE = """
import gc, importlib, json, pkgutil, warnings
import jax
warnings.simplefilter("ignore")
for module in pkgutil.walk_packages(jax.__path__, "jax.", onerror=lambda name: None):
  if not {"tools", "collect_profile", "__main__"} & set(module.name.split(".")):
    try:
      importlib.import_module(module.name)
    except Exception:  # an optional dependency, such as TensorFlow, is not installed
      pass
from jax._src.core import Primitive
print(json.dumps(sorted({o.name for o in gc.get_objects() if issubclass(type(o), Primitive)})))
"""

# PyTorch's CUDA autocast and a function of JAX that is one primitive: `lower` must be allow, the others float32.
TORCH_LOWER = {
  "mm": lambda x: jax.lax.dot(x, x),
  "bmm": lambda x: jnp.matmul(x[None], x[None]),
  "addmm": lambda x: x @ x,
  "einsum": lambda x: jnp.einsum("ij,kj->ik", x, x),
  "linalg_vecdot": lambda x: jnp.vecdot(x, x),
  "conv1d": lambda x: jax.lax.conv(x[None], x[None], (1,), "SAME"),
  "conv2d": lambda x: jax.lax.conv(x[None, None], x[None, None], (1, 1), "SAME"),
  "conv3d": lambda x: jax.lax.conv(x[None, None, None], x[None, None, None], (1, 1, 1), "SAME"),
  "conv_transpose2d": lambda x: jax.lax.conv_transpose(x[None, None], x[None, None], (2, 2), "SAME"),
}
TORCH_FLOAT32 = {
  "acos": jax.lax.acos,
  "asin": jax.lax.asin,
  "cosh": jax.lax.cosh,
  "erfinv": jax.lax.erf_inv,
  "exp": jax.lax.exp,
  "expm1": jax.lax.expm1,
  "log": jax.lax.log,
  "log10": jnp.log10,
  "log1p": jax.lax.log1p,
  "log2": jnp.log2,
  "logsumexp": jax.nn.logsumexp,
  "pow": lambda x: jax.lax.pow(x, x),
  "rsqrt": jax.lax.rsqrt,
  "sinh": jax.lax.sinh,
  "softplus": jax.nn.softplus,
  "tan": jax.lax.tan,
  "cumprod": jax.lax.cumprod,
  "cumsum": jax.lax.cumsum,
  "linalg_vector_norm": jnp.linalg.norm,
  "log_softmax": jax.nn.log_softmax,
  "prod": jnp.prod,
  "softmax": jax.nn.softmax,
  "sum": jnp.sum,
}
TENSORFLOW_ALLOW = {
  "MatMul": lambda x: x @ x,
  "BatchMatMulV2": lambda x: jnp.matmul(x[None], x[None]),
  "Einsum": lambda x: jnp.einsum("ij,jk->ik", x, x),
  "Conv2D": lambda x: jax.lax.conv(x[None, None], x[None, None], (1, 1), "SAME"),
  "Conv2DBackpropFilter": jax.grad(
    lambda x: jnp.sum(jax.lax.conv(jnp.ones((1, 1, 4, 4)), x[None, None], (1, 1), "SAME"))
  ),
  "Conv3D": lambda x: jax.lax.conv(x[None, None, None], x[None, None, None], (1, 1, 1), "SAME"),
}
TENSORFLOW_DENY = {
  "Exp": jnp.exp,
  "Expm1": jnp.expm1,
  "L2Loss": lambda x: jnp.sum(x * x),
  "Mean": jnp.mean,
  "Pow": lambda x: jnp.power(x, x),
  "Sum": jnp.sum,
}


@pytest.fixture(scope="module")
def primitives_of_jax():
  ran = subprocess.run(
    [sys.executable, "-c", ENUMERATE],
    env=os.environ | {"JAX_PLATFORMS": "cpu"},
    stdout=subprocess.PIPE,
    text=True,
    check=True,
  )
  return set(json.loads(ran.stdout.splitlines()[-1]))


def test_every_primitive_of_jax_has_a_decision(primitives_of_jax):
  assert len(primitives_of_jax) > 400, "the enumeration missed modules of JAX"
  missing = sorted(primitives_of_jax - set(OPERATIONS))
  assert not missing, f"JAX {jax.__version__} has primitives without a row in operations.py: {missing}"


def test_a_primitive_is_in_one_group_only():
  counts = collections.Counter(name for names, _ in GROUPS for name in names.split())
  assert [name for name, count in counts.items() if count > 1] == []
  assert set(counts) == set(OPERATIONS)


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_row_is_complete(name):
  operation = OPERATIONS[name]
  assert operation.list in LISTS
  assert operation.reason.strip()
  assert len(operation.reason) < 90
  assert operation.float16 in ("", "deny")
  assert operation.float16 == "" or operation.list == "infer"
  assert not (operation.cheap and operation.list in ("allow", "opaque", "call"))


def test_every_counterpart_belongs_to_a_row_and_names_its_list():
  for counterparts, lists in (
    (TORCH, {"lower", "fp32", "fp32_set_opt_dtype", "promote"}),
    (TENSORFLOW, {"allow", "infer", "deny", "clear"}),
  ):
    assert set(counterparts) <= set(OPERATIONS)
    assert {counterpart.split(": ")[1] for counterpart in counterparts.values()} == lists


@pytest.mark.parametrize(
  "fun",
  [pytest.param(f, id=f"torch-{name}") for name, f in TORCH_LOWER.items()]
  + [pytest.param(f, id=f"tensorflow-{name}") for name, f in TENSORFLOW_ALLOW.items()],
)
def test_what_others_run_in_half_precision_is_allowed(fun):
  assert "allow" in {OPERATIONS[name].list for name in primitives_in(fun)}


@pytest.mark.parametrize(
  "fun",
  [pytest.param(f, id=f"torch-{name}") for name, f in TORCH_FLOAT32.items()]
  + [pytest.param(f, id=f"tensorflow-{name}") for name, f in TENSORFLOW_DENY.items()],
)
def test_what_others_run_in_float32_has_its_critical_part_denied(fun):
  assert "deny" in {OPERATIONS[name].list for name in primitives_in(fun)}


@pytest.mark.parametrize(
  "fun", [lambda x: jax.lax.rem(x, 2.0), jnp.sqrt, lambda x: 1.0 / x], ids=["rem", "sqrt", "inv"]
)
def test_what_others_run_in_float32_for_its_range_is_denied_in_float16_only(fun):
  operations = [OPERATIONS[name] for name in primitives_in(fun)]
  assert any(o.list == "infer" and o.float16 == "deny" for o in operations)


@pytest.mark.parametrize(
  "fun",
  [
    jax.nn.relu,
    jnp.transpose,
    lambda x: x + x,
    lambda x: jnp.where(x > 0, x, -x),
    lambda x: jnp.concatenate([x, x])[1:3],
    lambda x: x.at[0].set(1.0),
    lambda x: jnp.pad(x, 1),
    lambda x: x[jnp.array([0, 1])],
    lambda x: jax.lax.top_k(x, 2),
  ],
)
def test_what_loses_nothing_follows_its_operands_in_every_dtype(fun):
  names = primitives_in(fun)
  assert {(OPERATIONS[name].list, OPERATIONS[name].float16) for name in names} == {("infer", "")}


@pytest.mark.parametrize(
  "fun",
  [
    lambda x: jax.lax.reduce_precision(x, 5, 10),
    lambda x: jax.lax.bitcast_convert_type(x, jnp.int32),
    lambda x: jnp.nextafter(x, x),
    lambda x: jax.pure_callback(np.sin, x, x),
    lambda x: jax.random.bits(jax.random.key(0), x.shape),
    lambda x: jax.ffi.ffi_call("some_target", x)(x),
    lambda x: jax.lax.complex(x, x),
  ],
)
def test_what_depends_on_its_dtype_is_left_alone(fun):
  assert "opaque" in {OPERATIONS[name].list for name in primitives_in(fun)}
  assert not {"allow", "deny"} & {OPERATIONS[name].list for name in primitives_in(fun)}


def primitives_in(fun) -> set[str]:
  """Names of the primitives that `fun` of a f32[4, 4] traces to, with the bodies of higher-order ones, without these."""
  names: set[str] = set()

  def collect(jaxpr):
    for eqn in jaxpr.eqns:
      bodies = [
        getattr(body, "jaxpr", body)
        for value in eqn.params.values()
        for body in (value if isinstance(value, tuple | list) else [value])
        if hasattr(getattr(body, "jaxpr", body), "eqns")
      ]
      if OPERATIONS[eqn.primitive.name].list == "call":
        for body in bodies:
          collect(body)
      else:
        names.add(eqn.primitive.name)

  collect(jax.make_jaxpr(fun)(jnp.ones((4, 4), jnp.float32)).jaxpr)
  return names
