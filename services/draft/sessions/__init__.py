"""A session in the draft service: its draft tree, frontiers, unsent proposals, prefix KV, features, and step inputs."""
