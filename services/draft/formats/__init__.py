"""Published formats of draft models: config.json becomes a ModelConfig, tensors by name become Params."""
