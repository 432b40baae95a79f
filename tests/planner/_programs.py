"""Compiled programs made by hand, as the messages that a compiler's program is."""

import json

from mpjax.planner.compiled._hlo import HloComputation, parse
from mpjax.planner.compiled._proto import DTYPES, module_class

_NUMBERS = {name: number for number, name in DTYPES.items()}
TUPLE = 13


class Program:
  """A module; the first computation that is added to it is called by others, the last is the main one."""

  def __init__(self):
    self._module = module_class()()

  def computation(self, name):
    return Computation(self._module, name)

  def parse(self) -> HloComputation:
    self._module.entry_computation_id = self._module.computations[-1].id
    return parse(self._module.SerializeToString())


class Computation:
  """Instructions in the order of `add`; the last is the root."""

  def __init__(self, module, name):
    self._made = module.computations.add(name=name, id=len(module.computations) + 1)
    self.id = self._made.id

  def add(self, op, shape, *operands, called=(), config=None, op_name="", **fields):
    """Adds an instruction with a shape such as `("f32", 8, 8)`, a list of them, or with a space: `("f32", 8, {5})`.

    Returns:
      Its number, to be an operand.
    """
    number = len(self._made.instructions) + 1
    made = self._made.instructions.add(name=f"{op}.{number}", opcode=op, id=number, **fields)
    made.operand_ids.extend(operands)
    made.called_computation_ids.extend(computation.id for computation in called)
    made.backend_config = json.dumps(config or {}).encode()
    made.metadata.op_name = op_name
    if isinstance(shape, list):
      made.shape.element_type = TUPLE
      for part in shape:
        _fill(made.shape.tuple_shapes.add(), part)
    else:
      _fill(made.shape, shape)
    self._made.root_id = number
    return number


def _fill(message, shape):
  dtype, *dims = shape
  space = dims.pop() if dims and isinstance(dims[-1], set) else {0}
  message.element_type = _NUMBERS[dtype]
  message.dimensions.extend(dims)
  (message.layout.memory_space,) = space


def cycles(number):
  """The configuration of an instruction that the compiler of a TPU expects to take so many cycles."""
  return {"window_config": {"estimated_cycles": str(number)}}
