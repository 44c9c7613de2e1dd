"""Which checkpoints are supported: by their configuration before a tensor is read, and which tensors may be unused.

Every error names what is wrong and what to do. `transformers` is imported by the functions that need it, because the
dense decoders (services/target/model/dense) do without.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from outrider.checkpoints import checkpoint
from outrider.checkpoints.sizes import is_mtp_tensor
from outrider.errors import ConfigError
from outrider.text.special import special_tokens

_LAYER_TYPES = ("full_attention", "sliding_attention")
# Divisors of an activation's output in AWQ checkpoints of models without a weight to fold them into, as StarCoder2.
_DIVIDED = re.compile(r"\.(act|gelu_impl)\.(scales|weight)$")


def read_settings(folder: Path, trust_remote_code: bool) -> tuple[Any, bool]:
    """The configuration of a folder, and whether its model runs code that comes with it. Raises ConfigError."""
    import transformers

    content = checkpoint.load_json(folder / "config.json")
    remote = _needs_own_code(content)
    if remote:
        _check_own_code(folder, content["auto_map"], trust_remote_code)
    try:
        settings = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=remote, local_files_only=True)
    except Exception as error:
        raise ConfigError(f"{folder}/config.json cannot be used: {first_line(error)}") from error
    _check_kind(folder, settings, remote)
    _check_layers(folder, settings)
    return settings, remote


def auto_class(settings: Any) -> Any:
    """The class of `transformers` that loads a model; a model with image inputs is served as a text model."""
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    text = settings.model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES or "AutoModelForCausalLM" in (
        getattr(settings, "auto_map", None) or {}
    )
    return transformers.AutoModelForCausalLM if text else transformers.AutoModelForImageTextToText


def check_vocabulary(folder: Path, vocab_size: int) -> None:
    """Raise ConfigError if the folder's tokenizer has tokens beyond the model's vocabulary.

    Added tokens for features that the model does not have, such as images, may be beyond it.
    """
    file = folder / "tokenizer.json"
    if not file.is_file():
        return
    stored = checkpoint.stored_vocabulary(folder)
    if stored is not None and stored.largest < vocab_size:
        return
    outside = [token for token, i in checkpoint.vocabulary(folder).items() if i >= vocab_size]
    if outside:
        added = {entry["content"] for entry in checkpoint.load_json(file).get("added_tokens", [])}
        outside = [token for token in outside if token not in added]
    if outside:
        raise ConfigError(
            f"{folder}: tokenizer.json has {len(outside)} tokens past the model's vocabulary of {vocab_size}, such as "
            f'"{outside[0]}"; it belongs to another model: put the right tokenizer beside the weights'
        )


def tokenizer_eos(folder: Path) -> int | None:
    """The end-of-sequence id of the folder's tokenizer; None if it has none."""
    files = (folder / "tokenizer_config.json", folder / "special_tokens_map.json")
    settings, beside = (checkpoint.load_json(file) if file.is_file() else {} for file in files)
    token = special_tokens(settings, beside).get("eos_token")
    if token is None:
        return None
    stored = checkpoint.stored_vocabulary(folder)
    known = None if stored is None else stored.special.get(token)
    return checkpoint.vocabulary(folder).get(token) if known is None else known


def known_ids(own: Any, tokenizer: int | None, vocab_size: int) -> tuple[int, ...]:
    """The end-of-sequence ids of a model and of its tokenizer, where chat models often have the end of a turn only.

    own: one id, several, or None. Ids outside of the vocabulary, such as -1 for none, are dropped.
    """
    ids = [*(own if isinstance(own, list | tuple) else [own]), tokenizer]
    known = dict.fromkeys(int(token) for token in ids if token is not None)
    return tuple(token for token in known if 0 <= token < vocab_size)


def unexpected(names: Iterable[str], settings: Any) -> list[str]:
    """The unused tensors, without those of multi-token-prediction layers, which follow the model's own layers."""
    text = settings.get_text_config()
    drafting = getattr(text, "num_nextn_predict_layers", None) or 0
    return sorted(name for name in names if not is_mtp_tensor(name, text.num_hidden_layers, drafting))


def check_spare(folder: Path, spare: Iterable[str]) -> None:
    """Raise ConfigError for unused tensors that change the text."""
    divided = next(filter(_DIVIDED.search, spare), None)
    if divided is not None:
        raise ConfigError(
            f"{folder}: {divided} scales what an activation gives, which is not supported with unpacked AWQ weights; "
            "choose a checkpoint that is not quantized"
        )


def first_line(error: Exception) -> str:
    """The first line of an error's text that is not blank."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def _needs_own_code(content: dict[str, Any]) -> bool:
    """True if a checkpoint needs its own code, because `transformers` does not know its model."""
    if "AutoModelForCausalLM" not in (content.get("auto_map") or {}):
        return False
    import transformers

    known = content.get("model_type") in transformers.CONFIG_MAPPING
    return not (known and all(hasattr(transformers, name) for name in content.get("architectures") or ()))


def _check_own_code(folder: Path, auto_map: dict[str, str], trusted: bool) -> None:
    names = {f"{reference.split('.')[0]}.py" for reference in auto_map.values() if isinstance(reference, str)}
    if not trusted:
        raise ConfigError(
            f"{folder} brings code of its own for its model ({', '.join(sorted(names))}); "
            "read it, and if you trust it, add --trust-remote-code"
        )
    missing = sorted(name for name in names if "--" not in name and not (folder / name).is_file())
    if missing:
        raise ConfigError(f"{folder} lacks {', '.join(missing)}, which its config.json names; download it again")


def _check_kind(folder: Path, settings: Any, remote: bool) -> None:
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    )

    if getattr(settings, "is_encoder_decoder", False):
        raise ConfigError(
            f"{folder}: {settings.model_type} is an encoder-decoder model, which is not supported; "
            "choose a decoder-only model, such as a Llama or a Qwen"
        )
    known = settings.model_type in (*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)
    if not remote and not known:
        raise ConfigError(
            f"{folder}: {settings.model_type} is no model that continues text (transformers has no causal LM for it); "
            "choose a causal language model"
        )


def _check_layers(folder: Path, settings: Any) -> None:
    text = settings.get_text_config()
    kinds = list(getattr(text, "layer_types", None) or ())
    unsupported = sorted(set(kinds) - set(_LAYER_TYPES))
    if unsupported:
        count = sum(kind in unsupported for kind in kinds)
        raise ConfigError(
            f"{folder}: {count} of {len(kinds)} layers are of type {', '.join(unsupported)}, which is not supported: "
            "only full and sliding-window attention can verify a tree of drafts; choose a model with these alone"
        )
    if getattr(text, "num_kv_shared_layers", 0):
        raise ConfigError(
            f"{folder}: {text.num_kv_shared_layers} layers share keys and values with others, which is not supported; "
            "choose a model whose layers have their own"
        )
