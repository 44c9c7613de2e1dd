"""Training of draft models: the target generates answers and streams hidden states, from which a draft model learns."""
