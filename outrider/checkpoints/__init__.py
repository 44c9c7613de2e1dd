"""Checkpoints on disk: where they are found, published quantized formats, vocabulary fingerprints."""
