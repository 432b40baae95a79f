"""What FP8 recipes would do to the operands of products, against NumPy."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import mpjax

ROWS, WIDTH, OUT = 64, 96, 32
conv = functools.partial(jax.lax.conv_general_dilated, dimension_numbers=("NHWC", "HWIO", "NHWC"))
DTYPES = {"E4M3": (ml_dtypes.float8_e4m3fn, 448.0), "E5M2": (ml_dtypes.float8_e5m2, 57344.0)}


def setting(spread=4.0):
  """Weights and inputs whose rows and columns differ in size by powers of two."""
  rng = np.random.default_rng(0)
  normal = lambda *shape: rng.standard_normal(shape)
  x = normal(ROWS, WIDTH) * 2.0 ** (spread * normal(ROWS, 1))
  params = {"one": normal(WIDTH, OUT) / 10, "two": normal(OUT, OUT) / 6}
  as_jax = lambda tree: jax.tree.map(lambda a: jnp.asarray(a, jnp.float32), tree)
  return as_jax(params), as_jax({"x": x, "y": normal(ROWS, OUT)})


def loss_fn(params, batch):
  with jax.named_scope("one"):
    h = batch["x"] @ params["one"]
  with jax.named_scope("two"):
    out = jnp.tanh(h) @ params["two"]
  return jnp.mean((out - batch["y"]) ** 2)


def by_hand(x, axis, recipe):
  """(error, share that is lost) of an array whose products sum along an axis."""
  name, scale = recipe.split()
  dtype, largest = DTYPES[name]
  rows = np.moveaxis(np.asarray(x, np.float64), axis, -1)
  if scale == "block":
    blocks = rows.reshape(*rows.shape[:-1], -1, 32)
    unit = 2.0 ** np.ceil(np.log2(np.maximum(np.abs(blocks).max(-1, keepdims=True), 1e-30) / largest))
    unit = np.broadcast_to(unit, blocks.shape).reshape(rows.shape)
  else:
    unit = np.maximum(np.abs(rows).max(None if scale == "tensor" else -1, keepdims=True), 1e-30) / largest
  back = (rows / unit).astype(np.float32).astype(dtype).astype(np.float64) * unit
  lost = ((back == 0) & (rows != 0)).sum() / (rows != 0).sum()
  return np.linalg.norm(back - rows) / np.linalg.norm(rows), lost


def operands_by_hand():
  params, batch = setting()
  h = batch["x"] @ params["one"]
  of_out = jax.grad(lambda out: jnp.mean((out - batch["y"]) ** 2))(jnp.tanh(h) @ params["two"])
  of_h = jax.grad(lambda h: jnp.mean((jnp.tanh(h) @ params["two"] - batch["y"]) ** 2))(h)
  return {
    ("one", "lhs"): (batch["x"], 1),
    ("one", "rhs"): (params["one"], 0),
    ("one", "gradient"): (of_h, 1),
    ("two", "lhs"): (jnp.tanh(h), 1),
    ("two", "rhs"): (params["two"], 0),
    ("two", "gradient"): (of_out, 1),
  }


@pytest.mark.parametrize("policy", ["bf16", "fp32"])
def test_errors_and_losses_of_each_operand_are_those_of_numpy(policy):
  found = mpjax.compare_fp8_recipes(loss_fn, *setting(), policy)
  for (module, operand), (x, axis) in operands_by_hand().items():
    [one] = found.of(module, operand)
    assert one.shape == x.shape
    for recipe in one.errors:
      error, lost = by_hand(x, axis, recipe)
      assert one.errors[recipe] == pytest.approx(error, rel=0.02), (module, operand, recipe)
      assert one.underflow[recipe] == pytest.approx(lost, abs=2e-3), (module, operand, recipe)
      error, lost = by_hand(x, 1 - axis, recipe)  # in the product of the other gradient
      assert one.transposed[recipe] == pytest.approx(error, rel=0.02), (module, operand, recipe)
      assert one.transposed_underflow[recipe] == pytest.approx(lost, abs=2e-3), (module, operand, recipe)


def test_a_delayed_scale_is_that_of_earlier_batches():
  params, batch = setting(spread=0.0)
  smaller = jax.tree.map(lambda x: x / 8, batch)
  found = mpjax.compare_fp8_recipes(loss_fn, params, batch, earlier=[smaller, smaller])
  [x] = found.of("one", "lhs")
  values = np.asarray(batch["x"], np.float64)
  unit = np.abs(values).max() / 8 / 448
  back = (
    np.clip(values / unit, -448, 448).astype(np.float32).astype(ml_dtypes.float8_e4m3fn).astype(np.float64)
  )
  wanted = np.linalg.norm(back * unit - values) / np.linalg.norm(values)
  assert x.errors["E4M3 delayed"] == pytest.approx(wanted, rel=0.02)
  assert x.transposed["E4M3 delayed"] == x.errors["E4M3 delayed"] > 5 * x.errors["E4M3 tensor"]
  [w] = found.of("one", "rhs")  # the same in every batch
  assert w.errors["E4M3 delayed"] == pytest.approx(w.errors["E4M3 tensor"])
  assert "E4M3 delayed" in str(found)


def test_a_convolution_of_patches_is_a_product():
  kernel = jax.random.normal(jax.random.key(0), (2, 2, 8, 32)) / 6  # HWIO
  images = jax.random.normal(jax.random.key(1), (4, 6, 6, 8)) * jnp.exp2(jnp.arange(6.0))[:, None, None]

  def patches(kernel, images):
    with jax.named_scope("patches"):
      x = conv(images, kernel, (2, 2), "VALID")
    with jax.named_scope("overlapping"):
      same = jnp.ones((3, 3, 32, 4))
      x = conv(x, same, (1, 1), "SAME")
    return jnp.mean(x**2)

  def as_product(kernel, images):
    with jax.named_scope("patches"):
      x = images.reshape(4, 3, 2, 3, 2, 8).swapaxes(2, 3).reshape(4, 3, 3, 32)
      x = x @ kernel.reshape(32, 32)
    same = jnp.ones((3, 3, 32, 4))
    x = conv(x, same, (1, 1), "SAME")
    return jnp.mean(x**2)

  found, wanted = (mpjax.compare_fp8_recipes(fun, kernel, images) for fun in (patches, as_product))
  assert len(found.operands) == len(wanted.operands) == 6
  for one, other in zip(found.of("patches"), wanted.of("patches"), strict=True):
    assert (one.module, one.operand) == ("patches", other.operand)
    for mine, theirs in ((one.errors, other.errors), (one.transposed, other.transposed)):
      assert list(mine.values()) == [
        pytest.approx(x, rel=1e-3, abs=1e-6) if x else x for x in theirs.values()
      ]


def test_a_convolution_whose_windows_overlap_has_a_scale_for_each_tensor():
  kernel = jax.random.normal(jax.random.key(0), (3, 3, 8, 16)) / 6  # HWIO
  images = jax.random.normal(jax.random.key(1), (4, 6, 6, 8)) * jnp.exp2(jnp.arange(6.0))[:, None, None]

  def blurred(kernel, images):
    with jax.named_scope("blur"):
      x = conv(images, kernel, (1, 1), "SAME")
    return jnp.sum(jnp.tanh(x))

  found = mpjax.compare_fp8_recipes(blurred, kernel, images, earlier=[2 * images])
  assert [o.operand for o in found.of("blur")] == ["lhs", "rhs", "gradient"]
  for operand, values in zip(found.of("blur"), (images, kernel), strict=False):
    exact = np.asarray(values, np.float64)
    for name, (dtype, largest) in DTYPES.items():
      unit = np.abs(exact).max() / largest
      rounded = (exact / unit).astype(np.float32).astype(dtype)
      wanted = np.linalg.norm(rounded.astype(np.float64) * unit - exact) / np.linalg.norm(exact)
      assert operand.errors[f"{name} tensor"] == pytest.approx(wanted, rel=0.02)
      assert operand.transposed[f"{name} tensor"] == operand.errors[f"{name} tensor"]
      assert operand.errors[f"{name} delayed"] > 0
      assert operand.errors[f"{name} row"] is operand.errors[f"{name} block"] is None


def test_rows_of_different_sizes_want_scales_of_their_own():
  [x] = mpjax.compare_fp8_recipes(loss_fn, *setting(), "bf16").of("one", "lhs")
  assert x.underflow["E4M3 row"] < 0.01 < x.underflow["E4M3 tensor"]
  assert x.errors["E4M3 row"] < x.errors["E5M2 row"]


@pytest.mark.parametrize("loop", [False, True])
def test_layers_of_a_loop_and_of_a_checkpoint_are_looked_at(loop):
  w = jax.random.normal(jax.random.key(0), (3, 32, 32)) / 6
  x = jax.random.normal(jax.random.key(1), (16, 32))

  def deep(params, batch):
    @jax.checkpoint
    def layer(x, w):
      with jax.named_scope("layers"):
        return jnp.tanh(x @ w), None

    if loop:
      return jnp.mean(jax.lax.scan(layer, batch, params["w"])[0] ** 2)
    for i in range(3):
      batch, _ = layer(batch, params["w"][i])
    return jnp.mean(batch**2)

  found = mpjax.compare_fp8_recipes(deep, {"w": w}, x, "bf16", earlier=x if loop else None)
  if loop:  # of whose steps there is no largest value
    assert all(o.errors["E4M3 delayed"] is None for o in found.operands)
  assert len(found.of("layers", "gradient")) == (1 if loop else 3)
  wanted = np.sqrt(np.mean([by_hand(w[i], 0, "E4M3 tensor")[0] ** 2 for i in range(3)]))
  errors = [o.errors["E4M3 tensor"] for o in found.of("layers", "rhs")]
  assert np.sqrt(np.mean(np.square(errors))) == pytest.approx(wanted, rel=0.02)


def test_calls_of_one_jitted_function_are_told_apart_by_module():
  layer = jax.jit(lambda x, w: jnp.tanh(x @ w))
  params = {name: jax.random.normal(jax.random.key(i), (32, 32)) for i, name in enumerate("ab")}

  def of_two(params, x):
    for name in "ab":
      with jax.named_scope(name):
        x = layer(x, params[name])
    return jnp.mean(x**2)

  found = mpjax.compare_fp8_recipes(of_two, params, jnp.ones((32, 32)), "bf16")
  for name in "ab":
    [w] = found.of(name, "rhs")
    assert w.errors["E4M3 row"] == pytest.approx(by_hand(params[name], 0, "E4M3 row")[0], rel=0.02)


def test_a_flax_model_has_its_modules_and_blocks_that_do_not_fit_have_no_figure():
  class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
      return nn.Dense(5, name="head")(nn.relu(nn.Dense(48, name="body")(x)))

  x = jax.random.normal(jax.random.key(2), (8, 32))
  params = Net().init(jax.random.key(3), x)["params"]
  found = mpjax.compare_fp8_recipes(lambda p, b: jnp.mean(Net().apply({"params": p}, b) ** 2), params, x)
  assert [(o.module, o.operand) for o in found.operands] == [
    (f"Net/{name}", operand) for name in ("body", "head") for operand in ("lhs", "rhs", "gradient")
  ]
  [head] = found.of("Net/head", "lhs")
  assert head.errors["E4M3 block"] is None  # 48 is no multiple of 32
  assert head.errors["E4M3 row"] < 0.05
  text = str(found)
  assert text.splitlines()[0].split()[:2] == ["module", "operand"]
  assert "Net/head" in text
  assert found.to_dict()["operands"][0]["module"] == "Net/body"
