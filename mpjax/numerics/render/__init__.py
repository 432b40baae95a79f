"""A numerics report as text, picture and page."""

from mpjax.numerics.render._report_html import plain_data, save_html
from mpjax.numerics.render._report_picture import save_pictures
from mpjax.numerics.render._report_text import advice_lines, sections_of, stored_lines, summary_lines

__all__ = [
  "advice_lines",
  "plain_data",
  "save_html",
  "save_pictures",
  "sections_of",
  "stored_lines",
  "summary_lines",
]
