"""Training runs under faults: killed, paused, out of disk, with damaged files, beside undisturbed twins."""
