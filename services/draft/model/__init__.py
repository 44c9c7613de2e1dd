"""The draft model in JAX.

params.py    parameters by name
matrices     quantized, packed, mixed-precision and sharded matrices, and products with them
layers       attention, feed-forward, heads, RoPE and the KV cache as pure functions
weights      checkpoint tensors as parameters
parallel     devices, and tensor parallelism over a device mesh
fusion.py    the fusion of the target's states, where the draft service applies it
programs     compiled programs, and the runner that measures them
"""
