"""A session in the draft service: its draft tree, frontier, prefix KV and received features."""
