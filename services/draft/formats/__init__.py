"""Published formats of draft models: config.json becomes a ModelConfig, tensors by name become Params.

A new checkpoint format is a reader that returns a DraftCheckpoint; services/draft/process/checkpoints.py chooses it.
"""
