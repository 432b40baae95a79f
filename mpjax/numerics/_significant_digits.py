"""`significant_digits`: digits of a loss and its gradients that survive rounding, without a float32 run."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from mpjax._render.plain_text import table
from mpjax._types import Array, PolicyLike, PyTree
from mpjax.loss_scale import find_scaler, hide, unscale
from mpjax.numerics._arguments import step_of
from mpjax.numerics._inspection import module_of
from mpjax.numerics._instrumented_step import loss_and_gradients
from mpjax.numerics._random_rounding import with_random_rounding
from mpjax.patterns import named_leaves
from mpjax.step import TrainState, TrainStep

# Digits of float32, the precision of everything that is not rounded.
_ALL = 24 * math.log10(2)
_Moments = tuple[PyTree, PyTree]  # mean, sum of squared differences from it


@dataclasses.dataclass(frozen=True)
class SignificantDigits:
  """Decimal digits that runs with random rounding have in common, between 0 and float32's 7.2.

  Attributes:
    policy: label of the policy.
    samples: number of runs.
    loss: digits of the loss.
    gradients: digits of the gradient of each parameter, by tree path: -log10 of the norm of the standard
      deviations over the norm of the means.
    modules: digits of the gradients of all parameters of a module, by module path.
    whole: digits of the whole gradient.
    mean_loss: mean of the loss over the runs.
  """

  policy: str
  samples: int
  loss: float
  gradients: dict[str, float]
  modules: dict[str, float]
  whole: float
  mean_loss: float

  def to_dict(self) -> dict[str, Any]:
    """Returns the attributes as plain data."""
    return dataclasses.asdict(self)

  def __str__(self) -> str:
    rows = [["module", "digits of its gradients"]]
    rows += [[module or "(no module)", f"{digits:.2f}"] for module, digits in self.modules.items()]
    return "\n".join(
      [
        f"significant digits under {self.policy}, of {self.samples} runs with random rounding: "
        f"loss {self.loss:.2f} (mean {self.mean_loss:.6g}), gradient {self.whole:.2f}",
        *(line for (line,) in table(rows)),
      ]
    )


def significant_digits(
  target: TrainStep | Callable[..., Any],
  state: PyTree,
  batch: PyTree,
  policy: PolicyLike | None = None,
  *,
  samples: int = 8,
  seed: int = 0,
  **init: Any,
) -> SignificantDigits:
  """Estimates how many digits of a loss and its gradients survive rounding, from runs with random rounding.

  It does not need a float32 run. Only the rounding differs between runs, so the digits in which they agree
  are significant (Monte-Carlo arithmetic: Parker 1997; Verificarlo, arXiv 1509.01347). The half-precision
  result of a product, an arithmetic operation or a cast goes to one of its two neighbours by
  `mpjax.stochastic_round`. Its spread is about 1.4 times that of rounding to nearest, which leaves 0.15 more
  digits.

  ```python
  print(mpjax.numerics.significant_digits(loss_fn, params, batch, "bf16"))
  ```

  Args:
    target: a `TrainStep`, or a loss function as `mpjax.make_train_step` takes it.
    state: a `TrainState`; for a loss function its parameters (a tree of arrays or an `nnx.Module`).
    batch: a tree of arrays.
    policy: as for `mpjax.inspect_numerics`, but without FP8, whose products round inside.
    samples: number of runs, at least 2. With 8 runs the digits are known to about 0.1.
    seed: seed of the random bits.
    init: for a loss function, the other arguments of `TrainStep.init` (`rng`, `model_state`).

  Returns:
    A `SignificantDigits`, with decimal digits between 0 and float32's 7.2.

  Raises:
    ValueError: for fewer than two samples, a policy with FP8, or arguments that do not go together.
  """
  if isinstance(samples, bool) or not isinstance(samples, int) or samples < 2:
    raise ValueError(f"samples={samples!r}: expected a whole number of at least 2")
  step, state, _ = step_of(target, state, policy, None, init)
  if step.policy.fp8:
    raise ValueError(f"policy {step.policy.label}: expected one without FP8, whose products round inside")

  def run(state: TrainState, batch: PyTree) -> tuple[Array, PyTree]:
    loss, grads = loss_and_gradients(step, state, batch)
    scaler = find_scaler(state.opt_state)
    grads = hide(grads) if scaler is None else unscale(hide(grads), scaler.scale)
    return loss.astype(jnp.float32), jax.tree.map(lambda g: g.astype(jnp.float32), grads)

  rounded = with_random_rounding(run, state, batch)

  @jax.jit
  def sample(i: Array, state: TrainState, batch: PyTree) -> PyTree:
    # One operation for each array of bits; threefry's hundreds would take minutes to compile.
    return rounded(jax.random.fold_in(jax.random.key(seed, impl="unsafe_rbg"), i), state, batch)

  seen = sample(jnp.asarray(0), state, batch)
  units = jax.tree.map(lambda x: jnp.where(jnp.any(x != 0), jnp.max(jnp.abs(x), initial=0), 1), seen)
  moments = jax.tree.map(jnp.zeros_like, (seen, seen))
  for i in range(samples):
    moments = _add(moments, i, units, seen if i == 0 else sample(jnp.asarray(i), state, batch))
  unit = dict(named_leaves(units))
  size = {path: float(unit[path] * jnp.linalg.norm(jnp.ravel(x))) for path, x in named_leaves(moments[0])}
  parts = named_leaves(moments[1])
  spread = {path: float(unit[path] * jnp.sqrt(jnp.sum(x) / (samples - 1))) for path, x in parts}
  of = lambda paths: _digits(math.hypot(*(spread[p] for p in paths)), math.hypot(*(size[p] for p in paths)))
  modules: dict[str, list[str]] = {}
  paths = {
    path: path.removeprefix("1").removeprefix("/") for path in size if path != "0"
  }  # (loss, gradients)
  for path, name in paths.items():
    modules.setdefault(module_of(name.rpartition("/")[0], []), []).append(path)
  return SignificantDigits(
    policy=step.policy.label,
    samples=samples,
    loss=of(["0"]),
    gradients={name: of([path]) for path, name in paths.items()},
    modules={module: of(paths) for module, paths in modules.items()},
    whole=of(list(paths)),
    mean_loss=float(moments[0][0] * units[0]),
  )


@jax.jit
def _add(moments: _Moments, i: int, units: PyTree, seen: PyTree) -> _Moments:
  """Adds a sample to mean and squares, in units that keep the squares in float32's range."""
  mean, squares = moments
  seen = jax.tree.map(jnp.divide, seen, units)
  away = jax.tree.map(jnp.subtract, seen, mean)
  mean = jax.tree.map(lambda m, d: m + d / (i + 1), mean, away)
  return mean, jax.tree.map(lambda s, d, x, m: s + d * (x - m), squares, away, seen, mean)


def _digits(spread: float, size: float) -> float:
  """Returns -log10 of a relative spread; 0 if it is not finite."""
  if not math.isfinite(spread) or not math.isfinite(size):
    return 0.0
  if not spread:
    return _ALL
  return min(max(-math.log10(spread / size), 0.0), _ALL) if size else 0.0
