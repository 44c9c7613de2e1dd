"""Training data: prompts, and answers collected from the target with their hidden states."""
