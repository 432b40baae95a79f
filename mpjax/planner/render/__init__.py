"""Plans as an answer, as tables and as pictures."""

from mpjax.planner.render._plan_answer import answer, answer_beside
from mpjax.planner.render._plan_picture import COLORS, save_picture
from mpjax.planner.render._plan_text import NO_FIT, sections_of

__all__ = [
  "COLORS",
  "NO_FIT",
  "answer",
  "answer_beside",
  "save_picture",
  "sections_of",
]
