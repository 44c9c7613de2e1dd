"""The whole system over the transports of its streams."""
