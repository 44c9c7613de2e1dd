"""`python -m bench.checkpoints.random_gguf SIZE FILE`: a GGUF file with random weights in the shape of a real model.

Shapes are those of Qwen2.5 with 0.5, 1.5 and 3 billion parameters, and the types of the tensors those of llama.cpp's
mixtures, so that a step reads as many bytes as with the published files. Texts are nonsense; speeds are not.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
from gguf import GGML_QUANT_SIZES
from gguf import GGMLQuantizationType as Type

from bench.checkpoints.blocks import TYPES, random_rows
from bench.checkpoints.vocabulary import Vocabulary, vocabulary

_BLOCK = 256  # weights in a block of the K types
_FALLBACK = {Type.Q4_K: Type.Q5_0, Type.Q5_K: Type.Q5_1, Type.Q6_K: Type.Q8_0}  # for rows of other lengths
_FILE_TYPES = {"Q4_K_M": 15, "Q5_K_M": 17}  # llama.cpp's numbers
_SPREAD = 0.02  # of embeddings


@dataclass(frozen=True)
class Shape:
    """The shape of a Qwen2 decoder. tied: the embedding is the LM head, too."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    vocab: int = 151936
    context: int = 32768
    tied: bool = True

    @property
    def head_dim(self) -> int:
        """Width of a head."""
        return self.hidden // self.heads


SHAPES = {
    "0.5B": Shape(896, 24, 14, 2, 4864),
    "1.5B": Shape(1536, 28, 12, 2, 8960),
    "3B": Shape(2048, 36, 16, 2, 11008),
}
MIXTURES = ("Q4_K_M", "Q5_K_M", *(kind.name for kind in TYPES))
"""llama.cpp's mixtures of two types, and single types."""


@dataclass(frozen=True)
class _Tensor:
    name: str
    outputs: int
    inputs: int
    kind: Type
    spread: float


def _has_more_bits(layer: int, layers: int) -> bool:
    """Layers whose values and down projections have 6 bits in the mixtures, as in llama.cpp's quantizer."""
    return layer < layers // 8 or layer >= 7 * layers // 8 or (layer - layers // 8) % 3 == 2


def _tensors(shape: Shape, mixture: str) -> Iterator[_Tensor]:
    mixed = mixture in _FILE_TYPES
    base = Type[mixture.removesuffix("_M") if mixed else mixture]

    def matrix(name: str, outputs: int, inputs: int, kind: Type, spread: float | None = None) -> _Tensor:
        kind = _FALLBACK.get(kind, kind) if inputs % _BLOCK else kind
        return _Tensor(f"{name}.weight", outputs, inputs, kind, inputs**-0.5 if spread is None else spread)

    most = Type.Q6_K if mixed else base
    yield matrix("token_embd", shape.vocab, shape.hidden, most if shape.tied else base, _SPREAD)
    if not shape.tied:
        yield matrix("output", shape.vocab, shape.hidden, most)
    yield _Tensor("output_norm.weight", 0, shape.hidden, Type.F32, 0.1)
    wide, narrow = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    for layer in range(shape.layers):
        block, more = f"blk.{layer}", most if _has_more_bits(layer, shape.layers) else base
        for norm in ("attn_norm", "ffn_norm"):
            yield _Tensor(f"{block}.{norm}.weight", 0, shape.hidden, Type.F32, 0.1)
        for name, outputs, kind in (("attn_q", wide, base), ("attn_k", narrow, base), ("attn_v", narrow, more)):
            yield matrix(f"{block}.{name}", outputs, shape.hidden, kind)
            yield _Tensor(f"{block}.{name}.bias", 0, outputs, Type.F32, 0.05)
        yield matrix(f"{block}.attn_output", shape.hidden, wide, base)
        yield matrix(f"{block}.ffn_gate", shape.intermediate, shape.hidden, base)
        yield matrix(f"{block}.ffn_up", shape.intermediate, shape.hidden, base)
        yield matrix(f"{block}.ffn_down", shape.hidden, shape.intermediate, more)


def write_random_gguf(
    file: Path, shape: Shape, mixture: str = "Q4_K_M", seed: int = 0, words: Vocabulary | None = None
) -> None:
    """Write a file. mixture: one of MIXTURES. words: by default those of `vocabulary`, as many as the shape has."""
    rng = np.random.default_rng(np.random.SFC64(seed))
    writer = gguf.GGUFWriter(file, "qwen2")
    writer.add_name(f"random {mixture}")
    _write_fields(writer, shape, mixture)
    (vocabulary(shape.vocab, seed) if words is None else words).write(writer)
    tensors = list(_tensors(shape, mixture))
    for one in tensors:
        if one.kind == Type.F32:
            writer.add_tensor_info(one.name, (one.inputs,), np.dtype(np.float32), 4 * one.inputs)
        else:
            block, size = GGML_QUANT_SIZES[one.kind]
            row = one.inputs // block * size
            writer.add_tensor_info(one.name, (one.outputs, row), np.dtype(np.uint8), one.outputs * row, one.kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for one in tensors:
        if one.kind == Type.F32:
            middle = 0.0 if one.name.endswith("bias") else 1.0
            writer.write_tensor_data(rng.normal(middle, one.spread, one.inputs).astype(np.float32))
        else:
            writer.write_tensor_data(random_rows(one.kind, one.outputs, one.inputs, one.spread, rng))
    writer.close()


def _write_fields(writer: gguf.GGUFWriter, shape: Shape, mixture: str) -> None:
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    if mixture in _FILE_TYPES:
        writer.add_file_type(_FILE_TYPES[mixture])
    writer.add_context_length(shape.context)
    writer.add_embedding_length(shape.hidden)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(shape.intermediate)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_rope_freq_base(1e6)
    writer.add_layer_norm_rms_eps(1e-6)


def main(argv: Sequence[str] | None = None) -> int:
    """Write the file that the flags describe. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m bench.checkpoints.random_gguf", description=__doc__)
    parser.add_argument("size", choices=list(SHAPES), help="parameters of the model")
    parser.add_argument("file", type=Path, help="GGUF file to write")
    parser.add_argument("--mixture", choices=MIXTURES, default="Q4_K_M", help="types of the tensors (default: Q4_K_M)")
    parser.add_argument("--seed", type=int, default=0, help="equal seeds give equal files")
    flags = parser.parse_args(argv)
    start = time.monotonic()
    flags.file.parent.mkdir(parents=True, exist_ok=True)
    write_random_gguf(flags.file, SHAPES[flags.size], flags.mixture, flags.seed)
    print(f"{flags.file}: {flags.file.stat().st_size / 1e6:.0f} MB in {time.monotonic() - start:.1f} s")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
