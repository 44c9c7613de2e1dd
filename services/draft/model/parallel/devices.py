"""The devices of the draft, its number format, and the number of tokens in its KV cache."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from outrider.config import DraftConfig
from outrider.errors import ConfigError
from outrider.placement.devices import gpus, host_memory
from outrider.placement.memory import SCRATCH_SLOTS, draft_cache_tokens, draft_share_tokens, jax_memory_fraction
from outrider.placement.replicas import check_draft_devices, device_numbers
from services.draft.kernels.cpu import library

_GPU_PLATFORMS = ("auto", "cuda", "gpu")
# Fraction of a GPU that JAX takes at most, by its present and its former name.
_FRACTIONS = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")
_DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16, "float16": jnp.float16}


def choose_devices(
    device: str,
    count: int,
    flag: str = "--draft-device",
    share: int | None = None,
    count_flag: str = "--draft-tp-size",
) -> list[jax.Device]:
    """Devices, of which the first becomes JAX's default. Raises ConfigError.

    device: auto, a platform of JAX and optionally the index of the first of neighbouring devices, such as cuda:1, or a
    list of devices of one platform; flag, count_flag: names of the flags. share: --draft-memory-bytes
    """
    if count < 1:
        raise ConfigError(f"{count_flag} must be 1 or more, not {count}")
    check_draft_devices(device, count, flag, count_flag)
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # else JAX takes three quarters of a shared GPU
    platform, _, index = device.partition(":")
    if platform == "cpu":
        jax.config.update("jax_platforms", "cpu")  # so that JAX takes no memory of other devices
    try:
        first = int(index.partition(",")[0] or 0)
        wanted = device_numbers(device) if "," in device else list(range(first, first + count))
        kept = _keep_to_gpus(wanted, share) if platform in _GPU_PLATFORMS else False
        found = jax.devices(None if platform == "auto" else platform)
        kept = kept and found[0].platform == "gpu"
    except ValueError:
        raise ConfigError(f"{flag} {device} has no index behind the colon; write for example cuda:1") from None
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"{flag} {device}: JAX has no such device here: {reason}") from None
    if not kept and not 0 <= min(wanted) <= max(wanted) < len(found):
        together = f" and {count_flag} {count} need" if count > 1 else " needs"
        raise ConfigError(
            f"{flag} {device}{together} {max(wanted) + 1} devices; there "
            f"{'is' if len(found) == 1 else 'are'} {len(found)} of kind {found[0].platform}"
        )
    chosen = found[:count] if kept else [found[number] for number in wanted]
    jax.config.update("jax_default_device", chosen[0])
    return list(chosen)


def devices_named(device: str) -> int:
    """How many devices a flag stands for: those that it lists, one CPU, or all accelerators of its platform."""
    platform, _, index = device.partition(":")
    if index or platform == "cpu":
        return device.count(",") + 1
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    try:
        found = jax.devices(None if platform == "auto" else platform)
    except RuntimeError:  # `choose_devices` reports it
        return 1
    return 1 if found[0].platform == "cpu" else len(found)


def _keep_to_gpus(numbers: Sequence[int], share: int | None) -> bool:
    """Keep JAX to some of the GPUs, in this order, and to a share of their memory. Returns False if it does not.

    JAX would have a context of some hundred megabytes on every GPU, also on those that are the target's alone. Numbers
    that this machine does not have stay, and are refused later.
    """
    known = gpus()
    if not 0 <= min(numbers) <= max(numbers) < len(known):
        return False
    total = known[numbers[0]].total
    if share is not None and total and not any(name in os.environ for name in _FRACTIONS):
        os.environ[_FRACTIONS[0]] = f"{jax_memory_fraction(share, total):.4f}"
    jax.config.update("jax_cuda_visible_devices", ",".join(map(str, numbers)))
    return True


def dtype_of(config: DraftConfig, device: jax.Device) -> tuple[Any, str]:
    """Number format of the computation, and its name; "auto" is the fastest one of the device."""
    name = config.draft_dtype
    if name == "auto":
        slow = device.platform == "cpu" and not (_may_be_compiled(config) and library.available())
        name = "float32" if slow else "bfloat16"
    return _DTYPES[name], name


def _may_be_compiled(config: DraftConfig) -> bool:
    """True if the compiled CPU kernels may serve; only they compute bfloat16 fast, XLA widens each number first."""
    return config.draft_attention_backend in ("auto", "cpu") and config.draft_tp_size == 1


def bytes_a_device(tree: Any) -> int:
    """Bytes that arrays take on their first device."""
    return sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(tree))


def host_device() -> jax.Device:
    """The device on which arrays are prepared for others; the default device if JAX has no CPU."""
    try:
        return jax.devices("cpu")[0]
    except RuntimeError:
        return jax.devices()[0]


def pages_that_fit(config: DraftConfig, context: int, token_bytes: int, weights: int, device: jax.Device) -> int:
    """Pages of the KV cache. Raises ConfigError if there is not enough memory.

    context: tokens of a session; token_bytes, weights: bytes a token in the cache and the weights take on the device
    """
    part, running, share = config.draft_mem_fraction_static, config.max_running_requests, config.draft_memory_bytes
    if share is not None and part is None and config.draft_max_total_tokens is None:
        tokens = draft_share_tokens(share, weights, context, running, token_bytes)
    elif config.draft_max_total_tokens is not None or part is None:
        tokens = draft_cache_tokens(context, running, token_bytes, memory_bytes(device), config.draft_max_total_tokens)
    else:
        room = int(memory_bytes(device) * part) - weights
        tokens = min((context + SCRATCH_SLOTS) * running, room // token_bytes)
    pages = tokens // config.draft_page_size
    least = -(-SCRATCH_SLOTS // config.draft_page_size) + 1
    if pages >= least:
        return pages
    if part is not None and config.draft_max_total_tokens is None:
        raise ConfigError(
            f"--draft-mem-fraction-static {part} of {memory_bytes(device) >> 20} MiB holds weights of {weights >> 20} "
            f"MiB and no session beside them; {least * config.draft_page_size} tokens of {token_bytes} bytes are needed"
        )
    raise ConfigError(
        f"the draft's KV cache of {tokens} tokens cannot hold one session; --draft-max-total-tokens must be "
        f"{least * config.draft_page_size} or more, with as much memory (--draft-memory-bytes)"
    )


def memory_bytes(device: jax.Device) -> int:
    """Memory of a device in bytes, as the runtime reports it, or that of the machine or container."""
    stats: dict[str, Any] = device.memory_stats() or {}
    return int(stats.get("bytes_limit") or host_memory())
