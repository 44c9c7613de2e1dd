"""Division of a device's memory: weights, graphs and activations, a draft service beside them, and KV pages.

    total    weights | context, CUDA graphs, activations | draft service on the same device | KV pages

Without --mem-fraction-static the KV cache takes what the other parts leave, so that a model starts wherever its weights
leave room. With the flag, weights and KV cache together take that fraction, as in SGLang. The functions only calculate:
a target calls them with what it measures, `outrider serve` with what it reads from checkpoints.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypedDict

from outrider.config import TargetConfig
from outrider.errors import ConfigError

MIB, GIB = 1 << 20, 1 << 30

# Nodes of a draft tree that a drafter with a model stores for each session beside its tokens.
SCRATCH_SLOTS = 64
# Device memory that a draft beside a target takes, if its weights do not need more; the figures that SGLang's
# documentation names. Its KV cache holds what is left, but at least some tokens.
HEAD_HEADROOM, STANDALONE_HEADROOM = 2 * GIB, 6 * GIB
_LEAST_DRAFT_TOKENS = 8 * 1024
# Tokens of the KV cache without a flag: of a target on a CPU, where the fraction would reserve gigabytes that sessions
# rarely fill, and of a draft.
_CPU_TOKENS = _DRAFT_TOKENS = 64 * 1024
# Parts of the memory: of a host's free memory for a KV cache, and of a draft's device for its KV cache.
CPU_FRACTION, _DRAFT_FRACTION = 0.5, 0.1
_JAX_FRACTION = 0.75  # of a device that JAX takes at most
# A process's CUDA context with its loaded kernels, and the workspaces of matrix libraries and attention.
CONTEXT_BYTES, _WORKSPACE_BYTES = 512 * MIB, 256 * MIB
# Fraction of a device that stays free, against fragmentation.
_SLACK = 0.02
# Widths of a hidden state that a token of a step occupies at once: residual stream, projections, gates and values.
_ACTIVATION_WIDTHS = 24
# Bytes of a logit in all forms at once: as computed, in float32, with noise, and sorted.
_LOGIT_BYTES = 20
# A captured CUDA graph: its nodes, and the variants by the extent of a batch (model/cuda/graphs.py). Steps with and
# without hidden states for a draft are captured separately.
GRAPH_BYTES, GRAPH_VARIANTS = 12 * MIB, 2 * 3


@dataclass(frozen=True)
class StepSizes:
    """What the working memory of a target depends on.

    tokens: of the largest step; sampled: rows with logits in the largest step; captured: rows of each captured step
    """

    tokens: int
    sampled: int
    captured: tuple[int, ...]
    hidden: int
    vocab: int

    def working_bytes(self, itemsize: int = 2) -> int:
        """Context, graphs, activations and sampling. itemsize: bytes of a number in the computation."""
        activations = self.tokens * self.hidden * _ACTIVATION_WIDTHS * itemsize
        sampling = self.sampled * self.vocab * _LOGIT_BYTES
        outputs = sum(self.captured) * self.vocab * itemsize
        graphs = GRAPH_VARIANTS * (outputs + len(self.captured) * GRAPH_BYTES)
        return CONTEXT_BYTES + _WORKSPACE_BYTES + activations + sampling + graphs


@dataclass(frozen=True)
class MemoryPlan:
    """How a device's memory is divided, in bytes.

    total:   of the device; of a host, what is free for this process
    working: context, CUDA graphs and activations of the target
    draft:   left to a draft service on the same device, or taken by other processes already
    rule:    what determined the size of the KV cache
    """

    total: int
    weights: int
    working: int
    draft: int
    token_bytes: int
    page_size: int
    pages: int
    rule: str

    @property
    def tokens(self) -> int:
        """Tokens that the KV cache holds, over all sessions."""
        return self.pages * self.page_size

    @property
    def kv_bytes(self) -> int:
        """Size of the KV cache."""
        return self.tokens * self.token_bytes

    @property
    def planned(self) -> int:
        """All parts together; flags may make them more than there is."""
        return self.weights + self.working + self.draft + self.kv_bytes

    def __str__(self) -> str:
        parts = [f"{self.total / GIB:.2f} GiB"]
        parts += [
            f"{name} {size / GIB:.2f}"
            for name, size in (
                ("weights", self.weights),
                ("graphs and activations", self.working),
                ("draft headroom", self.draft),
            )
            if size
        ]
        cache = f"KV cache {self.kv_bytes / GIB:.2f}: {self.pages} pages of {self.page_size} tokens = {self.tokens}"
        return f"{', '.join([*parts, cache])} tokens of {self.token_bytes} bytes ({self.rule})"


class CacheFlags(TypedDict, total=False):
    """Flags that size a KV cache: --mem-fraction-static, --max-total-tokens, --page-size."""

    fraction: float | None
    max_total_tokens: int | None
    page_size: int


def cache_flags(config: TargetConfig) -> CacheFlags:
    """The flags of a target."""
    return {
        "fraction": config.mem_fraction_static,
        "max_total_tokens": config.max_total_tokens,
        "page_size": config.page_size,
    }


def plan_device(
    total: int,
    weights: int,
    token_bytes: int,
    *,
    working: int,
    draft: int = 0,
    taken: int = 0,
    fraction: float | None = None,
    max_total_tokens: int | None = None,
    page_size: int = 16,
) -> MemoryPlan:
    """The plan of an accelerator. Raises ConfigError if not even one page fits.

    working: `StepSizes.working_bytes`. draft: `draft_headroom` of a draft service on the same device, else 0. taken: by
    other processes; a draft service that runs already is one of them, so the larger of the two counts.
    fraction: --mem-fraction-static
    """
    beside = max(draft, taken)
    if fraction is not None:
        room, rule = int(fraction * total) - weights - taken, f"--mem-fraction-static {fraction}"
    else:
        room, rule = int(total * (1 - _SLACK)) - weights - working - beside, "the memory that is left"
    pages = room // (token_bytes * page_size)
    if max_total_tokens is not None:
        pages, rule = max_total_tokens // page_size, f"--max-total-tokens {max_total_tokens}"
    plan = MemoryPlan(total, weights, working, beside, token_bytes, page_size, pages, rule)
    if pages < 1:
        raise ConfigError(_too_small(plan, fraction, max_total_tokens))
    return plan


def plan_host(
    free: int,
    token_bytes: int,
    *,
    fraction: float | None = None,
    max_total_tokens: int | None = None,
    page_size: int = 16,
) -> MemoryPlan:
    """The plan of a target on a CPU, whose weights are loaded. Raises ConfigError if not even one page fits.

    free: memory of the host that no process uses. fraction: --mem-fraction-static; default a half
    """
    tokens = min(int((fraction or CPU_FRACTION) * free) // token_bytes, _CPU_TOKENS)
    rule = f"{fraction or CPU_FRACTION:g} of the free memory, at most {_CPU_TOKENS} tokens"
    if max_total_tokens is not None:
        tokens, rule = max_total_tokens, f"--max-total-tokens {max_total_tokens}"
    plan = MemoryPlan(free, 0, 0, 0, token_bytes, page_size, tokens // page_size, rule)
    if plan.pages < 1:
        raise ConfigError(_too_small(plan, fraction, max_total_tokens))
    return plan


def beside_others(total: int | None, targets: int, drafts: int) -> int:
    """What other processes of the same system take of a target's GPU: drafts, and targets, which have equal parts.

    total: memory of the GPU, needed for several targets. targets: on that GPU, this one included. drafts: their bytes
    """
    if targets < 2 or total is None:
        return drafts
    return total - (total - drafts) // targets


def _too_small(plan: MemoryPlan, fraction: float | None, max_total_tokens: int | None) -> str:
    needed = f"a page of {plan.page_size} tokens, {plan.page_size * plan.token_bytes} bytes"
    if max_total_tokens is not None:
        return f"--max-total-tokens {max_total_tokens} has no room for {needed}; raise it, or lower --page-size"
    divided = f"of {plan.total / GIB:.2f} GiB, weights take {plan.weights / GIB:.2f}"
    if fraction is not None:
        return (
            f"--mem-fraction-static {fraction} leaves the KV cache no room for {needed}: {divided}; raise it, or leave "
            "it out, which takes all memory that is left"
        )
    return (
        f"the KV cache has no room for {needed}: {divided}, CUDA graphs and activations {plan.working / GIB:.2f}, a "
        f"draft or other processes {plan.draft / GIB:.2f}; lower --cuda-graph-max-bs, --max-running-requests or "
        "--chunked-prefill-size, choose --quantization, or split the model with --tp-size"
    )


def draft_cache_tokens(
    context: int, max_running: int, token_bytes: int, memory: int | None, max_total_tokens: int | None = None
) -> int:
    """Tokens in the KV cache of a draft model without --draft-mem-fraction-static.

    context: tokens of a session; memory: of the draft's device, of which the cache takes at most a tenth; None if it is
    not known. max_total_tokens: --draft-max-total-tokens
    """
    if max_total_tokens is not None:
        return max_total_tokens
    wanted = min(context * max_running, _DRAFT_TOKENS) + SCRATCH_SLOTS * max_running
    return wanted if memory is None else min(wanted, int(memory * _DRAFT_FRACTION) // token_bytes)


def draft_share_tokens(share: int, weights: int, context: int, max_running: int, token_bytes: int) -> int:
    """Tokens in the KV cache of a draft model with --draft-memory-bytes, `share`: what its weights leave."""
    wanted = draft_cache_tokens(context, max_running, token_bytes, None)
    return min(wanted, max(share - CONTEXT_BYTES - _WORKSPACE_BYTES - weights, 0) // token_bytes)


def jax_memory_fraction(share: int, total: int) -> float:
    """The fraction of a GPU that JAX may take for a draft with a share of its memory, beside its CUDA context.

    Twice the share, because for moments JAX has two copies of weights, while they are replaced or kernels are chosen.
    It is a bound, which JAX does not take beforehand; without a share it is JAX's own.
    """
    return min(_JAX_FRACTION, 2 * share / total)


@dataclass(frozen=True)
class DraftHeadroom:
    """What a draft service takes of the target's device. tokens: of its KV cache; None for what the draft chooses."""

    bytes: int = 0
    tokens: int | None = None


def draft_headroom(
    budget: int, weights: int, token_bytes: int, wanted_tokens: int, *, fixed: bool = False
) -> DraftHeadroom:
    """The device memory of a draft service beside a target.

    budget: HEAD_HEADROOM or STANDALONE_HEADROOM. weights: those that it loads, the target's embedding and head
    included. wanted_tokens: `draft_cache_tokens`; fixed: not fewer
    """
    needed = CONTEXT_BYTES + _WORKSPACE_BYTES + weights
    room = max((budget - needed) // token_bytes, _LEAST_DRAFT_TOKENS)
    tokens = wanted_tokens if fixed else min(wanted_tokens, room)
    return DraftHeadroom(needed + tokens * token_bytes, tokens)
