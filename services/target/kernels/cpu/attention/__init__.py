"""Paged attention in place under a tree mask, from a C view of the batch, and moves of cache rows."""
