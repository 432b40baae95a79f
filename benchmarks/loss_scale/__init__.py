"""What a loss scale costs in a compiled program."""
