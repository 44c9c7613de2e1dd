"""CPU kernels in C++: products of few rows with packed weights, paged attention, whole decoders, sampling.

`build` compiles `csrc/`, `library` binds it; other packages use `weights`, `attention`, `program` and `sampling`. If
there is no compiler, or the processor lacks a required instruction, PyTorch's own operators replace the kernels. A new
kernel is a header in `csrc/`, a C function in `csrc/api.cpp`, its signature in `library`, and a module here.
"""
