"""A numerics report as text, picture and page."""
