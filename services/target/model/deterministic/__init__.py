"""--deterministic: batch-invariant operators, and the start-up check of batch invariance."""
