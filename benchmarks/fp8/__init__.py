"""Which matrix products of a compiled GPT are FP8 GEMMs."""
