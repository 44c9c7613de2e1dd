"""Several processes as one gateway: they share its ports, and a parent that keeps them alive."""
