"""GGUF metadata that `transformers` ignores, copied to the model's configuration; without it the text would differ.

RoPE: its base and rotary dimension; a factor for every frequency, which Llama 3.1 and successors store as a tensor, and
Phi-3 as two; linear or YaRN scaling as fields. Head dimensions, windows, soft caps and expert sizes, which some
architectures state. Also values that no file states: the scale of Gemma's queries, which is known by model size, and
all end-of-sequence tokens, which are known by name.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from gguf import GGUFReader
from numpy.typing import NDArray

from outrider.errors import ConfigError

_FACTORS = "rope_freqs.weight"
_SHORT, _LONG = "rope_factors_short.weight", "rope_factors_long.weight"
_FACTS = {_FACTORS, _SHORT, _LONG, "output.weight"}  # the last is a head where one is tied in any case
# Fields that become attributes of configurations that have them, but are read for few architectures or none.
_ATTRIBUTES = {
    "attention.sliding_window": "sliding_window", "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping", "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
}  # fmt: skip
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
_CLOSE = 1e-3
_TEMPLATE = "tokenizer.chat_template"
# The layers of those Gemmas (27B) whose queries are scaled by the model's width a head, not by the head's.
_LARGEST_GEMMA = {"gemma2": 46, "gemma3_text": 62}
# Tokens that end a turn or a text wherever they are in a vocabulary, as llama.cpp has it: files state one, and for
# Gemma and Phi-3 that is often not the one that ends a turn.
_ENDS = {
    "<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<end_of_turn>", "<|endoftext|>",
    "<|end_of_text|>", "<EOT>", "_<EOT>", "[EOT]", "<end_of_utterance>",
}  # fmt: skip
# Ways of splitting texts, as files name them, of tokenizers that begin texts with a token unless the file denies it,
# and whose words are tokens wherever there are such, merges or not; llama.cpp knows both by these names alone.
_WHOLE = {
    "llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "jina-v5-nano", "tekken",
}  # fmt: skip
_HARMONY = {"<|return|>", "<|call|>"}  # where there are both, <|end|> ends a part of an answer alone


def apply(reader: GGUFReader, config: Any) -> None:
    """Complete a configuration from its file. Raises ConfigError if the text would still differ."""
    parts = field(reader, "split.count")
    if parts and parts > 1:
        raise ConfigError(f"it is one of {parts} parts of a model; join them with `llama-gguf-split --merge`")
    text = config.get_text_config()
    for name, attribute in _ATTRIBUTES.items():
        value = _read(reader, name)
        if value is not None and hasattr(text, attribute) and not isinstance(value, list):
            setattr(text, attribute, value or None)  # 0 is none
    head_dim = _read(reader, "attention.key_length")
    if head_dim is not None and _head_dim(text) != head_dim:
        text.head_dim = head_dim
    if text.model_type in _LARGEST_GEMMA:
        largest = text.num_hidden_layers == _LARGEST_GEMMA[text.model_type]
        text.query_pre_attn_scalar = text.hidden_size // text.num_attention_heads if largest else text.head_dim
    parameters = getattr(text, "rope_parameters", None)
    if parameters is None:
        return
    nested = "full_attention" in parameters  # layers with a window have their own
    if not nested:
        parameters |= _turning(reader, text)
    scaling = _from_factors(reader, text) or _from_two_factors(reader, text) or _from_fields(reader)
    if scaling is not None:
        (parameters["full_attention"] if nested else parameters).update(scaling)


def _head_dim(text: Any) -> int | None:
    own: int | None = getattr(text, "head_dim", None)
    heads = getattr(text, "num_attention_heads", None)
    return own or (text.hidden_size // heads if heads else None)


def _turning(reader: GGUFReader, text: Any) -> dict[str, Any]:
    """RoPE's base and rotary dimension. Raises ConfigError if the architecture does not support the dimension."""
    base, turned = _read(reader, "rope.freq_base"), _read(reader, "rope.dimension_count")
    found: dict[str, Any] = {} if base is None else {"rope_theta": float(base)}
    if turned is None or hasattr(text, "rotary_dim"):
        return found
    if "partial_rotary_factor" in text.rope_parameters:
        return found | {"partial_rotary_factor": turned / _head_dim(text)}
    if turned != _head_dim(text):
        raise ConfigError(
            f"its RoPE rotates {turned} of {_head_dim(text)} numbers of a head, unlike {text.model_type}; "
            "take the checkpoint as safetensors instead"
        )
    return found


def end_token_ids(reader: GGUFReader) -> set[int]:
    """End-of-sequence ids: those that the file states, and those of known tokens."""
    stated = {field(reader, f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")} - {None}
    ids = {token: i for i, token in enumerate(field(reader, "tokenizer.ggml.tokens") or ())}
    names = _ENDS - {"<|end|>"} if ids.keys() >= _HARMONY else _ENDS
    return {int(token) for token in stated} | {ids[name] for name in names & ids.keys()}


def words_are_whole(reader: GGUFReader) -> bool:
    """True for tokenizers like Llama 3's: words that are tokens stay whole, and texts begin with a token."""
    return field(reader, "tokenizer.ggml.pre") in _WHOLE


def chat_templates(reader: GGUFReader) -> dict[str, str]:
    """Chat templates by name, where a file has more than the one for all conversations, which is "default"."""
    names = {name.removeprefix(_TEMPLATE): name for name in reader.fields if name.startswith(_TEMPLATE + ".")}
    others = {name.removeprefix("."): field(reader, whole) for name, whole in names.items()}
    default = field(reader, _TEMPLATE)
    return others | ({} if default is None else {"default": default}) if others else {}


def _tensor(reader: GGUFReader, name: str) -> NDArray[np.float64] | None:
    """The numbers of a small tensor, in a row."""
    stored = next((tensor.data for tensor in reader.tensors if tensor.name == name), None)
    return None if stored is None else np.asarray(stored, np.float64).ravel()


def _from_factors(reader: GGUFReader, text: Any) -> dict[str, Any] | None:
    factors = _tensor(reader, _FACTORS)
    if factors is None or np.allclose(factors, 1.0):
        return None
    scaling = {"rope_type": "llama3", "factor": round(float(factors.max()), 4)} | _LLAMA3
    theta = float(text.rope_parameters["rope_theta"])
    if not np.allclose(llama3_factors(scaling, theta, 2 * len(factors)), factors, rtol=_CLOSE):
        raise ConfigError("its RoPE factors are not those of Llama 3.1; take the checkpoint as safetensors instead")
    return scaling


def _from_two_factors(reader: GGUFReader, text: Any) -> dict[str, Any] | None:
    """Phi-3's, for texts as long as it was first trained on, and for longer ones."""
    short, long = _tensor(reader, _SHORT), _tensor(reader, _LONG)
    if short is None or long is None:
        return None
    scaling = {"rope_type": "longrope", "short_factor": short.tolist(), "long_factor": long.tolist()}
    original, attention = (_read(reader, f"rope.scaling.{name}") for name in ("original_context_length", "attn_factor"))
    if original:
        scaling["original_max_position_embeddings"] = text.original_max_position_embeddings = int(original)
    return scaling | ({"attention_factor": float(attention)} if attention else {})


def llama3_factors(scaling: dict[str, Any], theta: float, head_dim: int) -> NDArray[np.float64]:
    """Divisors of the frequencies, [head_dim / 2]: the factor for long wavelengths, 1 for short ones, else a ramp."""
    wavelengths = 2 * math.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    smooth = np.clip((scaling["original_max_position_embeddings"] / wavelengths - low) / (high - low), 0.0, 1.0)
    factors: NDArray[np.float64] = 1.0 / ((1.0 - smooth) / scaling["factor"] + smooth)
    return factors


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


def unread(reader: GGUFReader, model: Any) -> list[str]:
    """Tensors of a file that a model loaded from it does not use, except those that this module reads."""
    from transformers import modeling_gguf_pytorch_utils

    files: Any = modeling_gguf_pytorch_utils

    architecture = field(reader, "general.architecture")
    processor = files.TENSOR_PROCESSORS.get(architecture, files.TensorProcessor)(config={})
    used = files.get_gguf_hf_weights_map(model, processor).keys() | _FACTS
    names = (tensor.name for tensor in reader.tensors)  # experts stand in the map without the end of their names
    return sorted(name for name in names if name not in used and name.removesuffix(".weight") not in used)


def _read(reader: GGUFReader, name: str) -> Any:
    """A field of the file's architecture; None if it is not there."""
    return field(reader, f"{field(reader, 'general.architecture')}.{name}")


def field(reader: GGUFReader, name: str) -> Any:
    """A field of the file by its whole name; None if it is not there."""
    found = reader.get_field(name)
    return None if found is None else found.contents()
