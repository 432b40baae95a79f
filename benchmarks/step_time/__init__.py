"""Step times: published and measured ones beside those of plans."""
