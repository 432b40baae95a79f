"""`logprob_mismatch`: how far the predictions of two policies differ, as for sampling and training."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mpjax._render.plain_text import percent
from mpjax._types import Array, PolicyLike, PyTree
from mpjax.casting import autocast
from mpjax.policy import Policy, get_policy, matmul_precision

# Below this difference of two logarithms, a series is more accurate than the exponential function.
_SMALL = 0.03


@dataclasses.dataclass(frozen=True)
class LogprobMismatch:
  """The difference between two policies' predictions, over the counted positions with finite logits.

  Attributes:
    policies: labels of both policies.
    positions: number of counted positions.
    mean: mean of |log p_a(label) - log p_b(label)|.
    largest: its largest value.
    bias: mean of log p_a(label) - log p_b(label), with its sign.
    kl_mean: mean of KL(a || b) = sum of p_a (log p_a - log p_b) over the classes.
    kl_largest: its largest value.
    changed: share of positions whose most probable class differs.
    not_finite: share of counted positions with a logit that is not finite under one policy or both.
  """

  policies: tuple[str, str]
  positions: int
  mean: float
  largest: float
  bias: float
  kl_mean: float
  kl_largest: float
  changed: float
  not_finite: float

  def to_dict(self) -> dict[str, Any]:
    """Returns the attributes as plain data."""
    return dataclasses.asdict(self)

  def __str__(self) -> str:
    a, b = self.policies
    lost = f"; {percent(self.not_finite)} of positions are not finite" if self.not_finite else ""
    return (
      f"{a} against {b}, {self.positions} positions: |dlogp| mean {self.mean:.3g}, max {self.largest:.3g}, "
      f"bias {self.bias:+.3g}; KL mean {self.kl_mean:.3g}, max {self.kl_largest:.3g}; the most probable "
      f"class changes at {percent(self.changed)}{lost}"
    )


def logprob_mismatch(
  logits_fn: Callable[[PyTree, PyTree], Array],
  params: PyTree,
  inputs: PyTree,
  policy_a: PolicyLike,
  policy_b: PolicyLike,
  labels: Any = None,
  *,
  mask: Any = None,
) -> LogprobMismatch:
  """Compares the probabilities that a model predicts under two policies, from the same weights and inputs.

  In reinforcement learning, a model may sample under one policy and train under another. Its loss contains
  the ratio of both probabilities. Rounding to bfloat16 alone takes the ratio far from 1, rounding to float16
  much less (arXiv 2510.26788).

  ```python
  logits_fn = lambda weights, x: x @ weights  # or model.apply, of a language model
  weights = jax.random.normal(jax.random.key(0), (64, 1000))
  inputs = jax.random.normal(jax.random.key(1), (8, 16, 64))
  print(mpjax.numerics.logprob_mismatch(logits_fn, weights, inputs, "bf16", "fp16"))
  ```

  Args:
    logits_fn: function from (params, inputs) to logits [..., classes].
    params: tree of arrays; each policy casts it as a training step does.
    inputs: tree of arrays.
    policy_a: whatever `mpjax.get_policy` takes, for example the policy of training.
    policy_b: the other policy, for example that of sampling. Delayed FP8 scaling would begin without a
      history: tensors are scaled by their own amax instead.
    labels: integers [...]: the classes whose log-probabilities are compared; by default the most probable
      ones under `policy_a`.
    mask: booleans [...]: the positions that count; by default all.

  Returns:
    A `LogprobMismatch`. Logits are cast to float32 under both policies; log-probabilities are float32.

  Raises:
    ValueError: if labels or mask do not have the shape of the positions, or no position counts.
  """
  pair = [get_policy(policy).without_histories() for policy in (policy_a, policy_b)]
  shape = jax.eval_shape(logits_fn, params, inputs).shape[:-1]
  for name, given in (("labels", labels), ("mask", mask)):
    if given is not None and np.shape(given) != shape:
      raise ValueError(
        f"{name} of shape {np.shape(given)}: expected {shape}, the shape of the logits without classes"
      )

  @jax.jit
  def compare(params: PyTree, inputs: PyTree, labels: Any, mask: Any) -> dict[str, Array]:
    a, b = (_logits(logits_fn, policy, params, inputs) for policy in pair)
    counts = jnp.ones(shape, bool) if mask is None else jnp.asarray(mask, bool)
    finite = jnp.all(jnp.isfinite(a), -1) & jnp.all(jnp.isfinite(b), -1)
    chosen = jnp.argmax(a, -1) if labels is None else jnp.asarray(labels)
    a, b = (jax.nn.log_softmax(jnp.where(finite[..., None], x, 0)) for x in (a, b))
    at = lambda x: jnp.take_along_axis(x, chosen[..., None], -1)[..., 0]
    here = counts & finite
    difference, kl = jnp.where(here, at(a) - at(b), 0), jnp.where(here, _divergence(a, b), 0)
    return {
      "positions": jnp.sum(counts),
      "finite": jnp.sum(here),
      "mean": jnp.sum(jnp.abs(difference)),
      "largest": jnp.max(jnp.abs(difference), initial=0),
      "bias": jnp.sum(difference),
      "kl_mean": jnp.sum(kl),
      "kl_largest": jnp.max(kl, initial=0),
      "changed": jnp.sum(here & (jnp.argmax(a, -1) != jnp.argmax(b, -1))),
    }

  found = {key: float(x) for key, x in jax.device_get(compare(params, inputs, labels, mask)).items()}
  positions, finite = int(found.pop("positions")), found.pop("finite")
  if not positions:
    raise ValueError("no position counts: expected a mask with a true entry, and inputs that are not empty")
  for key in ("mean", "bias", "kl_mean", "changed"):
    found[key] = found[key] / finite if finite else float("nan")
  labelled = (pair[0].label, pair[1].label)
  return LogprobMismatch(labelled, positions, not_finite=1 - finite / positions, **found)


def _logits(
  logits_fn: Callable[[PyTree, PyTree], Array], policy: Policy, params: PyTree, inputs: PyTree
) -> Array:
  """Returns float32 logits under a policy."""
  params = policy.cast_to_param(params)
  if policy.autocast:
    return autocast(logits_fn, policy)(params, inputs).astype(jnp.float32)
  with matmul_precision(policy):
    return logits_fn(*policy.cast_to_compute((params, inputs))).astype(jnp.float32)


def _divergence(a: Array, b: Array) -> Array:
  """Returns KL(a || b) from log-probabilities, summed over the last axis without cancellation."""
  d = a - b
  # Sums p_a (d + exp(-d) - 1), whose terms are all positive: they add p_b - p_a, whose sum is 0.
  series = d * d * (0.5 - d * (1 / 6 - d * (1 / 24 - d / 120)))
  whole = jnp.exp(a) * d + (jnp.exp(b) - jnp.exp(a))
  return jnp.sum(jnp.where(jnp.abs(d) < _SMALL, jnp.exp(a) * series, whole), -1)
