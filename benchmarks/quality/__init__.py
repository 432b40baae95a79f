"""Evaluation loss by policy over several seeds."""
