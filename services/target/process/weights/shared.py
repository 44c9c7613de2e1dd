"""The weights that drafts share with the target, kept for them while it runs: embedding, head and MTP layers.

Of tensors that arrive, the target keeps copies of those that drafts name; a folder is read again when a draft asks.
Packed and quantized weights could not be read back, and the model has no MTP layers at all.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from outrider.errors import ConfigError
from services.target.model.loading.updates import DTYPES, CheckpointFolder

PART_BYTES = 1 << 20
_LETTERS = {dtype: letters for letters, dtype in DTYPES.items()}


class SharedTensor(NamedTuple):
    """A tensor that is read when it is sent. dtype: as safetensors names it."""

    dtype: str
    shape: tuple[int, ...]
    read: Callable[[], Tensor]

    @property
    def nbytes(self) -> int:
        """Its size, in bytes."""
        return DTYPES[self.dtype].itemsize * prod(self.shape)


class SharedWeights:
    """Present weights by name. Methods but `find` are called in the engine thread, around an update."""

    def __init__(self, tied: Mapping[str, str]) -> None:
        """tied: second names of some tensors."""
        self._tied = tied
        self._folder: CheckpointFolder | None = None
        self._kept: Mapping[str, Tensor] = {}  # by the model's names; replaced as a whole, never changed
        self._digests: dict[str, bytes] = {}
        self._replaced: set[str] = set()  # by tensors, kept or not
        self.fingerprint = ""

    def took_folder(self, folder: CheckpointFolder) -> None:
        """All weights are those of a folder."""
        self._folder, self._kept, self._digests, self._replaced = folder, {}, {}, set()
        self.fingerprint = folder.fingerprint

    def copies(self, tensors: Mapping[str, Tensor], wanted: Collection[str]) -> dict[str, Tensor]:
        """Copies of those that drafts share: tensors may be parts of a whole update, or lie in the trainer's memory.

        wanted: names that drafts have for theirs
        """
        own = {self._tied.get(name, name) for name in wanted} & tensors.keys()
        return {name: tensors[name].clone() for name in own}

    def took_tensors(self, copies: Mapping[str, Tensor], digests: Mapping[str, bytes]) -> None:
        """Some weights have come. copies: those that are kept; digests: of all of them."""
        self._replaced |= digests.keys()
        if not self._replaced:
            return
        self._kept = {**self._kept, **copies}
        self._digests |= {name: digests[name] for name in copies}
        digest = hashlib.sha256(b"" if self._folder is None else self._folder.fingerprint.encode())
        for name, content in sorted(self._digests.items()):
            digest.update(f"\0{name}\0".encode() + content)
        self.fingerprint = digest.hexdigest()[:16]

    def find(self, names: Collection[str]) -> dict[str, SharedTensor]:
        """The tensors of these names that updates have replaced. Raises ConfigError for one that was not kept."""
        found: dict[str, SharedTensor] = {}
        entries = {} if self._folder is None else self._folder.entries
        for name in names:
            own = self._tied.get(name, name)
            if own in self._replaced and own not in self._kept:
                raise ConfigError(f"the target kept no copy of {name}, because no draft shared it; send it again")
            if (kept := self._kept.get(own)) is not None:
                found[name] = SharedTensor(_LETTERS[kept.dtype], tuple(kept.shape), partial(_same, kept))
                continue
            stored = name if name in entries else own
            if stored in entries and entries[stored].dtype in DTYPES:
                assert self._folder is not None
                reader = self._folder.tensors({stored: stored})
                found[name] = SharedTensor(
                    entries[stored].dtype, entries[stored].shape, partial(reader.__getitem__, stored)
                )
        return found


def _same(tensor: Tensor) -> Tensor:
    return tensor


def header_of(tensors: Mapping[str, SharedTensor]) -> bytes:
    """The beginning of a safetensors file in which these tensors follow one another."""
    header, end = {}, 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.nbytes
        header[name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [start, end]}
    content = json.dumps(header).encode()
    return struct.pack("<Q", len(content)) + content


def parts_of(tensor: Tensor) -> Iterator[bytes]:
    """The bytes of a tensor, in parts."""
    content = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data
    for start in range(0, len(content), PART_BYTES):
        yield bytes(content[start : start + PART_BYTES])
