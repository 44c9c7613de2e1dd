"""The record of a GGUF file, in the folder that describes its model: where the weights are, and what they are.

A description has everything of a converted model but weights: config.json, tokenizer.json, chat templates. A process
that reads the weights from the GGUF file itself needs no more, and parses no header: the record lists the tensors.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

from outrider.errors import ConfigError

RECORD = "gguf.json"


@dataclass(frozen=True)
class GgufTensor:
    """A tensor in a GGUF file. kind: type, by llama.cpp's name; shape: rows first; start: of its bytes in the file."""

    kind: str
    shape: tuple[int, ...]
    start: int
    bytes: int

    @property
    def numbers(self) -> int:
        """Numbers in it."""
        return prod(self.shape)


@dataclass(frozen=True)
class GgufRecord:
    """A GGUF file. content: hash of samples of it; architecture: by llama.cpp's name; tensors: by llama.cpp's names."""

    file: Path
    size: int
    content: str
    architecture: str
    tensors: Mapping[str, GgufTensor]

    def check(self) -> None:
        """Raise ConfigError if the file is gone, or has another size."""
        found = self.file.stat().st_size if self.file.is_file() else None
        if found != self.size:
            what = "is gone" if found is None else f"has {found} bytes instead of {self.size}"
            raise ConfigError(f"{self.file} {what}, so its weights cannot be read; start again with the file as it was")


def write_record(folder: Path, record: GgufRecord) -> None:
    """Write the record into a description's folder."""
    tensors = {name: [one.kind, one.shape, one.start, one.bytes] for name, one in record.tensors.items()}
    facts = {"file": str(record.file), "bytes": record.size, "content": record.content,
             "architecture": record.architecture, "tensors": tensors}  # fmt: skip
    (folder / RECORD).write_text(json.dumps(facts) + "\n", encoding="utf-8")


def read_record(folder: Path) -> GgufRecord | None:
    """The record of a description's folder; None for any other folder. Raises ConfigError for a damaged one."""
    try:
        facts = json.loads((folder / RECORD).read_text(encoding="utf-8"))
        tensors = {name: GgufTensor(str(kind), tuple(shape), int(start), int(size))
                   for name, (kind, shape, start, size) in facts["tensors"].items()}  # fmt: skip
        return GgufRecord(Path(facts["file"]), facts["bytes"], facts["content"], facts["architecture"], tensors)
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError(
            f"{folder / RECORD} cannot be used: {error!r:.200}; delete {folder} and start again"
        ) from None
