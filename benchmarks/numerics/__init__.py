"""What an inspection of the numbers costs."""
