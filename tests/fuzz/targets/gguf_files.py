"""GGUF files: what is read of their metadata. The converter reports every error of its libraries, so that only what it
could not report is a fault: a crash, a hang, memory without bound.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from types import SimpleNamespace

import gguf
import numpy as np

from services.target.model.gguf import metadata
from services.target.model.gguf.reader import HeaderReader, record_of
from tests.fuzz.choices import Choices

_FOLDER = tempfile.TemporaryDirectory(prefix="fuzz-")
_NUMBERS = ("llama.rope.freq_base", "llama.rope.dimension_count", "llama.rope.scaling.factor", "split.count",
            "llama.attention.key_length", "llama.attention.sliding_window", "tokenizer.ggml.eos_token_id",
            "llama.rope.scaling.original_context_length", "llama.attn_logit_softcapping")  # fmt: skip
_TEXTS = ("general.architecture", "llama.rope.scaling.type", "tokenizer.ggml.pre", "tokenizer.chat_template",
          "tokenizer.chat_template.tools")  # fmt: skip
_WORDS = ("llama", "phi3", "linear", "yarn", "none", "x", "llama-bpe", "<|im_end|>", "{{ x }}", "")


class _Config(SimpleNamespace):
    """What the reader completes of a configuration of `transformers`, whose import takes longer than all inputs."""

    def __init__(self, model_type: str, **rope: float) -> None:
        super().__init__(
            model_type=model_type, hidden_size=64, num_attention_heads=4, num_hidden_layers=1, head_dim=16,
            sliding_window=None, attn_logit_softcapping=None, original_max_position_embeddings=64,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0} | rope,
        )  # fmt: skip

    def get_text_config(self) -> _Config:
        return self


_SHORT = 1 << 16  # bytes; a longer file is no better one


def fuzz(data: bytes) -> None:
    """The first byte chooses whether the rest is a whole file or decisions about one."""
    choices, file = Choices(data[:_SHORT]), Path(_FOLDER.name) / "model.gguf"
    if choices.chance(2):
        _write(file, choices)
    else:
        file.write_bytes(choices.rest())
    for config in (_Config("llama"), _Config("phi3", partial_rotary_factor=1.0)):
        try:
            reader = HeaderReader(file)
            record_of(reader, file, "")
            metadata.apply(reader, config)
            metadata.chat_templates(reader)
            metadata.end_token_ids(reader)
            metadata.words_are_whole(reader)
        except Exception:  # the converter's process reports it and ends
            return


def seeds() -> list[bytes]:
    """A good file, and decisions."""
    file = Path(_FOLDER.name) / "seed.gguf"
    _write(file, Choices(bytes(range(60))))
    return [b"\0" + file.read_bytes(), b"\1" + bytes(range(60)), b"\1" + bytes(range(60, 0, -1))]


def _write(file: Path, choices: Choices) -> None:
    writer = gguf.GGUFWriter(file, "llama")
    for name in dict.fromkeys(choices.items(lambda: choices.one(_NUMBERS), 6)):
        if choices.chance(4):
            writer.add_string(name, choices.one(_WORDS))
        elif choices.chance(2):
            writer.add_float32(name, choices.byte() - 8)
        else:
            writer.add_uint32(name, choices.integer() % 2**32)
    for name in dict.fromkeys(choices.items(lambda: choices.one(_TEXTS[1:]), 4)):
        writer.add_string(name, choices.one(_WORDS))
    writer.add_array("tokenizer.ggml.tokens", [choices.one(_WORDS[5:]), "a", "<|eot_id|>"])
    for name in dict.fromkeys(choices.items(lambda: choices.one(("rope_freqs.weight", "rope_factors_long.weight")), 2)):
        with np.errstate(over="ignore"):
            writer.add_tensor(name, np.array([choices.number() for _ in range(1 + choices.below(4))], np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
