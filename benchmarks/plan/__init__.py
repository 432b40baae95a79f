"""How close plans are to compilers and to a GPU."""
