"""A numerics report as an answer, tables and a page."""

from mpjax.numerics.render._report_answer import answer, figures, verdict
from mpjax.numerics.render._report_html import plain_data, save_html
from mpjax.numerics.render._report_text import sections_of

__all__ = [
  "answer",
  "figures",
  "plain_data",
  "save_html",
  "sections_of",
  "verdict",
]
