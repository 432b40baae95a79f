"""A program from a target's own compiler: totals, and the parts and products read from its messages."""
