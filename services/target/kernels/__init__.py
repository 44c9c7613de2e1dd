"""Attention, matrix product, sampling and cache kernels, each with a plain twin, and the paged KV cache they work on.

    pools, kv_cache   formats and shapes of the cache; the cache itself
    reference         the plain twin of attention; `reference.visible` defines the tree mask
    grouped           attention with PyTorch's operators, on any device
    cpu, cuda         compiled C++ kernels; Triton and Gluon kernels
    dispatch          chooses the attention kernel of a device

The tree mask is applied where attention scores are computed: in `reference.paged_attention`, in
`cuda.attention_kernels._blocks` (from the bits of `ragged.ancestor_words`) and in `AttentionWorker::attend` of
`cpu/csrc/attention/attention.h` (from the paths of `Batch`). A new kernel goes into `cpu` or `cuda`, with a plain twin
that its tests compare it with.
"""
