"""What `transformers` leaves unread in a GGUF file, put into the model's configuration. Without it the text is another.

RoPE scaling: Llama 3.1 and its successors store a factor for every frequency as a tensor; others state linear or YaRN
scaling as fields. The width of heads, which some architectures state. And what no file states: by what Gemma's queries
are scaled, which is known by size, and all of the tokens that end a text, which are known by name.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from gguf import GGUFReader
from numpy.typing import NDArray

from outrider.errors import ConfigError

_FACTORS = "rope_freqs.weight"
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
_CLOSE = 1e-3
# The layers of those Gemmas (27B) whose queries are scaled by the model's width a head, not by the head's.
_LARGEST_GEMMA = {"gemma2": 46, "gemma3_text": 62}
# Tokens that end a turn or a text wherever they are in a vocabulary, as llama.cpp has it: files state one, and for
# Gemma and Phi-3 that is often not the one that ends a turn.
_ENDS = {
    "<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<end_of_turn>", "<|endoftext|>",
    "<|end_of_text|>", "<EOT>", "_<EOT>", "[EOT]", "<end_of_utterance>",
}  # fmt: skip
_HARMONY = {"<|return|>", "<|call|>"}  # where there are both, <|end|> ends a part of an answer alone


def apply(reader: GGUFReader, config: Any) -> None:
    """Complete a configuration from its file. Raises ConfigError for a RoPE scaling that is not known."""
    text = config.get_text_config()
    head_dim = _read(reader, "attention.key_length")
    if head_dim is not None and getattr(text, "head_dim", head_dim) != head_dim:
        text.head_dim = head_dim
    if text.model_type in _LARGEST_GEMMA:
        largest = text.num_hidden_layers == _LARGEST_GEMMA[text.model_type]
        text.query_pre_attn_scalar = text.hidden_size // text.num_attention_heads if largest else text.head_dim
    scaling = _from_factors(reader, text) or _from_fields(reader)
    if scaling is None:
        return
    parameters = text.rope_parameters
    if "full_attention" in parameters:  # layers with a window keep theirs unscaled
        parameters["full_attention"] |= scaling
    else:
        parameters |= scaling


def end_token_ids(reader: GGUFReader) -> set[int]:
    """Ids that end a text: those that the file states as such, and those whose tokens say so."""
    stated = {_field(reader, f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")} - {None}
    ids = {token: i for i, token in enumerate(_field(reader, "tokenizer.ggml.tokens") or ())}
    names = _ENDS - {"<|end|>"} if ids.keys() >= _HARMONY else _ENDS
    return {int(token) for token in stated} | {ids[name] for name in names & ids.keys()}


def _from_factors(reader: GGUFReader, text: Any) -> dict[str, Any] | None:
    stored = next((tensor.data for tensor in reader.tensors if tensor.name == _FACTORS), None)
    if stored is None or np.allclose(stored, 1.0):
        return None
    factors = np.asarray(stored, np.float64).ravel()
    scaling = {"rope_type": "llama3", "factor": round(float(factors.max()), 4)} | _LLAMA3
    theta = float(text.rope_parameters["rope_theta"])
    if not np.allclose(llama3_factors(scaling, theta, 2 * len(factors)), factors, rtol=_CLOSE):
        raise ConfigError("its RoPE factors are not those of Llama 3.1; take the checkpoint as safetensors instead")
    return scaling


def llama3_factors(scaling: dict[str, Any], theta: float, head_dim: int) -> NDArray[np.float64]:
    """What each frequency is divided by, [head_dim / 2]: long waves by the factor, short ones not, a ramp between."""
    waves = 2 * math.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    smooth = np.clip((scaling["original_max_position_embeddings"] / waves - low) / (high - low), 0.0, 1.0)
    return 1.0 / ((1.0 - smooth) / scaling["factor"] + smooth)


def _from_fields(reader: GGUFReader) -> dict[str, Any] | None:
    kind = _read(reader, "rope.scaling.type")
    if kind in (None, "none"):
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": float(_read(reader, "rope.scaling.factor"))}
    if kind == "yarn":
        scaling = {"rope_type": "yarn", "factor": float(_read(reader, "rope.scaling.factor"))}
        original = _read(reader, "rope.scaling.original_context_length")
        return scaling | ({"original_max_position_embeddings": int(original)} if original else {})
    raise ConfigError(f"its RoPE scaling is {kind}, which is not known; take the checkpoint as safetensors instead")


def _read(reader: GGUFReader, name: str) -> Any:
    """A field of the file's architecture; None if it is not there."""
    return _field(reader, f"{_field(reader, 'general.architecture')}.{name}")


def _field(reader: GGUFReader, name: str) -> Any:
    field = reader.get_field(name)
    return None if field is None else field.contents()
