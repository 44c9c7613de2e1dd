"""Loading a model: checkpoints, quantization, tensor-parallel shards, and weight updates of a running model."""
