"""Builds the STANDALONE drafter: device, number format, cache size, weights."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from outrider import checkpoint
from outrider.config import DraftConfig
from outrider.errors import ConfigError
from outrider.paging.allocator import PageAllocator
from outrider.paging.prefix import PrefixCache
from outrider.wire.v1 import common_pb2
from services.draft.drafters.standalone import StandaloneDrafter
from services.draft.model.config import ModelConfig, read_config
from services.draft.model.runner import ModelRunner
from services.draft.trunk import SCRATCH_SLOTS

log = logging.getLogger(__name__)

_DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16, "float16": jnp.float16}
# The KV cache takes this part of the memory, and no more tokens than this by itself.
_MEMORY_PART = 0.1
_DEFAULT_TOKENS = 65_536
# Tokens of a prompt a step: on a CPU, whose cost grows with every token, short steps keep the others waiting less.
_CHUNK = {"cpu": 64}
_DEFAULT_CHUNK = 256


def load_standalone(config: DraftConfig, children: int) -> tuple[StandaloneDrafter, common_pb2.ModelInfo]:
    """The drafter and the facts of its model. children: candidates a node. Raises ConfigError."""
    assert config.speculative_draft_model_path is not None
    _keep_programs()
    folder = checkpoint.resolve(config.speculative_draft_model_path)
    model = read_config(folder)
    name = _dtype_name(config)
    dtype = _DTYPES[name]
    page_size = config.draft_page_size
    total_pages = _total_pages(config, model, jnp.dtype(dtype).itemsize)
    context = min(model.context, total_pages * page_size)
    runner = ModelRunner(
        folder,
        model,
        dtype=dtype,
        total_pages=total_pages,
        page_size=page_size,
        table_pages=-(-context // page_size),
        children=min(children, model.vocab_size),
        vocab_limit=vocab_limit(folder, model),
    )
    prefix = PrefixCache(PageAllocator(total_pages, page_size), enabled=not config.disable_radix_cache)
    chunk = _CHUNK.get(jax.default_backend(), _DEFAULT_CHUNK)
    drafter = StandaloneDrafter(runner, prefix, config.max_running_requests, chunk)
    log.info(
        "%s, %s on %s, %d pages of %d tokens", model.architecture, name, jax.default_backend(), total_pages, page_size
    )
    return drafter, _describe(folder, config, model, name)


def _keep_programs() -> None:
    """Keep compiled programs beside the converted models, so that the next start-up finds them."""
    jax.config.update("jax_compilation_cache_dir", str(checkpoint.cache_folder() / "xla"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)


def vocab_limit(folder: Path, model: ModelConfig) -> int:
    """Ids from here on are padding of the embedding, which a target with the same tokenizer may lack."""
    ids = checkpoint.vocabulary(folder).values()
    return min(model.vocab_size, max(ids, default=model.vocab_size - 1) + 1)


def _dtype_name(config: DraftConfig) -> str:
    if config.draft_dtype != "auto":
        return config.draft_dtype
    return "float32" if jax.default_backend() == "cpu" else "bfloat16"


def _total_pages(config: DraftConfig, model: ModelConfig, itemsize: int) -> int:
    scratch = SCRATCH_SLOTS * config.max_running_requests
    tokens = config.draft_max_total_tokens
    if tokens is None:
        wanted = min(_DEFAULT_TOKENS, model.context * config.max_running_requests) + scratch
        tokens = min(wanted, int(_memory_bytes() * _MEMORY_PART) // model.kv_bytes(itemsize))
    pages = tokens // config.draft_page_size
    least = -(-SCRATCH_SLOTS // config.draft_page_size) + 1
    if pages < least:
        raise ConfigError(
            f"the draft's KV cache of {tokens} tokens cannot hold one session; "
            f"--draft-max-total-tokens must be {least * config.draft_page_size} or more"
        )
    return pages


def _memory_bytes() -> int:
    """Memory of the device: what the runtime says, or the machine's."""
    stats: dict[str, Any] = jax.local_devices()[0].memory_stats() or {}
    return int(stats.get("bytes_limit") or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


def _describe(folder: Path, config: DraftConfig, model: ModelConfig, dtype: str) -> common_pb2.ModelInfo:
    assert config.speculative_draft_model_path is not None
    return common_pb2.ModelInfo(
        model_path=checkpoint.display_name(config.speculative_draft_model_path),
        fingerprint=checkpoint.fingerprint(folder),
        architecture=model.architecture,
        vocab_size=model.vocab_size,
        vocab_hash=checkpoint.vocab_hash(folder),
        context_length=model.context,
        dtype=dtype,
    )
