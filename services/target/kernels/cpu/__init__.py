"""CPU kernels in C++: products of few rows with packed weights, paged attention, whole decoders, sampling.

    build, library       compile `csrc/` and bind it
    pool, bandwidth      threads; how fast they read memory
    matrices, attention  packed weights and paged attention as operators of PyTorch tensors
    sampling             tokens from logits
    programs             whole decoders, which use all of these in one call

`csrc/` has the same folders. If there is no compiler, or the processor lacks a required instruction, PyTorch's own
operators replace the kernels. A new kernel is a header in `csrc/`, a C function in `csrc/api.cpp`, its signature in
`library`, and a module here.
"""
