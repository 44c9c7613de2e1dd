"""Flags of other engines that are accepted and have no effect here, and values that name other engines' kernels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class ForeignFlag:
    """A flag without a meaning here.

    words: that follow it: none (0), one (1) or any number (None). choices: the words that are accepted; () is any.
    reason: why it has no effect, and what happens instead
    """

    name: str
    words: Literal[0, 1] | None
    reason: str
    choices: tuple[str, ...] = ()

    def note(self, given: str) -> str:
        """The log line for a use of the flag. given: as it was written."""
        return f"{given} has no effect: {self.reason}"


_MOE_RUNNERS = (
    "auto", "deep_gemm", "triton", "triton_kernel", "flashinfer_trtllm", "flashinfer_cutlass", "flashinfer_mxfp4",
    "flashinfer_cutedsl", "cutlass", "marlin",
)  # fmt: skip
_MOE_DISPATCH = ("none", "deepep", "mooncake", "flashinfer", "ascend_fuseep", "mori", "nixl")

FOREIGN_FLAGS = (
    *(
        ForeignFlag(
            name, 1, "a block drafter attends to the whole text, except in layers whose checkpoint has a window"
        )
        for name in ("--speculative-draft-window-size", "--speculative-dflash-draft-window-size")
    ),
    ForeignFlag(
        "--speculative-attention-mode",
        1,
        "one attention kernel computes prompts, single tokens and draft trees alike",
        ("prefill", "decode"),
    ),
    ForeignFlag(
        "--speculative-moe-runner-backend",
        1,
        "the draft service chooses the kernels of experts itself",
        _MOE_RUNNERS,
    ),
    ForeignFlag(
        "--speculative-moe-a2a-backend",
        1,
        "--draft-tp-size splits every expert by columns, so that no tokens are exchanged between devices",
        _MOE_DISPATCH,
    ),
    ForeignFlag(
        "--moe-runner-backend",
        1,
        "the target chooses the kernels of experts itself",
        _MOE_RUNNERS,
    ),
    ForeignFlag(
        "--moe-a2a-backend",
        1,
        "--tp-size splits every layer by the plan of transformers, so that no tokens are exchanged between devices",
        _MOE_DISPATCH,
    ),
    ForeignFlag(
        "--load-balance-method",
        1,
        "the gateway chooses the target of a session by cached prefix and load",
    ),
    ForeignFlag(
        "--precompile-token-paddings",
        None,
        "the draft service computes prompts in chunks of one compiled size, 256 tokens, or 64 on a CPU; the target "
        "takes chunks of any size up to --chunked-prefill-size",
    ),
    ForeignFlag(
        "--debug-rollout-only",
        0,
        "it switches off slime's trainer; Outrider only generates",
    ),
    ForeignFlag(
        "--enable-metrics",
        0,
        "the gateway always serves /metrics",
    ),
    ForeignFlag(
        "--skip-server-warmup",
        0,
        "the warm-up measures what steps cost, which speculation needs",
    ),
    ForeignFlag(
        "--enable-mixed-chunk",
        0,
        "prompt chunks are always computed in the same steps as other sessions' tokens",
    ),
)

# Attention kernels of SGLang and SGL-JAX that do not exist here.
FOREIGN_KERNELS = (
    "fa", "fa3", "fa4", "flashinfer", "flashmla", "cutlass_mla", "trtllm_mla", "trtllm_mha", "flex_attention",
    "dual_chunk_flash_attn", "nsa", "aiter", "wave", "ascend", "intel_amx", "intel_xpu",
)  # fmt: skip

# Names of kernels that one of our two services has and the other one has not.
TARGET_KERNELS_ONLY = ("triton", "torch_native", "native")
