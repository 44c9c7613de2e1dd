"""Training of a draft model, offline or online: packed batches, objective, optimizer, training algorithms.

A new training algorithm is a module in `algorithms`; nothing else here depends on the algorithm.
"""
