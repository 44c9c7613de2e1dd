"""Launching steps: the batch of one, the next one behind a step in flight, and the time of that launch."""
