"""Our system beside others on the same weights, prompts and limits, in turns, in one run."""
