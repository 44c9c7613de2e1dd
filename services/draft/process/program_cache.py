"""Compiled programs are cached on disk, for the next start-up. Torn ones are removed before JAX finds them.

JAX writes an entry in place. A full disk, or the end of the process, leaves a part of it, which JAX then reports and
compiles anew at every start, because it never replaces an entry.
"""

from __future__ import annotations

import importlib
import logging
import zlib
from pathlib import Path
from typing import Any

import jax

log = logging.getLogger(__name__)

_ZSTD = b"\x28\xb5\x2f\xfd"  # the first bytes of an entry that zstandard compressed
_MIN_SECONDS = 0.2  # of compilation, for a program that is cached


def cache_programs(folder: Path) -> None:
    """Cache compiled programs in a folder, from now on."""
    for entry in sorted(folder.glob("*-cache")):
        try:
            if not _is_whole(entry.read_bytes()):
                log.warning("%s is torn, so its program is compiled again; is the disk full?", entry)
                entry.unlink()
        except OSError as error:  # JAX compiles what it cannot read
            log.warning("%s cannot be checked: %s", entry, error.strerror)
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", _MIN_SECONDS)


def _is_whole(content: bytes) -> bool:
    """True if a compressed entry ends where it should, with the right checksum if it has one."""
    if content.startswith(_ZSTD):
        try:
            zstandard = importlib.import_module("zstandard")
        except ImportError:  # JAX cannot read it either
            return True
        decompressor: Any = zstandard.ZstdDecompressor().decompressobj()
        errors: type[Exception] = zstandard.ZstdError
    else:
        decompressor, errors = zlib.decompressobj(), zlib.error
    try:
        decompressor.decompress(content)
    except errors:
        return False
    return bool(decompressor.eof)
