"""FP8 matrix products: recipes, scaling, differentiation. Knows nothing of autocast, which calls it."""
