"""What stays fragile in half precision, as an inspection measures it."""

import re

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import mpjax

RNG = np.random.default_rng(0)
X = RNG.standard_normal((64, 16), np.float32)
PARAMS = {"w": RNG.standard_normal((16, 16), np.float32), "v": 40 * RNG.standard_normal((16, 16), np.float32)}


def difference(nearness):
  return lambda params, x: jnp.mean((x @ params["w"] - x @ (params["w"] * nearness)) ** 2)


def angle(scale):
  return lambda params, x: jnp.mean(jnp.sin(scale * (x @ params["v"])))


def findings(loss_fn, policy):
  report = mpjax.inspect_numerics(loss_fn, PARAMS, X, policy=policy, tx=optax.sgd(0.1), advise=False)
  return [found.text for found in report.findings if found.kind == "fragile"]


@pytest.mark.parametrize(("policy", "digits"), [("bf16", 8), ("fp16", 11)])
def test_digits_that_a_difference_keeps(policy, digits):
  (text,) = findings(difference(1 + 2.0 ** (3 - digits)), policy)
  kept, of = map(float, re.search(r"keeps ([\d.]+) of their (\d+) binary digits", text).groups())
  assert of == digits
  assert 0.5 < kept < 4.5  # of the difference the leading digits - 3 are gone
  assert "test_fragile.py:" in text
  assert findings(difference(-1.0), policy) == []


def test_distance_of_neighbouring_angles():
  (text,) = findings(angle(1.0), "bf16")
  largest = np.abs(X @ PARAMS["v"]).max()
  power = int(re.search(r"angles of up to 2\^(\d+)", text).group(1))
  assert 2.0 ** (power - 1) <= largest < 2.0**power
  assert f"are {2.0 ** (power - 8):.2g} apart" in text
  assert findings(angle(1e-3), "bf16") == []


def test_float32_has_no_such_finding():
  assert findings(difference(1.001), "fp32") == findings(angle(1.0), "fp32") == []
