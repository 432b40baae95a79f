"""Checks the shapes and dtypes of arrays in signatures while tests call the functions."""

import sys
import typing

import beartype
import jax
import jaxtyping
import numpy as np

PACKAGES = ("mpjax.formats", "mpjax.fp8", "mpjax.loss_scale", "mpjax.sharding", "mpjax.step", "mpjax.train")


def install():
  """Has every function of `PACKAGES` that is imported from now on checked at each call."""
  jaxtyping.install_import_hook(PACKAGES, f"{__name__}.check")


def check(function):
  """Checks arrays alone: of other types mypy says more, and a wrong one has an error of its own in many places."""
  names = vars(sys.modules[function.__module__])
  annotations = {k: _resolved(v, names) for k, v in function.__annotations__.items()}
  function.__annotations__ = {k: _or_numpy(v) for k, v in annotations.items() if _of_arrays(v)}
  return beartype.beartype(function)


def _resolved(annotation, names):
  try:
    return eval(annotation, names) if isinstance(annotation, str) else annotation
  except NameError:  # imported for mypy alone
    return object


def _or_numpy(annotation):
  """Allows NumPy's arrays, which stand in for JAX's outside jit."""
  if isinstance(annotation, type) and annotation.array_type is jax.Array:
    return annotation.dtype[jax.Array | np.ndarray, annotation.dim_str]
  return annotation


def _of_arrays(annotation):
  if isinstance(annotation, type) and issubclass(annotation, jaxtyping.AbstractArray):
    return True
  return any(map(_of_arrays, typing.get_args(annotation)))
