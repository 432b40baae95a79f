"""Weak scaling on 1 to 256 described chips."""
