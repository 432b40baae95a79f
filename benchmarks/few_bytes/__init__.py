"""Optimiser state and weights in few bytes: what the stored moments are worth, time and memory."""
