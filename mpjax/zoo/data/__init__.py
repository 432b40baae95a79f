"""Datasets: text, token numbers, and images with labels."""
