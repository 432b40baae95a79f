"""What went wrong in the numbers of a program, and the policy that mends it."""
