"""Learning a draft head, offline or online: packed batches, objective, optimizer, training algorithms."""
