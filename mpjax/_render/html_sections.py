"""Another name of `mpjax._render.tables`."""

from mpjax._render.tables import Report, Shown, print_shown

__all__ = ["Report", "Shown", "print_shown"]
