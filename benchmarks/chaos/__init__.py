"""Runs of several processes that are killed at random moments."""
