"""Memory and products of a program, from its jaxpr alone."""
