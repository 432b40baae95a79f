"""A run: its directory, the training loop, records and what is shown."""
