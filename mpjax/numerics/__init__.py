"""What low precision did to the numbers of a training step, and what to change: `mpjax.inspect_numerics`."""
