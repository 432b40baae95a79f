"""What low-precision recipes would do to the operands of products, against NumPy."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import mpjax

conv = functools.partial(jax.lax.conv_general_dilated, dimension_numbers=("NHWC", "HWIO", "NHWC"))
PATCHES = "Net/patches"
DTYPES = {
  "E4M3": (ml_dtypes.float8_e4m3fn, 448.0),
  "E5M2": (ml_dtypes.float8_e5m2, 57344.0),
  "B11": (ml_dtypes.float8_e4m3b11fnuz, 30.0),
}


def normal(seed, *shape, scale=1.0):
  return (scale * np.random.default_rng(seed).standard_normal(shape)).astype(np.float32)


def rounded(x, unit, recipe):
  """An array as FP8 holds it; what is too large for it is the largest number that it has."""
  dtype, largest = DTYPES[recipe.split()[0]]
  return np.clip(x / unit, -largest, largest).astype(np.float32).astype(dtype).astype(np.float64) * unit


def by_hand(x, axis, recipe, squares=False):
  """(error, share that is lost) of an array whose products sum along an axis."""
  rows = np.moveaxis(np.asarray(x, np.float64), axis, -1)
  if recipe == "NVFP4":
    back = in_nvfp4(rows, squares)
  else:
    name, scale = recipe.split()
    largest = DTYPES[name][1]
    blocks = rows.reshape(*rows.shape[:-1], -1, 32) if scale == "mx" else rows
    amax = np.abs(blocks).max(None if scale == "tensor" else -1, keepdims=True)
    unit = np.maximum(amax, 1e-30) / largest
    unit = unit if scale == "channel" else 2.0 ** np.ceil(np.log2(unit))
    unit = np.broadcast_to(unit, blocks.shape).reshape(rows.shape)
    back = rounded(rows, unit, recipe)
  lost = ((back == 0) & (rows != 0)).sum() / (rows != 0).sum()
  return np.linalg.norm(back - rows) / np.linalg.norm(rows), lost


def in_nvfp4(rows, squares):
  """What NVFP4 makes of rows, to the nearest: E2M1, with E4M3 scales and a power of two for the tensor."""
  blocks = rows.reshape(rows.shape[0], -1, 16)
  amax = np.abs(blocks).max(-1)
  if squares:
    amax = np.repeat(amax.reshape(-1, 16, amax.shape[1]).max(1), 16, 0)
  unit = 2.0 ** np.ceil(np.log2(amax.max() / (4 * 448.0)))
  scales = np.clip(amax / unit / 6, 2.0**-9, 448).astype(np.float32).astype(ml_dtypes.float8_e4m3fn)
  step = scales.astype(np.float64)[..., None] * unit
  codes = np.clip(blocks / step, -6, 6).astype(np.float32).astype(ml_dtypes.float4_e2m1fn)
  return (codes.astype(np.float64) * step).reshape(rows.shape)


def assert_as_by_hand(found, x, axis):
  """In its own product, and along the other axis in the product of the other gradient."""
  for recipe in [r for r in found.errors if not r.endswith("delayed")]:
    key = (found.module, found.operand, recipe)
    for axis_of, errors, underflow in (
      (axis, found.errors, found.underflow),
      (1 - axis, found.transposed, found.transposed_underflow),
    ):
      if recipe.endswith("mx") and x.shape[axis_of] % 32:
        assert errors[recipe] is underflow[recipe] is None, key
        continue
      error, lost = by_hand(x, axis_of, recipe, squares=found.operand == "rhs")
      if recipe == "NVFP4" and (found.operand == "gradient" or (found.operand == "lhs" and axis_of != axis)):
        # Rounded at random, or rotated before.
        assert 0.6 * error < errors[recipe] < 2.5 * error, key
        continue
      assert errors[recipe] == pytest.approx(error, rel=0.02), key
      assert underflow[recipe] == pytest.approx(lost, abs=2e-3), key


product = jax.jit(lambda x, w: x @ w)  # whose calls are told apart by module


class Net(nn.Module):
  @nn.compact
  def __call__(self, x):
    return nn.Conv(32, (2, 2), 2, "VALID", use_bias=False, name="patches")(x)


def loss_fn(params, batch):
  patches = {"params": {"patches": {"kernel": params["patches"]}}}
  x = Net().apply(patches, batch["images"]).reshape(32, 32)
  with jax.named_scope("one"):
    out = jnp.sin(product(x, params["one"]))
  with jax.named_scope("loop"):
    layer = jax.checkpoint(lambda x, w: (jnp.tanh(product(x, w)), None))
    x = jax.lax.scan(layer, batch["x"], params["loop"])[0]
  with jax.named_scope("blur"):
    images = conv(batch["images"], params["blur"], (1, 1), "SAME")
  return jnp.sum(out * batch["y"]) + jnp.sum(x) + jnp.sum(jnp.tanh(images))


def test_the_operands_of_products_and_convolutions_have_the_errors_of_numpy():
  """A convolution of patches is a product; one whose windows overlap has a scale for each tensor."""
  params = {
    "patches": normal(0, 2, 2, 8, 32, scale=1 / 6),  # HWIO
    "one": normal(1, 32, 48, scale=1 / 6),
    "loop": normal(2, 3, 32, 32, scale=1 / 6),
    "blur": normal(3, 3, 3, 8, 3, scale=1 / 6),
  }
  # What is summed together is of one size, what is beside it is not.
  sizes = np.float32(8.0) ** -np.arange(8)[:, None, None, None]
  batch = {
    "images": (normal(5, 8, 4, 4, 8) * sizes).astype(np.float32),
    "x": normal(6, 16, 32),
    "y": normal(7, 32, 48),
  }
  earlier = [{name: x / factor for name, x in batch.items()} for factor in (8, 16)]
  found = mpjax.numerics.compare_fp8_recipes(loss_fn, params, batch, "bf16", earlier=earlier)
  names = [(name, o) for name in (PATCHES, "one", "loop", "blur") for o in ("lhs", "rhs", "gradient")]
  assert [(o.module, o.operand) for o in found.operands] == names

  cut = batch["images"].reshape(8, 2, 2, 2, 2, 8).swapaxes(2, 3).reshape(32, 32)
  kernel = params["patches"].reshape(32, 32)
  x = cut @ kernel
  of_out = batch["y"] * np.cos(x @ params["one"])
  operands = {
    (PATCHES, "lhs"): (cut, 1),
    (PATCHES, "rhs"): (kernel, 0),
    (PATCHES, "gradient"): (of_out @ params["one"].T, 1),
    ("one", "lhs"): (x, 1),
    ("one", "rhs"): (params["one"], 0),
    ("one", "gradient"): (of_out, 1),  # 48 is no multiple of 32
  }
  for name, (values, axis) in operands.items():
    assert_as_by_hand(*found.of(*name), values, axis)
    assert found.of(*name)[0].shape == values.shape or name[0] == PATCHES

  [lhs] = found.of("one", "lhs")  # rows of different sizes want scales of their own
  assert lhs.underflow["E4M3 channel"] < 0.01 < lhs.underflow["E4M3 tensor"]
  assert lhs.errors["E4M3 channel"] < lhs.errors["E5M2 channel"]
  exact = x.astype(np.float64)
  back = rounded(exact, 2.0 ** np.ceil(np.log2(np.abs(exact).max() / 8 / 448)), "E4M3 delayed")
  wanted = np.linalg.norm(back - exact) / np.linalg.norm(exact)
  assert lhs.errors["E4M3 delayed"] == pytest.approx(wanted, rel=0.02)
  assert lhs.transposed["E4M3 delayed"] == lhs.errors["E4M3 delayed"] > 5 * lhs.errors["E4M3 tensor"]
  [rhs] = found.of("one", "rhs")  # the same in every batch
  assert rhs.errors["E4M3 delayed"] == pytest.approx(rhs.errors["E4M3 tensor"])

  [rhs] = found.of("loop", "rhs")  # the steps of a loop have no largest value
  wanted = np.sqrt(np.mean([by_hand(w, 0, "E4M3 tensor")[0] ** 2 for w in params["loop"]]))
  assert rhs.errors["E4M3 tensor"] == pytest.approx(wanted, rel=0.02)
  for o in found.operands:
    assert (o.errors["E4M3 delayed"] is None) == (o.module == "loop")
  for o, values in zip(found.of("blur"), (batch["images"], params["blur"]), strict=False):
    for name in DTYPES:
      wanted, _ = by_hand(values, -1, f"{name} tensor")
      assert o.errors[f"{name} tensor"] == pytest.approx(wanted, rel=0.02)
      assert o.transposed[f"{name} tensor"] == o.errors[f"{name} tensor"]
      assert o.errors[f"{name} channel"] is o.errors["E4M3 mx"] is o.errors["NVFP4"] is None

  assert str(found).splitlines()[0].split()[:2] == ["module", "operand"]
  assert "E4M3 delayed" in str(found)
  assert found.to_dict()["operands"][0]["module"] == PATCHES
  alone = mpjax.numerics.compare_fp8_recipes(loss_fn, params, batch, "fp32")
  assert not [recipe for recipe in (*alone.recipes, *alone.operands[0].errors) if "delayed" in recipe]
  assert alone.of("one", "lhs")[0].errors.items() <= lhs.errors.items()
