"""The description of a GGUF file without `transformers`, which needs most of a first start for its import and for large
vocabularies. For the dense decoders that Outrider reads by itself, with byte-level vocabularies.

The files are those that `transformers` writes, but for "<|endoftext|>", which it adds to vocabularies without it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence, Set
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from gguf import GGUFReader
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from services.target.model.gguf import metadata, pretokenizers
from services.target.model.gguf.metadata import field

_CLASSES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
_TOKENIZERS = {"llama": "TokenizersBackend", "qwen2": "Qwen2Tokenizer", "qwen3": "Qwen2Tokenizer"}
# Keys of the configuration by those of the file, behind the architecture's name.
_NUMBERS = {
    "context_length": "max_position_embeddings", "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size", "embedding_length": "hidden_size",
    "attention.head_count": "num_attention_heads", "attention.head_count_kv": "num_key_value_heads",
}  # fmt: skip
# What the classes have where a file has no key for it.
_EVERY: dict[str, Any] = {"attention_dropout": 0.0, "hidden_act": "silu", "initializer_range": 0.02, "use_cache": True}
_LLAMA: dict[str, Any] = {"attention_bias": False, "mlp_bias": False, "pretraining_tp": 1}
_QWEN: dict[str, Any] = {"max_window_layers": 28, "sliding_window": None, "use_sliding_window": False}
_QWEN3_HEAD = 128
_CONTROL, _USER_DEFINED = 3, 4  # types of tokens
_SPACE = "\u2581"  # in pieces
_NO_LIMIT = int(1e30)  # how tokenizers say that they limit no text


class Unknown(Exception):
    """The file is not one that is described here; the message has the reason."""


def describe(reader: GGUFReader, folder: Path) -> str | None:
    """Write the configuration, the tokenizer and the settings of generation into a new folder.

    Returns a warning for the user, or None. Raises Unknown before anything is written, and ConfigError.
    """
    config = _config(reader)
    made = _tokenizer(reader, config["model_type"])
    generation = {
        "_from_model_config": True, "output_attentions": False, "output_hidden_states": False, "use_cache": True,
        "eos_token_id": sorted({config["eos_token_id"], *metadata.end_token_ids(reader)}),
    }  # fmt: skip
    generation |= {name: config[name] for name in ("bos_token_id", "pad_token_id") if config[name] is not None}
    folder.mkdir(parents=True)
    _write(folder / "config.json", config)
    _write(folder / "generation_config.json", generation)
    return _write_tokenizer(reader, made, folder)


def write_tokenizer(reader: GGUFReader, kind: str, folder: Path) -> str | None:
    """Write the tokenizer alone, of a model of this kind (`model_type`), as `describe` does."""
    return _write_tokenizer(reader, _tokenizer(reader, kind), folder)


class _Made(NamedTuple):
    """A tokenizer, the content of its tokenizer_config.json, and a warning for the user if there is one."""

    tokenizer: Tokenizer
    settings: dict[str, Any]
    warning: str | None


def _write_tokenizer(reader: GGUFReader, made: _Made, folder: Path) -> str | None:
    _write(folder / "tokenizer_config.json", made.settings)
    made.tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    if (template := field(reader, "tokenizer.chat_template")) is not None:
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    return made.warning


def _write(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")


def _config(reader: GGUFReader) -> dict[str, Any]:
    """The configuration, as of `transformers`."""
    kind, name = field(reader, "general.architecture"), field(reader, "general.name")
    if kind not in _CLASSES or name == "mistral":
        raise Unknown(f"its architecture is {kind}")
    found: dict[str, Any] = {"model_type": kind, "architectures": [_CLASSES[kind]], "dtype": "bfloat16"} | _EVERY
    found |= _LLAMA if kind == "llama" else _QWEN
    for theirs, ours in _NUMBERS.items():
        found[ours] = _number(reader, f"{kind}.{theirs}", int)
    found["rms_norm_eps"] = _number(reader, f"{kind}.attention.layer_norm_rms_epsilon", float)
    if name is not None:
        found["_model_name_or_path"] = name
    tokens = field(reader, "tokenizer.ggml.tokens") or ()
    found["vocab_size"] = field(reader, f"{kind}.vocab_size") or len(tokens)
    for ours, theirs in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"), ("unk", "unknown")):
        found[f"{ours}_token_id"] = field(reader, f"tokenizer.ggml.{theirs}_token_id")
    if found["eos_token_id"] is None or (kind == "llama" and found["bos_token_id"] is None):
        raise Unknown("its classes have special tokens of their own")
    if found["unk_token_id"] is None:
        del found["unk_token_id"]
    found["tie_word_embeddings"] = all(tensor.name != "output.weight" for tensor in reader.tensors)
    base = field(reader, f"{kind}.rope.freq_base")
    found["rope_parameters"] = {"rope_theta": 10000.0 if base is None else float(base), "rope_type": "default"}
    if kind == "llama":
        width = found["hidden_size"] // found["num_attention_heads"]
        found["head_dim"] = field(reader, "llama.rope.dimension_count") or width
    else:
        found["layer_types"] = ["full_attention"] * found["num_hidden_layers"]
    if kind == "qwen3":
        found |= {"head_dim": _QWEN3_HEAD, "attention_bias": False}
    config = SimpleNamespace(**found)
    config.get_text_config = lambda: config
    metadata.apply(reader, config)
    del config.get_text_config
    return vars(config)


def _number(reader: GGUFReader, key: str, kind: type) -> Any:
    value = field(reader, key)
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise Unknown(f"its {key} is {value!r:.40}")
    return kind(value)


def _tokenizer(reader: GGUFReader, kind: str) -> _Made:
    if kind not in _TOKENIZERS:
        raise Unknown(f"its architecture is {kind}")
    tokens, types = field(reader, "tokenizer.ggml.tokens"), field(reader, "tokenizer.ggml.token_type") or ()
    model = field(reader, "tokenizer.ggml.model")
    if not tokens or metadata.chat_templates(reader):
        raise Unknown("it has several chat templates, or no tokenizer")
    if model == "gpt2":
        bare = _byte_level(reader, tokens)
    elif model == "llama" and kind == "llama":
        bare = _sentencepiece(reader, tokens)
    else:
        raise Unknown(f"its tokenizer is of the kind {model}")
    made = bare.tokenizer
    control = [token for token, of in zip(tokens, types, strict=False) if of == _CONTROL and token in bare.names]
    made.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in control])
    plain = [token for token, of in zip(tokens, types, strict=False) if of == _USER_DEFINED and token in bare.names]
    made.add_tokens([AddedToken(token, normalized=False, special=False) for token in plain])
    settings = _settings(reader, kind, tokens)
    named = [*bare.special, *(settings[name] for name in _SPECIAL if settings[name] is not None)]
    made.add_special_tokens([AddedToken(token, special=True) for token in named if token not in {*control, *plain}])
    made.post_processor = _around(reader, settings, made, begins=bare.begins)
    return _Made(made, settings, bare.warning)


class _Bare(NamedTuple):
    """A tokenizer without added tokens.

    names: tokens that its vocabulary has as the file spells them; special: those that are special in any case
    begins: texts begin with a token unless the file denies it. warning: for the user, or None
    """

    tokenizer: Tokenizer
    names: Set[str]
    special: Sequence[str] = ()
    begins: bool = False
    warning: str | None = None


def _byte_level(reader: GGUFReader, tokens: list[str]) -> _Bare:
    merges = field(reader, "tokenizer.ggml.merges")
    split = pretokenizers.of_name(field(reader, "tokenizer.ggml.pre"))
    if merges is None or split is None:
        raise Unknown("its texts are split in another way")
    spelling = _bytes_to_letters()
    alphabet = set(spelling.values())
    names = {token for token in tokens if alphabet.issuperset(token)}
    vocab = {token if token in names else "".join(spelling[byte] for byte in token.encode()): index
             for index, token in enumerate(tokens)}  # fmt: skip
    pairs = [tuple(merge.split(" ")) for merge in merges]
    whole_words = metadata.words_are_whole(reader)
    made = Tokenizer(models.BPE(vocab=vocab, merges=pairs, continuing_subword_prefix="", end_of_word_suffix="",
                                fuse_unk=False, ignore_merges=whole_words))  # fmt: skip
    made.pre_tokenizer, made.decoder = split.steps, decoders.ByteLevel()
    return _Bare(made, names, begins=whole_words, warning=split.warning)


def _sentencepiece(reader: GGUFReader, tokens: list[str]) -> _Bare:
    """Of pieces with scores, from which the merges follow: two pieces become one the earlier, the higher its score."""
    vocab = {token: index for index, token in enumerate(tokens)}
    stated, scores = field(reader, "tokenizer.ggml.merges"), field(reader, "tokenizer.ggml.scores")
    if stated is None and scores is None:
        raise Unknown("its pieces have no scores")
    if stated is not None:
        pairs = [tuple(merge.split(" ")) for merge in stated]
    else:
        halves = [(left, right, score) for piece, score in dict(zip(tokens, scores, strict=True)).items()
                  for left, right in _halves(piece, vocab)]  # fmt: skip
        halves.sort(key=lambda half: (half[2], len(half[0]), len(half[1])), reverse=True)
        pairs = [half[:2] for half in halves]
    made = Tokenizer(models.BPE(vocab=vocab, merges=pairs, fuse_unk=True, byte_fallback=True))
    made.pre_tokenizer = pre_tokenizers.Metaspace(replacement=_SPACE, prepend_scheme="first", split=False)
    made.decoder = decoders.Sequence([
        decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(content=" ", left=1),
    ])  # fmt: skip
    special = [token for token in ("<unk>", "<s>", "</s>") if token in vocab]
    return _Bare(made, vocab.keys(), special, begins=True)


def _halves(piece: str, vocab: Mapping[str, int]) -> list[tuple[str, str]]:
    """How a piece divides into two others, by their ids."""
    ways = [(piece[:end], piece[end:]) for end in range(1, len(piece))]
    return sorted(
        (way for way in ways if way[0] in vocab and way[1] in vocab), key=lambda way: (vocab[way[0]], vocab[way[1]])
    )


_SPECIAL = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


def _settings(reader: GGUFReader, kind: str, tokens: list[str]) -> dict[str, Any]:
    """The content of tokenizer_config.json."""
    found: dict[str, Any] = {"backend": "tokenizers", "is_local": True, "local_files_only": False,
                             "model_max_length": _NO_LIMIT, "tokenizer_class": _TOKENIZERS[kind]}  # fmt: skip
    for ours, theirs in _SPECIAL.items():
        index = field(reader, f"tokenizer.ggml.{theirs}_token_id")
        found[ours] = None if index is None else tokens[index]
    return found


def _around(
    reader: GGUFReader, settings: Mapping[str, Any], tokenizer: Tokenizer, *, begins: bool
) -> processors.TemplateProcessing:
    """What adds the first and the last token of a text. begins: texts do, with a token, unless the file denies it."""
    stated = {name: field(reader, f"tokenizer.ggml.add_{name}_token") for name in ("bos", "eos")}
    if stated["bos"] is None:
        stated["bos"] = begins
    first, last = (settings[f"{name}_token"] if adds else None for name, adds in stated.items())

    def around(text: str, part: int) -> list[str]:
        begin = [] if first is None else [f"{first}:{part}"]
        return [*begin, f"{text}:{part}", *([] if last is None else [f"{last}:{part}"])]

    single = around("$A", 0)
    special = [(token, tokenizer.token_to_id(token)) for token in (first, last) if token is not None]
    return processors.TemplateProcessing(single=single, pair=single + around("$B", 1), special_tokens=special)


def _bytes_to_letters() -> dict[int, str]:
    """How byte-level vocabularies spell each byte: printable ones as they are, others by letters from 256 on."""
    kept = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = {byte: chr(256 + i) for i, byte in enumerate(byte for byte in range(256) if byte not in kept)}
    return {byte: others.get(byte, chr(byte)) for byte in range(256)}
