"""Device placement: choice of devices, size of the KV cache, tensor parallelism over a device mesh."""
