"""Speed and memory on a GPU, beside hand-written JAX, mpx and PyTorch."""
