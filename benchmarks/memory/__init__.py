"""Peak memory of a training step by policy, batch and model size."""
