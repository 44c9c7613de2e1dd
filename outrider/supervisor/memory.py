"""The memory plan of `outrider serve`, before a process runs: what a draft on the target's device needs, and the rest.

    own_device(target, draft)     the draft's configuration, on a GPU that the target does not use, if there is one
    share_device(target, draft)   their configurations, with the flags by which they share a device
    plan_of(target, draft)        the target's plan, as its log will have it but for what only loading shows
    plan_gpu, draft_need          the same from sizes alone, without a checkpoint and a GPU

They read config.json and the headers of weight files on this machine; none downloads, converts or loads anything.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from dataclasses import replace

from outrider.checkpoints import checkpoint
from outrider.checkpoints.sizes import ITEMSIZES, CheckpointSizes, ModelSizes
from outrider.config import (
    BUILT_IN_ALGORITHMS,
    FED_ALGORITHMS,
    MODEL_ALGORITHMS,
    DraftConfig,
    DraftOptions,
    TargetConfig,
    TargetOptions,
)
from outrider.config.ranks import rank_places
from outrider.errors import ConfigError
from outrider.placement.devices import free_host_memory, gpu_memory, gpus, has_gpu
from outrider.placement.memory import (
    HEAD_HEADROOM,
    STANDALONE_HEADROOM,
    DraftHeadroom,
    MemoryPlan,
    cache_flags,
    draft_cache_tokens,
    draft_headroom,
    plan_device,
    plan_host,
)
from outrider.placement.step_sizes import step_sizes
from outrider.supervisor.ranks import check_division

_JAX_PLUGINS = ("jax_cuda12_plugin", "jax_cuda13_plugin")
_GPU_NAMES = ("cuda", "gpu")


def plan_of(
    target: TargetConfig, draft: DraftConfig | None, total: int | None = None, taken: int = 0
) -> MemoryPlan | None:
    """The memory plan of the target; None where its checkpoint, or its GPU's memory, is not known on this machine.

    The configurations are those of `share_device`. total: memory of the target's device, for another machine than this
    one; default as the driver reports it. taken: by other programs. Raises ConfigError if the KV cache has no room.
    """
    sizes = _sizes(target.model_path)
    if sizes is None:
        return None
    gpus = target_gpus(target) if total is None else range(target.tp_size)
    if not gpus:
        kept = sizes.file_bytes if target.dtype == "auto" and target.quantization is None else None
        weights = sizes.weights(_itemsize(target, sizes), target.quantization) if kept is None else kept
        free = max(0, free_host_memory() - weights)
        return plan_host(free, _token_bytes(target, sizes), **cache_flags(target))
    total = gpu_memory(gpus[0]) if total is None else total
    if total is None:
        return None
    beside = target.draft_headroom_bytes
    beside = headroom_of(target, draft).bytes if beside is None else beside
    return plan_gpu(target, sizes, total, draft=beside, taken=taken)


def plan_gpu(
    target: TargetConfig, sizes: ModelSizes, total: int, *, draft: int = 0, taken: int = 0
) -> MemoryPlan:  # fmt: skip
    """The plan of a target on GPUs, from sizes alone: each of its GPUs is divided in this way.

    total: memory of a GPU. draft: `draft_need` of a draft service beside the target. Raises ConfigError without room.
    """
    itemsize = _itemsize(target, sizes)
    return plan_device(
        total,
        sizes.weights(itemsize, target.quantization) // target.tp_size,
        -(-_token_bytes(target, sizes) // (1 if sizes.latent else target.tp_size)),  # every rank caches all latents
        working=step_sizes(target, sizes.hidden, sizes.vocab).working_bytes(itemsize),
        draft=draft,
        taken=taken,
        **cache_flags(target),
    )


def _itemsize(target: TargetConfig, sizes: ModelSizes) -> int:
    return ITEMSIZES.get(target.dtype) or sizes.itemsize or 2


def _token_bytes(target: TargetConfig, sizes: ModelSizes) -> int:
    numbers = 1 if target.kv_cache_dtype.startswith("fp8") else _itemsize(target, sizes)
    return sizes.token_bytes(numbers)


def check_model(target: TargetConfig) -> None:
    """Raise ConfigError for a checkpoint on this machine that the target would refuse."""
    if (sizes := _sizes(target.model_path)) is not None:
        check_division(target, sizes)


def share_device(target: TargetConfig, draft: DraftConfig | None) -> tuple[TargetConfig, DraftConfig | None]:
    """The configurations of both services, with room for the draft if it is on the target's device.

    Flags that the user has set stay: --draft-headroom-bytes, --draft-memory-bytes, --draft-max-total-tokens,
    --draft-mem-fraction-static.
    """
    need = headroom_of(target, draft)
    if draft is None or not need.bytes:
        return target, draft
    if target.draft_headroom_bytes is None:
        target = replace(target, draft_headroom_bytes=need.bytes)
    if draft.draft_mem_fraction_static is None:
        tokens = need.tokens if draft.draft_max_total_tokens is None else draft.draft_max_total_tokens
        share = need.bytes if draft.draft_memory_bytes is None else draft.draft_memory_bytes
        draft = replace(draft, draft_max_total_tokens=tokens, draft_memory_bytes=share)
    return target, draft


def headroom_of(target: TargetConfig, draft: DraftConfig | None) -> DraftHeadroom:
    """What a draft service takes of the target's device; nothing on a device of its own, and for NGRAM."""
    if draft is None or draft.speculative_algorithm not in MODEL_ALGORITHMS:
        return DraftHeadroom()
    gpus = draft_gpus(draft)
    if not set(gpus) & set(target_gpus(target)):
        return DraftHeadroom()
    total = gpu_memory(gpus[0])
    if draft.draft_mem_fraction_static is not None and total is not None:
        return DraftHeadroom(int(total * draft.draft_mem_fraction_static))
    theirs, path = _sizes(target.model_path), draft.speculative_draft_model_path
    return draft_need(draft, theirs, theirs if path is None else _sizes(path), total)


def draft_need(
    draft: DraftConfig, theirs: ModelSizes | None, own: ModelSizes | None, total: int | None
) -> DraftHeadroom:
    """What a draft service with a model takes of a GPU, from sizes alone: 2 or 6 GiB where they are not known.

    theirs: sizes of the target's checkpoint; own: of the draft's. total: memory of the GPU, if it is known
    """
    if draft.draft_memory_bytes is not None:
        return DraftHeadroom(draft.draft_memory_bytes)
    algorithm, shards = draft.speculative_algorithm, draft.draft_tp_size
    budget = STANDALONE_HEADROOM if algorithm == "STANDALONE" else HEAD_HEADROOM
    itemsize = ITEMSIZES.get(draft.draft_dtype, 2)
    quantization = draft.speculative_draft_model_quantization
    if own is None or (algorithm in FED_ALGORITHMS and theirs is None):
        return DraftHeadroom(budget)
    built_in = own == theirs and algorithm in BUILT_IN_ALGORITHMS
    weights = own.mtp_weights(itemsize, quantization) if built_in else own.weights(itemsize, quantization)
    fed = theirs is not None and algorithm in FED_ALGORITHMS
    if theirs is not None and fed:
        weights += theirs.shared_weights(itemsize, head=algorithm != "EAGLE3")
    layers = int(own.config.get("num_nextn_predict_layers") or 1) if built_in else None
    token_bytes = own.token_bytes(itemsize, layers) + (own.hidden * itemsize if fed else 0)  # and the states it reads
    chosen = draft.draft_max_total_tokens
    wanted = draft_cache_tokens(own.context, draft.max_running_requests, token_bytes, total, chosen)
    return draft_headroom(budget, weights // shards, token_bytes, wanted, fixed=chosen is not None)


def own_device(target: TargetOptions, draft: DraftOptions) -> str | None:
    """The device of a draft model for --draft-device auto: the first GPUs that the target does not use.

    None where there are none, or where JAX chooses another kind of device.
    """
    if draft.draft_device != "auto" or draft.speculative_algorithm not in MODEL_ALGORITHMS or not draft_gpus(draft):
        return None
    used, count = target_gpus(target), draft.draft_tp_size
    if not used:
        return None
    for first in range(len(gpus()) - count + 1):
        if not set(range(first, first + count)) & set(used):
            return f"cuda:{first}"
    return None


def target_gpus(target: TargetOptions) -> Sequence[int]:
    """Numbers of the GPUs that the target uses; empty on a CPU."""
    if "," in target.device:
        return [int(name.partition(":")[2]) for name in rank_places(target).devices]
    return _gpus(target.device, target.tp_size // target.nnodes) if target.device != "auto" or has_gpu() else range(0)


def draft_gpus(draft: DraftOptions) -> range:
    """Numbers of the GPUs that a draft model uses; empty on CPUs and TPUs. auto: GPUs, if JAX has its plugin."""
    if draft.draft_device != "auto":
        return _gpus(draft.draft_device, draft.draft_tp_size)
    return _gpus("cuda", draft.draft_tp_size) if has_gpu() and jax_uses_gpus() else range(0)


def jax_uses_gpus() -> bool:
    """True if JAX has a plugin for NVIDIA GPUs here, and JAX_PLATFORMS allows it."""
    platforms = os.environ.get("JAX_PLATFORMS", "")
    allowed = not platforms or any(name in platforms.split(",") for name in _GPU_NAMES)
    return allowed and any(importlib.util.find_spec(name) is not None for name in _JAX_PLUGINS)


def _gpus(device: str, count: int) -> range:
    kind, _, index = device.partition(":")
    if kind not in (*_GPU_NAMES, "auto"):
        return range(0)
    first = int(index) if index.isdigit() else 0
    return range(first, first + count)


def _sizes(model_path: str) -> CheckpointSizes | None:
    """Sizes of a checkpoint that lies on this machine."""
    try:
        folder = checkpoint.local_folder(model_path)
        if folder is None:
            return None
        sizes = CheckpointSizes(folder)
        return sizes if sizes.config and sizes.tensors else None
    except (ConfigError, OSError, ValueError):  # starting the service will report it
        return None
