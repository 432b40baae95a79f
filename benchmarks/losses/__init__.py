"""Losses and masks under autocast, beside casts by hand."""
