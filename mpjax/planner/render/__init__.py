"""Plans as an answer, as tables and as a picture."""

from mpjax.planner.render._picture import COLORS, save_picture
from mpjax.planner.render._report import NO_FIT, answer, answer_beside, sections_of

__all__ = [
  "COLORS",
  "NO_FIT",
  "answer",
  "answer_beside",
  "save_picture",
  "sections_of",
]
