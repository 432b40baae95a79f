"""The time of a step: from a compiled program, or from the traced one."""

from mpjax.planner.timing._compiled_time import compiled_time, program_time
from mpjax.planner.timing._traced_time import traced_time

__all__ = ["compiled_time", "program_time", "traced_time"]
