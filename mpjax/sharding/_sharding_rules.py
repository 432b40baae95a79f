"""Rules on the paths of parameters that give the sharding of each array of a training state."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import jax
from jax.sharding import PartitionSpec
from jax.tree_util import KeyPath

from mpjax._types import Array, Mesh, PyTree
from mpjax.optim import Quantized, is_quantized
from mpjax.patterns import component_regex, named_leaves, parameter_of, path_text

Shape = tuple[int, ...]
Dims = Sequence[str | None]
# With `("tensor", 12)` a dimension consists of 12 parts, each of which must be on one device.
RuleDims = Sequence[str | tuple[str, int] | None]
# From a parameter's path and shape to an axis (or `None`) for each dimension; `None` if the rule does not
# apply.
ShardingRule = Callable[[str, Shape], RuleDims | None]

# Smaller arrays are replicated: gathering them would cost more than storing them.
SMALLEST = 1024
_OF_PARAMETERS = ("fsdp", "tensor")


class ShardingRules:
  """Rules in order: the user's patterns, the model's rule, and the default for the rest.

  By default an array of at least two dimensions is divided over `fsdp`, along the largest dimension that
  `fsdp` divides.

  Args:
    patterns: from a regular expression on parameter paths (`blocks/0/qkv/kernel`), which must match whole
      components, to an axis or `None` for each dimension.
    model: the model's rule for its own parameters, or its own patterns, each for arrays of as many
      dimensions as it names; an axis that does not divide a dimension is left out.

  Raises:
    ValueError: for an invalid pattern, an axis that does not divide parameters, or one named twice.
  """

  def __init__(
    self,
    patterns: Mapping[str, Dims | None] | None = None,
    model: ShardingRule | Mapping[str, Dims | None] | None = None,
  ):
    self._patterns = dict(patterns or {})
    self._rule = model if callable(model) else None
    self._of_model = {} if model is None or callable(model) else dict(model)
    for pattern, dims in (*self._patterns.items(), *self._of_model.items()):
      component_regex(pattern)
      is_list = dims is None or (isinstance(dims, Sequence) and not isinstance(dims, str))
      named = [axis for axis in (dims or ()) if axis is not None] if is_list else []
      if not is_list or any(axis not in _OF_PARAMETERS for axis in named):
        raise ValueError(
          f"sharding rule {pattern!r}: {dims!r}: expected fsdp, tensor or null for each dimension, such as "
          "[fsdp, null]"
        )
      if len(set(named)) < len(named):
        raise ValueError(f"sharding rule {pattern!r}: {dims!r} names an axis twice")

  def specs(self, params: PyTree, mesh: Mesh) -> PyTree[PartitionSpec]:
    """Returns a `PartitionSpec` for each leaf of a tree of parameters (arrays or shapes).

    Raises:
      ValueError: for a pattern that matches nothing, or a division that a parameter's shape does not allow.
    """
    sizes = {axis: mesh.shape.get(axis, 1) for axis in _OF_PARAMETERS}
    unused = {*self._patterns, *self._of_model}

    def of(path: KeyPath, leaf: Array | jax.ShapeDtypeStruct) -> PartitionSpec:
      name = path_text(path)
      for pattern, dims in self._patterns.items():
        if component_regex(pattern).search(name):
          unused.discard(pattern)
          return _spec(_checked(pattern, dims or (), name, leaf.shape, sizes), sizes)
      of_model = self._rule(name, leaf.shape) if self._rule else None
      for pattern, dims in self._of_model.items():
        if component_regex(pattern).search(name):
          unused.discard(pattern)
          if of_model is None and len(dims or leaf.shape) == len(leaf.shape):
            of_model = dims or [None] * len(leaf.shape)
      if of_model is None:
        return _spec(_largest(leaf.shape, sizes["fsdp"]), sizes)
      return _spec(_fitting(of_model, leaf.shape, sizes), sizes)

    specs = jax.tree_util.tree_map_with_path(of, params)
    if unused:
      names = [name for name, _ in named_leaves(params)]
      shown = ", ".join(names[:12]) + (", ..." if len(names) > 12 else "")
      raise ValueError(f"sharding rule {min(unused)!r} matches no parameter; parameters: {shown}")
    return specs


def specs_like(
  tree: PyTree, params: PyTree, specs: PyTree[PartitionSpec], mesh: Mesh
) -> PyTree[PartitionSpec]:
  """Returns the specs of an optimiser's state: a leaf with a parameter's path and shape has its spec.

  Scales of a quantised array are divided as its codes, if the groups can be divided so.
  """
  leaves = named_leaves(params)
  shapes = {name: leaf.shape for name, leaf in leaves}
  known = dict(zip(shapes, jax.tree.leaves(specs, is_leaf=is_spec), strict=True))

  def of(path: KeyPath, leaf: Array | jax.ShapeDtypeStruct | Quantized) -> PartitionSpec | Quantized:
    codes = leaf.codes if isinstance(leaf, Quantized) else leaf
    parameter = parameter_of(path_text(path), codes.shape, shapes)
    spec = PartitionSpec() if parameter is None else known[parameter]
    if not isinstance(leaf, Quantized):
      return spec
    if leaf.scales is None:
      return Quantized(spec, None)
    divided = 0 < codes.ndim == len(spec) and spec[-1] is not None
    whole = divided and leaf.scales.shape[-1] % mesh.shape[spec[-1]]
    return Quantized(spec, _trimmed(spec[:-1]) if whole else spec)

  return jax.tree_util.tree_map_with_path(of, tree, is_leaf=is_quantized)


def keep_axes(spec: PartitionSpec, axes: Sequence[str]) -> PartitionSpec:
  """Returns a spec with only the given axes; dimensions that other axes divided are whole."""
  return PartitionSpec(*(axis if axis in axes else None for axis in spec))


def dimension_over(spec: PartitionSpec, axis: str) -> int | None:
  """Returns the dimension that a spec divides over an axis; `None` if there is none."""
  return next((i for i, a in enumerate(spec) if a == axis), None)


def is_spec(x: object) -> bool:
  """Returns whether an object is a `PartitionSpec`; use it as `is_leaf` of a tree of specs."""
  return isinstance(x, PartitionSpec)


def _fitting(dims: RuleDims, shape: Shape, sizes: Mapping[str, int]) -> Dims:
  """Leaves out axes that do not divide a dimension, or its number of parts."""
  found: list[str | None] = []
  for entry, n in zip(dims, shape, strict=True):
    axis, parts = entry if isinstance(entry, tuple) else (entry, n)
    found.append(axis if axis and parts % sizes[axis] == n % sizes[axis] == 0 else None)
  return found


def _largest(shape: Shape, fsdp: int) -> Dims:
  """Divides the largest dimension that can be divided, if the array is large enough."""
  dims: list[str | None] = [None] * len(shape)
  fitting = [i for i, n in enumerate(shape) if n % fsdp == 0]
  if len(shape) > 1 and math.prod(shape) >= SMALLEST and fitting:
    dims[max(fitting, key=lambda i: shape[i])] = "fsdp"
  return dims


def _checked(pattern: str, dims: Dims, name: str, shape: Shape, sizes: Mapping[str, int]) -> Dims:
  """Returns `dims`, or raises for a parameter that cannot be divided so."""
  if dims and len(dims) != len(shape):
    raise ValueError(
      f"sharding rule {pattern!r}: {list(dims)!r} for {name}{list(shape)}: expected an axis or null "
      f"for each of its {len(shape)} dimensions"
    )
  for axis, n in zip(dims, shape, strict=False):
    if axis and n % sizes[axis]:
      raise ValueError(
        f"sharding rule {pattern!r}: {name}{list(shape)} has a dimension of {n}, which {axis}="
        f"{sizes[axis]} does not divide"
      )
  return dims


def _spec(dims: Dims, sizes: Mapping[str, int]) -> PartitionSpec:
  """Leaves out axes with one device, and trailing dimensions that are whole."""
  return _trimmed([axis if axis and sizes[axis] > 1 else None for axis in dims])


def _trimmed(dims: Dims) -> PartitionSpec:
  used = list(dims)
  while used and used[-1] is None:
    used.pop()
  return PartitionSpec(*used)
