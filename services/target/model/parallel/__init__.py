"""Tensor parallelism inside a model: this rank's parts of its tensors, and the exchanges between ranks."""
