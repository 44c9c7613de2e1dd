"""Training data: prompts, and answers that the target generates, with their hidden states."""
