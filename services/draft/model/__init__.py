"""The draft model in JAX: configuration, weights, decoder, noise and candidates."""
