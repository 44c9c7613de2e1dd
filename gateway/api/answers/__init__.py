"""Replies: response bodies, streams of chunks, log-probabilities, errors."""
