"""Meshes of devices: where state lies on them, and what crosses them in a training step, in which dtype."""
