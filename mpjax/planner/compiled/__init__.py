"""Memory, products and collectives of a program, from what a device's compiler made of it."""
