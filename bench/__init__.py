"""Benchmarks: each runs both sides in one call, prints ratios and states the floor beside the figure."""
