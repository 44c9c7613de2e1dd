"""CUDA kernels in Triton and Gluon.

`attention` (host) and `attention_kernels` (device) apply the tree mask, with tables from `ragged`; `small_batch_matmul`
and its Gluon twin multiply up to 16 rows; `fused_elementwise` does norms, rotary embedding and gates;
`invariant_matmul` serves --deterministic; `cache` writes and moves cache rows; `greedy` takes the argmax. A new kernel
is a module here, with a plain twin in PyTorch and a test against it that runs in Triton's interpreter.
"""
