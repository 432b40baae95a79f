"""A numerics report as an answer, tables and a page."""

from mpjax.numerics.render._report_html import save_html
from mpjax.numerics.render._report_text import answer, figures, sections_of, verdict

__all__ = ["answer", "figures", "save_html", "sections_of", "verdict"]
