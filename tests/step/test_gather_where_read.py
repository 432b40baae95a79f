"""Parameters gathered where they are read: values and gradients of any program, and what its residuals hold."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec

import mpjax
from mpjax.step._collectives import Part
from mpjax.step._gather_where_read import gather_where_read

DEVICES = 8
N = 64  # size of every parameter's dimensions
P = PartitionSpec


def unrolled(p, x, key):
  for i in range(3):
    x = x + jnp.tanh(x @ p["stack"][i])
  return x


def scanned(p, x, key):
  return jax.lax.scan(lambda x, w: (x + jnp.tanh(x @ w), None), x, p["stack"])[0]


def scanned_backwards_with_outputs(p, x, key):
  step = lambda x, w: (jnp.tanh(x @ w["w"] + w["b"]), x.sum())
  x, sums = jax.lax.scan(step, x, {"w": p["stack"], "b": p["rows"]}, reverse=True, unroll=3)
  return x * sums.sum()


def the_same_in_each_step(p, x, key):
  return jax.lax.scan(lambda x, row: (jnp.tanh(x @ p["w"] + row), None), x, x)[0]


def checkpointed(policy, p, x, key):
  block = jax.checkpoint(lambda x, w: x + jax.nn.gelu(x @ w) @ w.T, policy=policy)
  for w in (p["w"], p["v"]):
    x = block(x, w)
  return x


def scan_of_checkpoints(p, x, key):
  block = jax.checkpoint(lambda x, w: (x + jnp.tanh(x @ w), None), prevent_cse=False)
  return jax.lax.scan(block, x, p["stack"])[0]


def conditional(p, x, key):
  # Devices have other rows, and choose other branches.
  return jax.lax.cond(x.sum() > 0, lambda: x @ p["w"], lambda: x @ p["v"])


def bounded_loop(p, x, key):
  return jax.lax.fori_loop(0, 3, lambda i, x: jnp.tanh(x @ p["w"]), x)


def read_twice(p, x, key):
  return jnp.tanh(x @ p["w"]) @ p["w"].T


def looked_up(p, x, key):
  return p["w"][jnp.argmax(x, -1)] + x


def few_rows_looked_up(p, x, key):
  rows = jnp.argsort(x[0])[:6].reshape(2, 3) - 3  # some from the end
  return jnp.tanh(p["w"][rows]).sum((0, 1)) * x + p["w"].at[jnp.array([60, 70])].get(
    mode="fill", fill_value=2.0
  ).sum(0)


def functions_of_parameters(p, x, key):
  weight = lambda: p["w"] / jnp.linalg.norm(p["w"], axis=0) + jax.jit(jnp.transpose)(jax.nn.softmax(p["v"]))
  return jnp.tanh(x @ weight()) @ weight()


def sorted_parameters(p, x, key):
  ranked = jax.lax.sort((p["w"], p["v"]), num_keys=1)[1]
  return x @ jnp.sort(p["w"], axis=0) + jnp.tanh(x @ ranked)


def with_penalties(p, x, key):
  return x @ p["w"] + sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(p))


def long_chain(p, x, key):
  w = p["w"]
  for _ in range(40):
    w = w - 0.01 * jnp.tanh(w) * w
  return x @ w


def jitted_and_random(p, x, key):
  keep = jax.random.bernoulli(key, 0.5, x.shape)
  return jax.jit(lambda w, x: jax.nn.relu(x @ w) * keep)(p["w"], x)


def returned(p, x, key):
  return p["w"] + x.sum()


@jax.custom_vjp
def own_rule(x, w):
  return x @ w


def own_forward(x, w):
  return x @ w, (x.astype(jnp.float16), 2 * w)


own_rule.defvjp(own_forward, lambda res, ct: (ct @ res[1].T, res[0].astype(jnp.float32).T @ ct))


def with_a_rule(p, x, key):
  return own_rule(own_rule(x, p["w"]), p["v"])


def in_fp8(p, x, key):
  policy = {"base": "fp8", "fp8": {"emulate": True}}
  return mpjax.autocast(lambda w, x: jnp.tanh(x @ w) @ w, policy)(p["w"], x)


def in_bfloat16(p, x, key):
  return mpjax.autocast(functools.partial(unrolled, key=None), "bf16")(p, x)


PROGRAMS = [
  unrolled,
  scanned,
  scanned_backwards_with_outputs,
  the_same_in_each_step,
  functools.partial(checkpointed, None),
  functools.partial(checkpointed, jax.checkpoint_policies.dots_saveable),
  functools.partial(checkpointed, jax.checkpoint_policies.everything_saveable),
  scan_of_checkpoints,
  conditional,
  bounded_loop,
  read_twice,
  looked_up,
  few_rows_looked_up,
  functions_of_parameters,
  sorted_parameters,
  with_penalties,
  long_chain,
  jitted_and_random,
  returned,
  with_a_rule,
  in_fp8,
  in_bfloat16,
]


def parameters():
  keys = jax.random.split(jax.random.key(0), 4)
  normal = lambda key, *shape: jax.random.normal(key, shape) * N**-0.5
  return {
    "rows": normal(keys[0], 3, N),
    "stack": normal(keys[1], 3, N, N),
    "v": normal(keys[2], N, N),
    "w": normal(keys[3], N, N),
  }


# The dimension that is divided; the second of `w`, which a product does not sum over.
DIMENSIONS = {"rows": None, "stack": 1, "v": 0, "w": 1}


def mapped(fun, outs):
  """`fun(params, x, key)` on 8 devices, each with its rows and its parts of parameters."""
  mesh = jax.make_mesh((DEVICES,), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,))
  specs = {k: P() if d is None else P(*[None] * d, "fsdp") for k, d in DIMENSIONS.items()}
  in_specs = (specs, P("fsdp"), P())
  return jax.shard_map(fun, mesh=mesh, in_specs=in_specs, out_specs=outs(specs), check_vma=False)


def loss_of(program, p, x, key):
  return jnp.mean(program(p, x, key).astype(jnp.float32) ** 2)


def of_parts(program):
  float32 = np.dtype("float32")
  parts = [None if d is None else Part(d, DEVICES, float32, float32) for d in DIMENSIONS.values()]
  return gather_where_read(functools.partial(loss_of, program), parts)


def name_of(program):
  if isinstance(program, functools.partial):
    return f"checkpointed, {getattr(program.args[0], '__name__', None)}"
  return program.__name__


@pytest.mark.parametrize("program", PROGRAMS, ids=name_of)
def test_values_and_gradients_are_those_of_whole_parameters(program):
  params, key = parameters(), jax.random.key(1)
  x = jax.random.normal(jax.random.key(2), (4 * DEVICES, N))

  def run(params, x, key):
    loss, grads = jax.value_and_grad(of_parts(program))(params, x, key)
    return loss[None], grads["rows"][None], {k: g for k, g in grads.items() if k != "rows"}

  outs = lambda specs: (P("fsdp"), P("fsdp"), {k: s for k, s in specs.items() if k != "rows"})
  losses, of_rows, grads = jax.jit(mapped(run, outs))(params, x, key)
  grads["rows"] = of_rows.sum(0)

  def expected(params):
    parts = jnp.split(x, DEVICES)
    return jnp.stack([loss_of(program, params, part, key) for part in parts])

  rtol = 2e-2 if program in (in_bfloat16, in_fp8) else 1e-5
  np.testing.assert_allclose(losses, jax.jit(expected)(params), rtol=rtol)
  reference = jax.jit(jax.grad(lambda p: expected(p).sum()))(params)
  for name, g in grads.items():
    scale = float(jnp.abs(reference[name]).max()) or 1.0
    np.testing.assert_allclose(g / scale, reference[name] / scale, atol=rtol, err_msg=name)


@pytest.mark.parametrize("program", [p for p in PROGRAMS if p is not returned], ids=name_of)
def test_no_residual_holds_a_gathered_parameter(program):
  """Neither as it is nor under a cast, a transpose or a function of it alone."""
  if program is conditional and jax.__version_info__ < (0, 12):
    pytest.skip("branches hand out what they read as a residual of their own")

  def residuals(params, x, key):
    pull = jax.vjp(lambda p: of_parts(program)(p, x, key), params)[1]
    return [leaf[None] for leaf in jax.tree.leaves(pull) if leaf.dtype != jax.dtypes.float0]

  rows = 4
  x = jax.ShapeDtypeStruct((rows * DEVICES, N), jnp.float32)
  kept = jax.eval_shape(mapped(residuals, lambda specs: P("fsdp")), parameters(), x, jax.random.key(0))
  # Residuals are stacked over devices: a gathered parameter of N x N would be one of 8 N x N.
  assert all(r.size < DEVICES * N * N for r in kept), [(r.shape, r.dtype) for r in kept]


@pytest.mark.parametrize("program", PROGRAMS, ids=name_of)
def test_no_tracer_outlives_its_trace(program):
  def run(params, x, key):
    loss, grads = jax.value_and_grad(of_parts(program))(params, x, key)
    return loss[None], {k: g for k, g in grads.items() if k != "rows"}

  outs = lambda specs: (P("fsdp"), {k: s for k, s in specs.items() if k != "rows"})
  x = jax.ShapeDtypeStruct((4 * DEVICES, N), jnp.float32)
  with jax.checking_leaks():
    jax.jit(mapped(run, outs)).trace(parameters(), x, jax.random.key(0))


def test_a_loop_of_unknown_length_reads_what_is_gathered_before_it():
  params, x = parameters(), jnp.ones((DEVICES, N))
  run = gather_where_read(bounded_while, [Part(1, DEVICES, np.dtype("float32"), np.dtype("float32"))])
  mesh = jax.make_mesh((DEVICES,), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,))
  specs = (P(None, "fsdp"), P("fsdp"))
  out = jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=P("fsdp"), check_vma=False)(params["w"], x)
  np.testing.assert_allclose(out, bounded_while(params["w"], x), rtol=1e-5)


def bounded_while(w, x):
  return jax.lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, jnp.tanh(c[1] @ w)), (0, x))[1]


@pytest.mark.parametrize("sizes", [(1, DEVICES, 1), (2, DEVICES // 2, 1)])
def test_gradients_cross_in_bfloat16_on_a_mesh_with_an_axis_of_one_device(sizes):
  mesh = jax.make_mesh(sizes, ("data", "fsdp", "tensor"))
  loss = lambda p, batch: loss_of(unrolled, p, batch, None)
  params, x = {"stack": parameters()["stack"]}, jnp.linspace(-1, 1, 2 * DEVICES * N).reshape(-1, N)
  run = lambda policy: mpjax.make_train_step(loss, optax.sgd(0.1), policy, mesh=mesh, gather="block")
  updated = []
  for policy in ("bf16", {"base": "bf16", "reduce_dtype": "bfloat16"}):
    step = run(policy)
    state, _ = step(step.init(jax.tree.map(jnp.copy, params)), x)
    updated.append(jax.tree.map(lambda new, old: np.asarray(new - old), state.params, params))
  for exact, rounded in zip(*map(jax.tree.leaves, updated), strict=True):
    np.testing.assert_allclose(rounded, exact, atol=0.02 * np.abs(exact).max())


def test_what_crosses_is_in_the_dtypes_of_the_policy():
  mesh = jax.make_mesh((DEVICES,), ("fsdp",))
  loss = lambda p, batch: loss_of(unrolled, p, batch, None)
  step = mpjax.make_train_step(
    loss, optax.sgd(0.1), {"base": "bf16", "reduce_dtype": "bfloat16"}, mesh=mesh, gather="block"
  )
  params = {"stack": parameters()["stack"]}
  state = jax.eval_shape(step.init, params)
  batch = jax.ShapeDtypeStruct((2 * DEVICES, N), jnp.float32)
  jaxpr = str(jax.make_jaxpr(step.jitted)(state, batch))
  gathered = [line for line in jaxpr.splitlines() if "= all_gather[" in line]
  scattered = [line for line in jaxpr.splitlines() if "= reduce_scatter[" in line]
  assert len(gathered) == 3 + 3
  assert len(scattered) == 3
  assert all("bf16[" in line for line in [*gathered, *scattered])


@pytest.mark.parametrize(
  ("arguments", "words"),
  [
    ({"gather": "layer"}, "gather='layer': expected one of step, block"),
    ({"gather": "block"}, "gather='block' says when parameters on a mesh are gathered: pass mesh="),
    ({"gather": "block", "mesh": {"data": 8}}, "gather='block' is for .* axis fsdp: the mesh has"),
  ],
)
def test_what_cannot_be_is_one_line(arguments, words):
  if sizes := arguments.get("mesh"):
    arguments = {**arguments, "mesh": jax.make_mesh(tuple(sizes.values()), tuple(sizes))}
  with pytest.raises(ValueError, match=words):
    mpjax.make_train_step(lambda p, b: 0.0, optax.sgd(0.1), "fp32", **arguments)


def in_fp8_by(gather, **changes):
  policy = {"base": "fp8", "fp8": {"emulate": True, "min_dim": 16}, **changes}

  def loss(p, batch):
    x = batch + p["table"][0]
    for w in (p["v"], p["w"]):
      x = jnp.tanh(x @ w)
    return (x**2).mean()

  mesh = jax.make_mesh((DEVICES,), ("fsdp",))
  step = mpjax.make_train_step(loss, optax.sgd(1.0), policy, mesh=mesh, gather=gather)
  params = {"table": parameters()["v"], "v": parameters()["v"], "w": parameters()["w"]}
  return step, step.init(params), jax.random.normal(jax.random.key(3), (64 * DEVICES, N))


@pytest.mark.parametrize("gather", ["step", "block"])
def test_what_products_alone_read_crosses_in_fp8(gather):
  step, state, batch = in_fp8_by(gather, gather_dtype="float8_e4m3fn")
  jaxpr = str(jax.make_jaxpr(step.jitted)(state, batch))
  gathered = sorted(
    line.split("=")[0].split(":")[1] for line in jaxpr.splitlines() if "= all_gather[" in line
  )
  # Both products gather their weight; the gradients read the second, and of the first what is behind it.
  codes = [name for name in gathered if "f8_e4m3fn" in name]
  assert len(codes) == (2 if gather == "step" else 4)
  assert {name for name in gathered if "f8_e4m3fn" not in name} == {"f32[64,64] "}
  assert jaxpr.count("= pmax[") == 1  # all largest magnitudes together
  step.gradients(state, batch)


def test_codes_that_crossed_are_those_of_the_product():
  """A parameter of one scale has the codes that the product would have made of it, but for bfloat16 between."""
  plain, state, batch = in_fp8_by("block")
  codes, *_ = in_fp8_by("block", gather_dtype="float8_e4m3fn")
  (loss, grads), (of_codes, grads_of_codes) = plain.gradients(state, batch), codes.gradients(state, batch)
  np.testing.assert_allclose(loss, of_codes, rtol=5e-3)
  for name, g in grads.items():
    assert jnp.linalg.norm(grads_of_codes[name] - g) < 0.05 * jnp.linalg.norm(g), name


def test_nothing_leaks_from_a_step():
  with jax.checking_leaks():
    step, state, batch = in_fp8_by("block", gather_dtype="float8_e4m3fn")
    step.jitted.trace(state, batch)


def test_a_weight_that_is_not_finite_is_seen_through_fp8():
  step, state, batch = in_fp8_by("block", gather_dtype="float8_e4m3fn")
  state = state.replace(params={**state.params, "w": state.params["w"].at[3, 3].set(jnp.nan)})
  assert not np.isfinite(step.gradients(state, batch)[0])


@pytest.mark.parametrize(
  ("policy", "words"),
  [
    ({"base": "bf16", "gather_dtype": "float16"}, "gather_dtype='float16': expected compute_dtype"),
    ({"base": "bf16", "gather_dtype": "float64"}, "gather_dtype='float64': expected compute_dtype"),
    ({"base": "bf16", "gather_dtype": "float8_e5m2"}, "gather_dtype"),
  ],
)
def test_other_dtypes_to_gather_in_are_refused(policy, words):
  with pytest.raises(ValueError, match=words):
    mpjax.get_policy(policy)


def test_fp8_gathers_need_a_mesh():
  with pytest.raises(ValueError, match=r"gather_dtype='float8_e4m3fn' .* needs a mesh"):
    mpjax.make_train_step(lambda p, b: 0.0, optax.sgd(0.1), {"base": "bf16", "gather_dtype": "float8_e4m3fn"})


def test_what_tensor_divides_stays_divided():
  mesh = jax.make_mesh((4, 2), ("fsdp", "tensor"))
  loss = lambda p, batch: ((batch @ p["w"]) ** 2).mean()
  step = mpjax.make_train_step(
    loss, optax.sgd(0.1), "fp32", mesh=mesh, gather="block", sharding={"w": ("fsdp", "tensor")}
  )
  state = jax.eval_shape(step.init, {"w": parameters()["w"]})
  jaxpr = str(jax.make_jaxpr(step.jitted)(state, jax.ShapeDtypeStruct((DEVICES, N), jnp.float32)))
  gathered = [line for line in jaxpr.splitlines() if "= all_gather[" in line]
  assert gathered
  assert all("f32[64,32]" in line for line in gathered)


@pytest.mark.parametrize("gather", ["step", "block"])
def test_an_explanation_says_what_crosses_in_what(gather):
  step, state, batch = in_fp8_by(gather, gather_dtype="float8_e4m3fn")
  explanation = step.explain(state, batch)
  assert {g.path: (g.kept, g.dtype) for g in explanation.gathers} == {
    "table": ("float32", "float32"),
    "v": ("float32", "float8_e4m3fn"),
    "w": ("float32", "float8_e4m3fn"),
  }
  assert "Parameters gathered over fsdp" in str(explanation)


def test_rows_of_a_table_cross_instead_of_the_table():
  run = jax.grad(of_parts(few_rows_looked_up))
  outs = lambda specs: {k: s for k, s in specs.items() if k != "rows"}
  of_columns = lambda p, x, key: {k: g for k, g in run(p, x, key).items() if k != "rows"}
  key = jax.random.key(0)
  x = jax.ShapeDtypeStruct((4 * DEVICES, N), jnp.float32)
  jaxpr = str(jax.make_jaxpr(mapped(of_columns, outs))(parameters(), x, key))
  assert not [line for line in jaxpr.splitlines() if "= all_gather[" in line and "f32" in line]
  assert jaxpr.count("= all_to_all[") == 4  # two lookups, both ways


def test_penalties_gather_one_parameter_at_a_time():
  """And the two orders of a program are one: hosts compile the same."""
  mesh = jax.make_mesh((DEVICES,), ("fsdp",))
  block = jax.checkpoint(lambda x, a, b, c: jnp.tanh(x @ a @ b @ c))
  params = {name: parameters()["w"] for name in "abc"}
  loss = lambda p, batch: jnp.mean(block(batch, *p.values())) + sum(jnp.sum(w**2) for w in p.values())
  step = mpjax.make_train_step(loss, optax.sgd(0.1), "fp32", mesh=mesh, gather="block")
  state = jax.eval_shape(step.init, params)
  batch = jax.ShapeDtypeStruct((DEVICES, N), jnp.float32)
  texts = set()
  for _ in range(3):
    jax.clear_caches()
    texts.add(step.jitted.lower(state, batch).as_text())
  assert len(texts) == 1
  forward = str(jax.make_jaxpr(step.jitted)(state, batch)).split("transpose")[0]
  orders = [line.split("= ")[1].split("[")[0] for line in forward.splitlines() if "= " in line]
  order = [name for name in orders if name in ("all_gather", "reduce_sum")]
  assert "all_gather all_gather all_gather reduce_sum reduce_sum reduce_sum" not in " ".join(order)


def test_a_callback_on_parameters_alone_is_called():
  seen = []

  def loss(p, batch):
    jax.debug.callback(lambda total: seen.append(float(total)), p["w"].sum())
    return jnp.mean(batch @ p["w"])

  mesh = jax.make_mesh((DEVICES,), ("fsdp",))
  step = mpjax.make_train_step(loss, optax.sgd(0.1), "fp32", mesh=mesh, gather="block")
  params = {"w": parameters()["w"]}
  jax.block_until_ready(step(step.init(params), jnp.ones((DEVICES, N)))[1])
  jax.effects_barrier()
  np.testing.assert_allclose(seen, [float(params["w"].sum())] * len(seen), rtol=1e-4)
  assert len(seen) >= DEVICES
