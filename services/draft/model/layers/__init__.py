"""Layers of draft models as pure functions over a paged KV cache."""
