"""Sampling: what a session asked for, how its tokens are sampled on the device, and what is reported beside them."""
