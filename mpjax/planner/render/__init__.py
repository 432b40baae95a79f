"""Plans as text, in colour and as pictures."""

from mpjax.planner.render._plan_picture import COLORS, save_picture
from mpjax.planner.render._plan_text import NO_FIT, as_text, print_plans, sections_of

__all__ = [
  "COLORS",
  "NO_FIT",
  "as_text",
  "print_plans",
  "save_picture",
  "sections_of",
]
