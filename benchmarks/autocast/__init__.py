"""What autocast costs beside careful casts by hand, compiled and traced."""
