"""A random target and an EAGLE-3 head for it, in the published layouts, so that the services' own loaders read them.

The weights are random numbers at their real sizes, with one exception: the target's text is known. Its residual stream
stays close to the embedding, because the matrices that write into it have small numbers, and the output layer has the
embedding of each token at the place of the token that follows it. So the likeliest token after t is `after(t)`, by a
margin that no rounding reaches, whatever the batch, the kernel or the number format.

`python -m bench.gpu.system.checkpoints FOLDER SIZES.json DEVICE` writes FOLDER/target and FOLDER/head.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

from bench.gpu.dimensions import Dimensions
from bench.gpu.system.continuation import Continuation

_DEVIATION = 0.02  # of random matrices
_QUIET = 2e-4  # of matrices that write into the target's residual stream
_LOGIT_SCALE = 0.005
_SHARD_BYTES = 4 << 30
_SPECIAL = ["<|begin|>", "<|end|>"]
_EOS = 1
FIRST_TEXT_TOKEN = 300  # lower ids are bytes and special tokens


@dataclass(frozen=True)
class ModelSizes(Dimensions):
    """Dimensions of target and head: those of Llama-3.1-8B and its published EAGLE-3 head.

    own_vocab: entries of the head's own vocabulary. context: longest session
    """

    own_vocab: int = 32000
    context: int = 32768
    dtype: str = "bfloat16"

    @property
    def file_bytes(self) -> int:
        """About what both checkpoints take on a disk."""
        layer = self.hidden * (2 * self.hidden + 2 * self.kv_heads * (self.hidden // self.heads) + 3 * self.inner)
        numbers = (self.layers + 1) * layer + self.hidden * (2 * self.vocab + self.own_vocab + 5 * self.hidden)
        itemsize: int = getattr(torch, self.dtype).itemsize
        return numbers * itemsize

    @property
    def continuation(self) -> Continuation:
        """The text of the target: tokens that the head can propose."""
        return Continuation(FIRST_TEXT_TOKEN, self.own_vocab - FIRST_TEXT_TOKEN)


TINY_MODEL = ModelSizes(64, 128, 8, 4, 2, 512, 480, 512, "float32")


def write_pair(folder: Path, sizes: ModelSizes, device: str) -> tuple[Path, Path]:
    """Write both checkpoints. Returns their folders. device: where the numbers are made."""
    target, head = folder / "target", folder / "head"
    with torch.device(device), torch.inference_mode():
        torch.manual_seed(0)
        _write(target, _config(sizes) | {"architectures": ["LlamaForCausalLM"]}, _target(sizes))
        own = {"architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1, "draft_vocab_size": sizes.own_vocab}
        _write(head, _config(sizes) | own, _head(sizes))
    _write_tokenizer(target, sizes.vocab)
    return target, head


def _config(sizes: ModelSizes) -> dict[str, Any]:
    return {
        "model_type": "llama", "hidden_size": sizes.hidden, "intermediate_size": sizes.inner,
        "num_hidden_layers": sizes.layers, "num_attention_heads": sizes.heads, "num_key_value_heads": sizes.kv_heads,
        "head_dim": sizes.hidden // sizes.heads, "vocab_size": sizes.vocab, "hidden_act": "silu",
        "max_position_embeddings": sizes.context, "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "bos_token_id": 0,
        "eos_token_id": _EOS, "tie_word_embeddings": False, "torch_dtype": sizes.dtype,
    }  # fmt: skip


Tensors = Iterator[tuple[str, Tensor]]


def _target(sizes: ModelSizes) -> Tensors:
    dtype = getattr(torch, sizes.dtype)
    embedding = torch.randn(sizes.vocab, sizes.hidden, dtype=dtype)
    output = embedding * _LOGIT_SCALE
    text = sizes.continuation
    ids = torch.arange(text.first, text.first + text.size)
    output[ids.roll(-1)] = output[ids]
    yield "model.embed_tokens.weight", embedding
    yield "lm_head.weight", output
    yield "model.norm.weight", torch.ones(sizes.hidden, dtype=dtype)
    for i in range(sizes.layers):
        yield from _layer(f"model.layers.{i}.", sizes, sizes.hidden, _QUIET, "input_layernorm")


def _head(sizes: ModelSizes) -> Tensors:
    dtype = getattr(torch, sizes.dtype)
    yield "fc.weight", _random(sizes.hidden, 3 * sizes.hidden, dtype=dtype)
    yield from _layer("midlayer.", sizes, 2 * sizes.hidden, _DEVIATION, "input_layernorm", "hidden_norm")
    yield "norm.weight", torch.ones(sizes.hidden, dtype=dtype)
    yield "lm_head.weight", _random(sizes.own_vocab, sizes.hidden, dtype=dtype)
    yield "d2t", torch.zeros(sizes.own_vocab, dtype=torch.int64)  # offsets: its entries are the target's first ids
    yield "t2d", torch.arange(sizes.vocab) < sizes.own_vocab


def _layer(prefix: str, sizes: ModelSizes, width: int, quiet: float, *norms: str) -> Tensors:
    """A layer's tensors. width: of attention's input. quiet: deviation of the matrices that write into the stream."""
    dtype, head = getattr(torch, sizes.dtype), sizes.hidden // sizes.heads
    matrices = {
        "self_attn.q_proj": (sizes.heads * head, width, _DEVIATION),
        "self_attn.k_proj": (sizes.kv_heads * head, width, _DEVIATION),
        "self_attn.v_proj": (sizes.kv_heads * head, width, _DEVIATION),
        "self_attn.o_proj": (sizes.hidden, sizes.heads * head, quiet),
        "mlp.gate_proj": (sizes.inner, sizes.hidden, _DEVIATION),
        "mlp.up_proj": (sizes.inner, sizes.hidden, _DEVIATION),
        "mlp.down_proj": (sizes.hidden, sizes.inner, quiet),
    }
    for name, (rows, columns, deviation) in matrices.items():
        yield f"{prefix}{name}.weight", _random(rows, columns, dtype=dtype, deviation=deviation)
    for name in (*norms, "post_attention_layernorm"):
        yield f"{prefix}{name}.weight", torch.ones(sizes.hidden, dtype=dtype)


def _random(rows: int, columns: int, *, dtype: torch.dtype, deviation: float = _DEVIATION) -> Tensor:
    return torch.randn(rows, columns, dtype=dtype).mul_(deviation)


def _write(folder: Path, config: dict[str, Any], tensors: Tensors) -> None:
    """Write a checkpoint in shards, so that host memory never holds more than one."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    names: dict[str, str] = {}
    shard: dict[str, Tensor] = {}

    def flush() -> None:
        file = f"model-{len(set(names.values())) + 1:05}.safetensors"
        save_file(shard, folder / file, {"format": "pt"})
        names.update(dict.fromkeys(shard, file))
        shard.clear()

    for name, tensor in tensors:
        shard[name] = tensor.cpu().contiguous()
        if sum(part.nbytes for part in shard.values()) >= _SHARD_BYTES:
            flush()
    if shard:
        flush()
    index = {"metadata": {}, "weight_map": names}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def _write_tokenizer(folder: Path, vocab: int) -> None:
    """A byte-level tokenizer whose other ids have a word each, so that every token of the text has characters."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    entries = {token: i for i, token in enumerate([*_SPECIAL, *alphabet])}
    entries |= {f"w{i}": i for i in range(len(entries), vocab)}
    tokenizer = Tokenizer(models.BPE(vocab=entries, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(_SPECIAL)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"bos_token": _SPECIAL[0], "eos_token": _SPECIAL[1]}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def sizes_as_json(sizes: ModelSizes) -> str:
    """The dimensions as an argument of this module's command."""
    return json.dumps(asdict(sizes))


if __name__ == "__main__":
    _folder, _sizes, _device = sys.argv[1:]
    write_pair(Path(_folder), ModelSizes(**json.loads(_sizes)), _device)
