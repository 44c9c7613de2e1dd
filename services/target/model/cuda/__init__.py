"""Models on CUDA: fused layers, CUDA graphs and torch.compile."""
