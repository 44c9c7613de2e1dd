"""The draft model in training, computed as the draft service computes it: heads on their own states, and blocks."""
