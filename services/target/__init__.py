"""The target service (PyTorch): verifies proposals and commits tokens."""
