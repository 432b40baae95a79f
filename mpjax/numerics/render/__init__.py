"""A numerics report as a page."""

from mpjax.numerics.render._report_html import save_html, write_whole

__all__ = ["save_html", "write_whole"]
