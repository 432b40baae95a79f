"""The loss of a large vocabulary in chunks of rows, beside that of whole logits."""
