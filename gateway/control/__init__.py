"""The control plane: weight updates, flush, pause, abort and server information, over all replicas and workers."""
