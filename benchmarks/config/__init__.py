"""A config of a user's, by policy."""
