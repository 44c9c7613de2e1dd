"""Training records: the answers on disk with their hidden states, and the batches that are made of them."""
