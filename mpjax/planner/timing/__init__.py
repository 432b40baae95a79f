"""The time of a step: from a compiled program, or from the traced one."""

from mpjax.planner.timing._compiled_time import compiled_time, program_time

__all__ = ["compiled_time", "program_time"]
