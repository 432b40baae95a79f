"""Parameters gathered where they are read: values and gradients of programs, and the dtypes in which they cross."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType

import mpjax

DEVICES = 8
N = 64  # size of every parameter's dimensions
ROWS = 4  # of a device
RNG = np.random.default_rng(0)
normal = lambda *shape: (RNG.normal(size=shape) * N**-0.5).astype(np.float32)
PARAMS = {"rows": normal(3, N), "stack": normal(3, N, N), "v": normal(N, N), "w": normal(N, N)}
X = RNG.normal(size=(ROWS * DEVICES, N)).astype(np.float32)
# The dimension that is divided; the second of `w`, which a product does not sum over.
RULES = {"rows": (), "stack": (None, "fsdp", None), "v": ("fsdp", None), "w": (None, "fsdp")}
MESH = jax.make_mesh((DEVICES,), ("fsdp",), axis_types=(AxisType.Auto,))


def unrolled(p, x, key):
  for i in range(3):
    x = x + jnp.tanh(x @ p["stack"][i])
  return x


def scanned_backwards_with_outputs(p, x, key):
  step = lambda x, w: (jnp.tanh(x @ w["w"] + w["b"]), x.sum())
  x, sums = jax.lax.scan(step, x, {"w": p["stack"], "b": p["rows"]}, reverse=True, unroll=3)
  return x * sums.sum()


def checkpointed(p, x, key):
  block = jax.checkpoint(lambda x, w: x + jax.nn.gelu(x @ w) @ w.T)
  return block(block(x, p["w"]), p["v"])


def few_rows_looked_up(p, x, key):
  rows = jnp.argsort(x[0])[:6].reshape(2, 3) - 3  # some from the end
  filled = p["w"].at[jnp.array([60, 70])].get(mode="fill", fill_value=2.0)
  return jnp.tanh(p["w"][rows]).sum((0, 1)) * x + filled.sum(0)


def functions_of_parameters(p, x, key):
  weight = lambda: p["w"] / jnp.linalg.norm(p["w"], axis=0) + jax.jit(jnp.transpose)(jax.nn.softmax(p["v"]))
  return jnp.tanh(x @ weight()) @ weight()


def sorted_parameters(p, x, key):
  ranked = jax.lax.sort((p["w"], p["v"]), num_keys=1)[1]
  return x @ jnp.sort(p["w"], axis=0) + jnp.tanh(x @ ranked)


def jitted_and_random(p, x, key):
  keep = jax.random.bernoulli(key, 0.5, x.shape)
  return jax.jit(lambda w, x: jax.nn.relu(x @ w) * keep)(p["w"], x)


@jax.custom_vjp
def own_rule(x, w):
  return x @ w


own_rule.defvjp(
  lambda x, w: (x @ w, (x.astype(jnp.float16), 2 * w)),
  lambda res, ct: (ct @ res[1].T, res[0].astype(jnp.float32).T @ ct),
)


add_row = lambda p, made=lambda w: w: lambda x, row: (jnp.tanh(x @ made(p["w"]) + row), None)
PROGRAMS = {
  "unrolled": unrolled,
  "scanned backwards with outputs": scanned_backwards_with_outputs,
  "the same in each step": lambda p, x, key: jax.lax.scan(add_row(p), x, x)[0],
  "checkpointed": checkpointed,
  "checkpointed behind some barriers": lambda p, x, key: jax.checkpoint(
    lambda x, w, v: jnp.tanh(x @ w) @ v, prevent_cse=(True, False, False)
  )(x, p["w"], p["v"]),
  # Devices have other rows, and choose other branches.
  "conditional": lambda p, x, key: jax.lax.cond(x.sum() > 0, lambda: x @ p["w"], lambda: x @ p["v"]),
  "read twice": lambda p, x, key: jnp.tanh(x @ p["w"]) @ p["w"].T,
  "few rows looked up": few_rows_looked_up,
  "functions of parameters": functions_of_parameters,
  "sorted parameters": sorted_parameters,
  "with penalties": lambda p, x, key: x @ p["w"] + sum(jnp.sum(leaf**2) for leaf in p.values()),
  "jitted and random": jitted_and_random,
  "returned": lambda p, x, key: p["w"] + x.sum(),
  "with a rule": lambda p, x, key: own_rule(own_rule(x, p["w"]), p["v"]),
  "in bfloat16": lambda p, x, key: mpjax.autocast(functools.partial(unrolled, key=None), "bf16")(p, x),
}


def loss_of(program, p, x, key=None):
  return jnp.mean(program(p, x, key).astype(jnp.float32) ** 2)


def a_step(loss, policy="fp32", mesh=MESH, tx=None, gather="block", **options):
  return mpjax.make_train_step(loss, tx or optax.sgd(0.1), policy, mesh=mesh, gather=gather, **options)


def program_of(step, params, rows=DEVICES):
  state = jax.eval_shape(step.init, params)
  return str(step.jitted.trace(state, jax.ShapeDtypeStruct((rows, N), jnp.float32)).jaxpr)


def lines_with(jaxpr, primitive):
  return [line for line in jaxpr.splitlines() if f"= {primitive}[" in line]


@pytest.mark.parametrize("name", PROGRAMS)
def test_values_and_gradients_are_those_of_whole_parameters(name):
  key = jax.random.key(1)
  loss = lambda p, x: loss_of(PROGRAMS[name], p, x, key)
  step = a_step(loss, sharding=RULES)
  value, grads = step.gradients(step.init(PARAMS), X)
  # Each device has its own rows.
  whole = lambda p: jnp.mean(jnp.stack([loss(p, part) for part in jnp.split(X, DEVICES)]))
  expected, reference = jax.jit(jax.value_and_grad(whole))(PARAMS)
  rtol = 2e-2 if name == "in bfloat16" else 1e-5
  np.testing.assert_allclose(value, expected, rtol=rtol)
  for leaf, want in reference.items():
    scale = np.abs(want).max() or 1.0
    np.testing.assert_allclose(grads[leaf] / scale, want / scale, atol=rtol, err_msg=leaf)


STACK = {"stack": PARAMS["stack"]}
NARROW = {"base": "bf16", "reduce_dtype": "bfloat16"}
of_stack = lambda p, batch: loss_of(unrolled, p, batch)


@pytest.mark.parametrize("sizes", [(1, DEVICES, 1), (2, DEVICES // 2, 1)])
def test_gradients_cross_in_bfloat16_on_a_mesh_with_an_axis_of_one_device(sizes):
  step = a_step(of_stack, NARROW, jax.make_mesh(sizes, ("data", "fsdp", "tensor")))
  jaxpr = program_of(step, STACK, 2 * DEVICES)
  gathered, scattered = lines_with(jaxpr, "all_gather"), lines_with(jaxpr, "reduce_scatter")
  assert (len(gathered), len(scattered)) == (3 + 3, 3)
  assert all("bf16[" in line for line in [*gathered, *scattered])
  x = np.linspace(-1, 1, 2 * DEVICES * N).reshape(-1, N).astype(np.float32)
  state, _ = step(step.init(STACK), x)
  exact = -0.1 * np.asarray(jax.jit(jax.grad(of_stack))(STACK, x)["stack"])
  found = np.asarray(state.params["stack"]) - STACK["stack"]
  np.testing.assert_allclose(found, exact, atol=0.04 * np.abs(exact).max())


TABLE = {"table": PARAMS["v"], "v": PARAMS["v"], "w": PARAMS["w"]}
ROWS_OF_FP8 = RNG.normal(size=(64 * DEVICES, N)).astype(np.float32)


FP8 = {"emulate": True, "min_dim": 16, "first_layer": True, "last_layer": True}


def in_fp8_by(gather, **changes):
  policy = {"base": "fp8", "fp8": FP8, **changes}

  def loss(p, batch):
    x = batch + p["table"][0]
    for w in (p["v"], p["w"]):
      x = jnp.tanh(x @ w)
    return (x**2).mean()

  step = a_step(loss, policy, tx=optax.sgd(1.0), gather=gather)
  return step, step.init(TABLE), ROWS_OF_FP8


@pytest.mark.parametrize("gather", ["step", "block"])
def test_what_products_alone_read_crosses_in_fp8(gather):
  step, state, batch = in_fp8_by(gather, gather_dtype="float8_e4m3fn")
  jaxpr = str(step.jitted.trace(state, batch).jaxpr)
  gathered = [line.split("=")[0].split(":")[1] for line in lines_with(jaxpr, "all_gather")]
  # Both products gather their weight; the gradients read the second, and of the first what is behind it.
  codes = [name for name in gathered if "f8_e4m3fn" in name]
  assert len(codes) == (2 if gather == "step" else 4)
  assert {name for name in gathered if "f8_e4m3fn" not in name} == {"f32[64,64] "}
  assert jaxpr.count("= pmax[") == 1  # all largest magnitudes together
  explanation = step.explain(state, batch)
  assert {g.path: (g.kept, g.dtype) for g in explanation.gathers} == {
    "table": ("float32", "float32"),
    "v": ("float32", "float8_e4m3fn"),
    "w": ("float32", "float8_e4m3fn"),
  }
  # What is gathered for a product is its operand, unless the recipe has a margin, which a parameter's scale has not.
  with_margin, *args = in_fp8_by(gather, gather_dtype="float8_e4m3fn", fp8=FP8 | {"margin": 1})
  assert ("given=(False, True" in jaxpr) == (gather == "block")
  assert "given=(False, True" not in str(with_margin.jitted.trace(*args).jaxpr)


def test_codes_that_crossed_are_those_of_the_product_and_show_what_is_not_finite():
  """A parameter of one scale has the codes that the product would have made, but for bfloat16 between."""
  plain, state, batch = in_fp8_by("block")
  loss, grads = plain.gradients(state, batch)
  for gather in ("step", "block"):
    codes, state, _ = in_fp8_by(gather, gather_dtype="float8_e4m3fn")
    of_codes, grads_of_codes = codes.gradients(state, batch)
    np.testing.assert_allclose(loss, of_codes, rtol=5e-3)
    for name, g in grads.items():
      error = np.asarray(grads_of_codes[name]) - np.asarray(g)
      assert np.linalg.norm(error) < 0.08 * np.linalg.norm(g), (gather, name)
  bad = PARAMS["w"].copy()
  bad[3, 3] = np.nan
  state = state.replace(params={**state.params, "w": jax.device_put(bad, state.params["w"].sharding)})
  assert not np.isfinite(codes.gradients(state, batch)[0])


@pytest.mark.parametrize("gather", ["step", "block"])
def test_integers_cross_as_they_are(gather):
  params = {"codes": np.arange(N * N, dtype=np.int8).reshape(N, N), "w": PARAMS["w"]}
  loss = lambda p, x: jnp.mean((x @ p["w"] + p["codes"].sum(0, dtype=jnp.float32)) ** 2)
  step = a_step(loss, {"base": "bf16", "gather_dtype": "float8_e4m3fn"}, gather=gather, wrt="w")
  found = step(step.init(params), X)[1]["loss"]
  np.testing.assert_allclose(found, loss(params, X), rtol=1e-2)


half = lambda w: w.astype(jnp.bfloat16)
product = lambda w, x: half(w) @ half(x)


@jax.custom_vjp
def with_rule(w, x):
  return product(w, x)


with_rule.defvjp(lambda w, x: (with_rule(w, x), (w, x)), lambda kept, g: (g @ kept[1], kept[0] @ g))


@jax.custom_vjp
def narrow_in_its_rule(w, x):
  return product(w, x)


narrow_in_its_rule.defvjp(lambda w, x: (half(w) @ half(x), (half(w), x)), lambda kept, g: (g @ kept[1], g))


def loop(step, first, rows=None):
  return jax.lax.scan(
    lambda x, row: (step(x, row), None), first, rows, length=None if rows is not None else 2
  )[0]


def head(w, x):
  return mpjax.linear_cross_entropy(x, w, jnp.arange(8), rows=4)


def either(w, x, other):
  return jax.lax.cond(x[0, 0] > 0, half, other, w)


READS = {
  "cast": (product, "bfloat16"),
  "moved, then cast": (lambda w, x: half(w.T.reshape(64)[:8]) * half(x[0]), "bfloat16"),
  "read as it is, too": (lambda w, x: product(w, x).astype(jnp.float32) + w, None),
  "in two dtypes": (lambda w, x: (product(w, x), w.astype(jnp.float16)), None),
  "inside jit": (jax.jit(product), "bfloat16"),
  "inside jit and outside": (lambda w, x: jax.jit(half)(w).sum() + w.sum(), None),
  "a constant of a loop": (lambda w, x: loop(lambda x, _: half(w) @ x, half(x)), "bfloat16"),
  "rows of a loop": (lambda w, x: loop(lambda x, row: x * half(row), half(x[0]), w), "bfloat16"),
  "carried by a loop": (lambda w, x: loop(lambda w, _: w * 1.0, w) @ x, None),
  "in both branches": (lambda w, x: either(w, x, lambda w: half(w) * 2), "bfloat16"),
  "kept by a rule of its own": (with_rule, None),
  "kept narrow by a rule of its own": (narrow_in_its_rule, "bfloat16"),
  "by the loss of a large vocabulary": (mpjax.autocast(head, "bf16"), "bfloat16"),
}


def test_a_parameter_crosses_in_the_narrow_dtype_in_which_alone_it_is_read():
  params = dict.fromkeys(READS, np.ones((8, 8), np.float32))
  losses = lambda p, x: [read(p[name], x[0]) for name, (read, _) in READS.items()]
  loss = lambda p, x: sum(jnp.sum(out.astype(jnp.float32)) for out in jax.tree.leaves(losses(p, x)))
  step = a_step(loss, gather="step", sharding={".*": ("fsdp", None)})
  batch = np.ones((DEVICES, 8, 8), np.float32)
  found = step.explain(step.init(params), batch).gathers
  assert {g.path: g.dtype for g in found} == {name: dtype or "float32" for name, (_, dtype) in READS.items()}


def test_what_tensor_divides_stays_divided():
  mesh = jax.make_mesh((4, 2), ("fsdp", "tensor"))
  loss = lambda p, batch: ((batch @ p["w"]) ** 2).mean()
  jaxpr = program_of(a_step(loss, mesh=mesh, sharding={"w": ("fsdp", "tensor")}), {"w": PARAMS["w"]})
  gathered = lines_with(jaxpr, "all_gather")
  assert gathered
  assert all("f32[64,32]" in line for line in gathered)


def test_rows_of_a_table_cross_instead_of_the_table():
  loss = lambda p, x: loss_of(few_rows_looked_up, p, x)
  jaxpr = program_of(a_step(loss, sharding=RULES), PARAMS)
  assert not [line for line in lines_with(jaxpr, "all_gather") if "f32" in line]
  assert jaxpr.count("= all_to_all[") == 4  # two lookups, both ways


def test_a_callback_on_parameters_alone_is_called():
  seen = []

  def loss(p, batch):
    jax.debug.callback(lambda total: seen.append(float(total)), p["w"].sum())
    return jnp.mean(batch @ p["w"])

  step = a_step(loss)
  jax.block_until_ready(step(step.init({"w": PARAMS["w"]}), np.ones((DEVICES, N), np.float32)))
  jax.effects_barrier()
  np.testing.assert_allclose(seen, [PARAMS["w"].sum()] * len(seen), rtol=1e-4)
  assert len(seen) >= DEVICES
