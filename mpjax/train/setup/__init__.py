"""What a config builds: task, optimiser, mesh, training step and first state."""
