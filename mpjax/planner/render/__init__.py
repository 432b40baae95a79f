"""A plan as text and picture."""
