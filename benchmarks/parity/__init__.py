"""Whether two checkouts of mpjax make the same programs."""
