"""Training from a YAML config: what only a training run needs."""
