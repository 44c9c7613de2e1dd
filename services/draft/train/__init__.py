"""Training of drafts: a target writes answers and streams its hidden states, and a head learns to foretell it."""
