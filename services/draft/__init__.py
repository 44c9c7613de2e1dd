"""The draft service (JAX): proposes tokens ahead of the target."""
