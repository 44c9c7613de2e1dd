"""Several worker processes as one gateway: a parent keeps them alive, and they share its ports."""
