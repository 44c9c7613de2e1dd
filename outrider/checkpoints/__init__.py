"""Checkpoints on disk: locations and downloads, published quantized formats, vocabularies."""
