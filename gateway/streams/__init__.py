"""Streams to the services: one multiplexed, reconnecting stream a replica."""
