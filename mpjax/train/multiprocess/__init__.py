"""Several processes of one run: start, agreement, signals, and what happens when one is lost."""
