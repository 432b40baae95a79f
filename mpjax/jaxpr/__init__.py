"""What is true of a jaxpr, whoever asks: primitives, scopes, bodies, walks."""
