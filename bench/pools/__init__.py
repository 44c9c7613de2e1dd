"""Pools of replicas with simulated engines: throughput, joins and losses, shares, saturation; plans of large ones."""
