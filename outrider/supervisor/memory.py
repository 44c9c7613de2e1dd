"""The memory plan of `outrider serve`, before a process runs: what a draft on the target's device needs, and the rest.

    share_devices(targets, drafts)   the configurations of all replicas, with the flags by which they share devices
    plan_of(target, draft)           a target's plan, as its log will have it but for what only loading shows
    plan_gpu, draft_need             the same from sizes alone, without a checkpoint and a GPU
    target_gpus, draft_gpus          the GPUs of a replica

They read config.json and the headers of weight files on this machine; none downloads, converts or loads anything.
"""

from __future__ import annotations

import importlib.util
import os
from collections import Counter
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
from outrider.errors import ConfigError
from outrider.placement.devices import free_host_memory, gpu_memory, has_gpu
from outrider.placement.memory import (
    CPU_FRACTION,
    HEAD_HEADROOM,
    STANDALONE_HEADROOM,
    DraftHeadroom,
    MemoryPlan,
    beside_others,
    cache_flags,
    draft_cache_tokens,
    draft_headroom,
    plan_device,
    plan_host,
)
from outrider.placement.replicas import GPU_KINDS, gpu_numbers
from outrider.placement.step_sizes import step_sizes
from outrider.supervisor.ranks import check_division

_JAX_PLUGINS = ("jax_cuda12_plugin", "jax_cuda13_plugin")


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


def share_devices(
    targets: Sequence[TargetConfig], drafts: Sequence[DraftConfig]
) -> tuple[list[TargetConfig], list[DraftConfig]]:
    """The configurations of all replicas, with the flags by which those on one device share its memory.

    A draft beside targets has the memory that it needs, one beside other drafts alone an equal part; targets on one GPU
    have equal parts of the rest, and on a CPU of half of the free memory. Flags that the user has set stay:
    --draft-headroom-bytes, --draft-memory-bytes, --draft-max-total-tokens, --draft-mem-fraction-static. Raises
    ConfigError where a GPU cannot be divided.
    """
    needs = [_need_beside(targets, draft) for draft in drafts]
    on_gpus = Counter(gpu for target in targets for gpu in set(target_gpus(target)))
    drafts_on = Counter(gpu for draft in drafts if _has_model(draft) for gpu in draft_gpus(draft))
    taken: Counter[int] = Counter()
    for draft, need in zip(drafts, needs, strict=True):
        for gpu in draft_gpus(draft) if need.bytes else ():
            taken[gpu] += need.bytes
    return (
        [_beside_others(target, on_gpus, taken, len(targets)) for target in targets],
        [_with_share(draft, need, drafts_on) for draft, need in zip(drafts, needs, strict=True)],
    )


def _need_beside(targets: Sequence[TargetConfig], draft: DraftConfig) -> DraftHeadroom:
    """What a draft takes of a GPU that it shares with a target; nothing if it shares none."""
    found = (headroom_of(target, draft) for target in targets)
    return next((need for need in found if need.bytes), DraftHeadroom())


def _beside_others(target: TargetConfig, on_gpus: Counter[int], taken: Counter[int], replicas: int) -> TargetConfig:
    """A target with room for the drafts on its GPUs, and for the other targets there.

    on_gpus: targets by GPU. taken: bytes of drafts by GPU. replicas: targets on this machine
    """
    used = target_gpus(target)
    if not used and replicas > 1 and target.mem_fraction_static is None:
        return replace(target, mem_fraction_static=round(CPU_FRACTION / replicas, 4))
    crowded = max(used, key=lambda gpu: on_gpus[gpu], default=None)
    if crowded is not None and on_gpus[crowded] > 1:
        _check_divisible(target, crowded, on_gpus[crowded])
    if target.draft_headroom_bytes is not None:
        return target
    beside = max((beside_others(gpu_memory(gpu), on_gpus[gpu], taken[gpu]) for gpu in used), default=0)
    return replace(target, draft_headroom_bytes=beside) if beside else target


def _check_divisible(target: TargetConfig, gpu: int, count: int) -> None:
    """Raise ConfigError for flags and machines with which several targets cannot share a GPU by plan."""
    if target.mem_fraction_static is not None and target.max_total_tokens is None:
        raise ConfigError(
            f"--mem-fraction-static {target.mem_fraction_static} counts what other processes hold, and {count} targets "
            f"share cuda:{gpu}; leave it out, so that each has an equal part, or set --max-total-tokens"
        )
    if gpu_memory(gpu) is None and target.max_total_tokens is None and target.draft_headroom_bytes is None:
        raise ConfigError(
            f"{count} targets share cuda:{gpu}, whose memory this process cannot read (nvidia-smi); set "
            "--max-total-tokens, or give each a GPU of its own"
        )


def _with_share(draft: DraftConfig, need: DraftHeadroom, drafts_on: Counter[int]) -> DraftConfig:
    """A draft with its share of a GPU that targets or other drafts use, too."""
    if need.bytes:
        if draft.draft_mem_fraction_static is not None:
            return draft
        tokens = need.tokens if draft.draft_max_total_tokens is None else draft.draft_max_total_tokens
        share = need.bytes if draft.draft_memory_bytes is None else draft.draft_memory_bytes
        return replace(draft, draft_max_total_tokens=tokens, draft_memory_bytes=share)
    given = (draft.draft_memory_bytes, draft.draft_mem_fraction_static, draft.draft_max_total_tokens)
    crowded = max(draft_gpus(draft), key=lambda gpu: drafts_on[gpu], default=None) if _has_model(draft) else None
    if crowded is None or drafts_on[crowded] < 2 or any(flag is not None for flag in given):
        return draft
    total = gpu_memory(crowded)
    return draft if total is None else replace(draft, draft_memory_bytes=total // drafts_on[crowded])


def _has_model(draft: DraftOptions) -> bool:
    return draft.speculative_algorithm in MODEL_ALGORITHMS


def headroom_of(target: TargetConfig, draft: DraftConfig | None) -> DraftHeadroom:
    """What a draft service takes of the target's device; nothing on a device of its own, and for NGRAM."""
    if draft is None or not _has_model(draft):
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


def target_gpus(target: TargetOptions) -> Sequence[int]:
    """Numbers of the GPUs that a target uses; empty on a CPU."""
    if target.device == "auto" and not has_gpu():
        return ()
    return gpu_numbers(target.device, target.tp_size // max(1, target.nnodes))


def draft_gpus(draft: DraftOptions) -> Sequence[int]:
    """Numbers of the GPUs that a draft model uses; empty on CPUs and TPUs. auto: GPUs, if JAX has its plugin."""
    if draft.draft_device == "auto" and not (has_gpu() and jax_uses_gpus()):
        return ()
    return gpu_numbers(draft.draft_device, draft.draft_tp_size)


def jax_uses_gpus() -> bool:
    """True if JAX has a plugin for NVIDIA GPUs here, and JAX_PLATFORMS allows it."""
    platforms = os.environ.get("JAX_PLATFORMS", "")
    allowed = not platforms or any(name in platforms.split(",") for name in GPU_KINDS)
    return allowed and any(importlib.util.find_spec(name) is not None for name in _JAX_PLUGINS)


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
