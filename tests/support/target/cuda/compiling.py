"""A program that compiles the CUDA kernels for a GPU that is not there."""

COMPILE = """
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from services.target.kernels.cuda import (
    attention_kernels as triton_kernels, cache as triton_cache, fused_elementwise as elementwise,
    greedy as triton_greedy, invariant_matmul, prepared_spans, small_batch_matmul)
POINTERS = {"q": "bf16", "k_pool": "bf16", "v_pool": "bf16", "out": "bf16", "sinks": "bf16", "keys": "bf16",
    "values": "bf16", "partial_acc": "fp32", "partial_ml": "fp32", "positions": "i64", "slots": "i64", "pools": "i64",
    "row_bytes": "i64", "moves": "i64", "sources": "i64", "destinations": "i64", "tiles": "i32", "items": "i32",
    "item_count": "i32", "pages": "i32", "words": "i32", "paths": "i32", "folds": "i32", "x": "bf16", "y": "bf16",
    "weight": "bf16", "bias": "bf16", "residual": "bf16", "branch": "bf16", "after": "bf16", "wide": "bf16",
    "query_weight": "bf16", "key_weight": "bf16", "queries": "bf16", "cosines": "fp32", "sines": "fp32",
    "tile_group": "i64", "tile_row": "i64", "group_end": "i64", "logits": "bf16", "bests": "fp32", "tokens": "i32",
    "picked": "i64"}
HEADS = dict(KV_HEADS=8, GROUP=4, HEADS=4, BLOCKS=1, HEAD_COUNT=32, D1=128, D2=0, D=128, DV=128, DV_PAD=128, D_PAD=1024,
    PAGE=16, M=64, N=64, PART=1024, PARTS=64, AT_ONCE=8, LIMIT=0.0,
    TREE=True, WINDOW=True, SOFTCAP=True, SINKS=True, WIDE=False, ORDERED=True, BIAS=True,
    ROWS=64, OUTPUTS=64, INPUTS=64, BLOCK=1024, HALF=64, HALF_PAD=64, NORMED=True, SHIFTED=True, ADDED=True, AFTER=True,
    EVEN=True, GATED=True, GELU=True, PAIRS=16, CHAINED=True, TABLES=True)
SMALL = dict(M=16, N=16)  # tiles of attention, which is compiled in a fraction of the time; largest ones have a test
for kernel in (triton_kernels.attend, triton_kernels.fold, triton_cache.write_rows, triton_cache.move_rows,
               triton_cache.move_paths, invariant_matmul._product, invariant_matmul._sum,
               small_batch_matmul.small_batch_linear, small_batch_matmul.small_batch_rotary,
               elementwise._add_norm, elementwise._rotate_and_store, elementwise._gated,
               triton_greedy.part_best, triton_greedy.row_best):
    names = kernel.arg_names
    sizes = HEADS | SMALL if kernel is triton_kernels.attend else HEADS
    floats = ("scale", "softcap", "v_scale", "epsilon", "after_epsilon", "query_epsilon", "key_epsilon")
    signature = {n: "constexpr" if n in sizes else "*" + POINTERS[n] if n in POINTERS else
                 "fp32" if n in floats else "i32" for n in names}
    constants = {(i,): sizes[n] for i, n in enumerate(names) if n in sizes}
    binary = compile(ASTSource(kernel, signature, constants), target=GPUTarget("cuda", 90, 32),
                     options={"num_warps": 4, "num_stages": 3, "enable_fp_fusion": False})
    print(kernel.__name__, len(binary.asm["cubin"]), binary.metadata.shared)

constants = dict(NODES=64, FILLER=32, NO_TOKEN=-3, KEYED=True)
numbers = ("count", "width", "sampled_rows", "page_columns", "key_count", "page_size")
signature = {n: "constexpr" if n in constants else "i32" if n in numbers else
             "*i32" if n in ("moved", "words") else "*i64" for n in prepared_spans.choose.arg_names}
binary = compile(ASTSource(prepared_spans.choose, signature, constants), target=GPUTarget("cuda", 90, 32))
print("choose", len(binary.asm["cubin"]), binary.metadata.shared)
"""
