"""Answers as token ids in one small file, for a training on another machine, where the target computes states anew.

A file is NumPy's .npz with one array a field, compressed: two bytes a token or less, against kilobytes with hidden
states. It is read as rollouts (rollouts.py) that know how they were sampled.

    tokens       [all tokens]  uint16, or uint32 for vocabularies beyond 65,536
    lengths, prompts, firsts, held_out, temperatures, seeds    [answers]
"""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import numpy as np

from outrider.checkpoints.disk import put_in_place
from outrider.errors import ConfigError
from services.draft.learning.records.store import Reader
from services.draft.train.data.rollouts import Rollout

SUFFIX = ".npz"
_FIELDS = ("tokens", "lengths", "prompts", "firsts", "held_out", "temperatures", "seeds")


def write_compact(reader: Reader, file: Path) -> None:
    """Write all answers of a store, whole or not at all."""
    texts = [reader.tokens(i) for i in range(len(reader))]
    tokens = np.concatenate([np.zeros(0, np.uint32), *texts])
    entries = reader.entries
    small = not len(tokens) or int(tokens.max()) < 1 << 16
    fields: dict[str, Any] = {
        "tokens": tokens.astype(np.uint16 if small else np.uint32), "lengths": entries["tokens"].astype(np.uint32),
        "prompts": entries["prompt"], "firsts": entries["first"], "held_out": entries["held_out"].astype(bool),
        "temperatures": entries["temperature"], "seeds": entries["seed"],
    }  # fmt: skip
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_name(file.name + ".part")
    try:
        with part.open("wb") as stream:
            np.savez_compressed(stream, **fields)
        put_in_place(part, file)
    finally:
        part.unlink(missing_ok=True)


def read_compact(file: Path) -> list[Rollout]:
    """The answers of a file. Raises ConfigError for a file of another kind."""
    try:
        with file.open("rb") as stream, np.load(stream, allow_pickle=False) as found:
            arrays = {name: found[name] for name in _FIELDS}
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise ConfigError(f"{file} is no file of answers as --export-answers writes it: {error}") from None
    lengths = arrays["lengths"].astype(np.int64)
    ends = np.cumsum(lengths)
    counts = {name: len(array) for name, array in arrays.items() if name not in ("tokens", "lengths")}
    sound = lengths.sum() == len(arrays["tokens"]) and set(counts.values()) == {len(lengths)}
    if not sound or not ((arrays["prompts"] > 0) & (arrays["prompts"] < lengths)).all():
        raise ConfigError(f"{file} is damaged: its arrays do not fit together")
    tokens = arrays["tokens"].astype(np.uint32)
    return [
        Rollout(
            tokens[end - length : end].tobytes(), int(prompt), int(first), float(temperature), int(seed), bool(held)
        )
        for end, length, prompt, first, temperature, seed, held in zip(
            ends.tolist(), lengths.tolist(), arrays["prompts"], arrays["firsts"], arrays["temperatures"],
            arrays["seeds"], arrays["held_out"], strict=True,
        )
    ]  # fmt: skip
