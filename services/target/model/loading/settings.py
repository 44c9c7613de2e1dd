"""Whether a config.json describes the model that runs: what changes its computation is compared, the rest is not.

A configuration is read with the class of the running model's, which knows the model's settings and their defaults. No
code of the other folder is run, and keys that this class does not know cannot change what the model computes.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from outrider.checkpoints import checkpoint
from outrider.errors import ConfigError
from services.target.model.loading.support import first_line, read_settings

_TOLERANCE = 1e-6  # relative, of floats: some writers round them to 32 bits
# Settings of every model that do not affect how it computes, and those of training.
_IDLE = {
    "_name_or_path", "architectures", "transformers_version", "dtype", "torch_dtype", "use_cache", "bos_token_id",
    "pad_token_id", "sep_token_id", "decoder_start_token_id", "tokenizer_class", "task_specific_params", "problem_type",
    "id2label", "label2id", "num_labels", "return_dict", "return_dict_in_generate", "output_attentions",
    "output_hidden_states", "output_router_logits", "chunk_size_feed_forward", "pretraining_tp", "auto_map",
    "gradient_checkpointing", "attn_implementation", "_attn_implementation",
}  # fmt: skip
_TRAINING = re.compile(r"^initializer_|dropout|_pdrop$|aux_loss_coef$|jitter_noise$|z_loss")
# Compared although classes do not list them as their own.
_STORAGE = "quantization_config"
_ALWAYS = (_STORAGE, "tie_word_embeddings")
_EOS = "eos_token_id"
# Settings of rotary positions outside of `rope_parameters`, which takes precedence over them.
_ROTARY = re.compile(r"^(rope|rotary)_|^partial_rotary")
_RENAMED = {"type": "rope_type", "rope_local_base_freq": "rope_theta"}


class Difference(NamedTuple):
    """A setting with two values. name: with the names of the objects around it."""

    name: str
    other: Any
    own: Any


class RunningSettings:
    """The configuration of the model that runs."""

    def __init__(self, folder: Path, trust_remote_code: bool) -> None:
        """folder: of the running model. Raises ConfigError."""
        self._raw = checkpoint.load_json(folder / "config.json")
        self._read: Any = None
        # Only updates need the class, which `transformers` has; code of a checkpoint's own lies in its folder.
        if "model_type" not in self._raw or self._raw.get("auto_map"):
            self._read = read_settings(folder, trust_remote_code)[0]

    @property
    def _config(self) -> Any:
        """The configuration, read with the model's class."""
        if self._read is None:
            import transformers

            self._read = transformers.CONFIG_MAPPING[self._raw["model_type"]].from_dict(copy.deepcopy(self._raw))
        return self._read

    @property
    def ties_embeddings(self) -> bool:
        """True if the output layer's weight is the embedding."""
        stated = self._raw.get("tie_word_embeddings")
        return bool(self._config.to_dict().get("tie_word_embeddings") if stated is None else stated)

    def check(self, other: Mapping[str, Any], where: Path) -> None:
        """Raise ConfigError if a model with another configuration would compute otherwise.

        other: the content of a config.json. where: its folder, for the error
        """
        difference = next(self._differences(other, where), None)
        if difference is not None:
            raise ConfigError(
                f"{where}/config.json has {difference.name}: {difference.other}; the model that runs has "
                f"{difference.own}; start the target anew to change it"
            )

    def _differences(self, other: Mapping[str, Any], where: Path) -> Iterator[Difference]:
        kind = other.get("model_type", self._raw.get("model_type"))
        if kind != self._raw.get("model_type"):
            yield Difference("model_type", kind, self._raw.get("model_type"))
            return
        try:
            read = type(self._config).from_dict(copy.deepcopy(dict(other)))
        except Exception as error:  # the library raises many types for wrong values
            raise ConfigError(f"{where}/config.json cannot be used: {first_line(error)}") from None
        yield from _compare(read, self._config, other)
        yield from _overridden(other, self._raw, read, self._config)


def _compare(other: Any, own: Any, raw: Mapping[str, Any], prefix: str = "") -> Iterator[Difference]:
    """Differences of two configurations of one class. raw: what the first was read from."""
    for name in _names(other, own):
        one, two = getattr(other, name, None), getattr(own, name, None)
        if name == _EOS and (name not in raw or _set(one) == _set(two)):
            continue  # what a file does not state is the model's
        if name == _STORAGE and not one:
            continue  # plain weights: they take the place of any that can be replaced
        if hasattr(one, "to_dict") and type(one) is type(two):
            inner = raw.get(name)
            yield from _compare(one, two, inner if isinstance(inner, Mapping) else {}, f"{prefix}{name}.")
        elif not _same(_plain(one), _plain(two)):
            yield Difference(prefix + name, _plain(one), _plain(two))


def _names(other: Any, own: Any) -> list[str]:
    """The settings of a configuration that can change the computation."""
    if dataclasses.is_dataclass(own):
        names = {field.name for field in dataclasses.fields(own)}
    else:  # of a checkpoint's own code: it may read any setting
        names = set(other.to_dict()) | set(own.to_dict())
    return sorted(name for name in names | set(_ALWAYS) if name not in _IDLE and not _TRAINING.search(name))


def _overridden(other: Mapping[str, Any], own: Mapping[str, Any], read: Any, running: Any) -> Iterator[Difference]:
    """Settings of rotary positions that the class reads, but that another one overrides with a different value.

    other, own: the two files, or objects in them; read, running: the configurations that were read from them
    """
    effective = list(_leaves(_plain(getattr(read, "rope_parameters", None))))
    for name, value in other.items():
        inner, part = getattr(running, name, None), getattr(read, name, None)
        if isinstance(value, Mapping) and hasattr(inner, "to_dict"):
            mine = own.get(name)
            yield from _overridden(value, mine if isinstance(mine, Mapping) else {}, part, inner)
        if name == "rope_parameters" or not _ROTARY.search(name) or value in (None, False) or value == own.get(name):
            continue
        if _same(_plain(part), value) and _knows(running, name):
            continue  # compared with the others
        for leaf, number in _leaves(value, name):
            if not any(leaf == known and _same(number, found) for known, found in effective):
                yield Difference(name, value, _plain(getattr(running, "rope_parameters", None)))
                break


def _knows(config: Any, name: str) -> bool:
    return not dataclasses.is_dataclass(config) or name in {field.name for field in dataclasses.fields(config)}


def _leaves(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """All values of nested objects that are no objects, by their present names."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _leaves(inner, key)
    else:
        yield _RENAMED.get(name, name), value


def _plain(value: Any) -> Any:
    """A setting as JSON has it."""
    return value.to_dict() if hasattr(value, "to_dict") else value


def _set(value: Any) -> set[Any]:
    return set(value) if isinstance(value, list | tuple) else {value}


def _same(one: Any, two: Any) -> bool:
    if isinstance(one, Mapping) and isinstance(two, Mapping):
        return all(_same(one.get(name), two.get(name)) for name in one.keys() | two.keys())
    if isinstance(one, list | tuple) and isinstance(two, list | tuple):
        return len(one) == len(two) and all(map(_same, one, two))
    if isinstance(one, float) or isinstance(two, float):
        numbers = all(isinstance(value, int | float) and not isinstance(value, bool) for value in (one, two))
        return numbers and math.isclose(one, two, rel_tol=_TOLERANCE)
    return bool(one == two)
