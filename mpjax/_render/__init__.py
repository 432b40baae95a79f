"""Shows results to a person: plain text, sections for a terminal or a notebook."""
