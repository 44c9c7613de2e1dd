"""Flags of the target service."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import tyro

from outrider.config.common import DEFAULT_MODEL, DType, ServiceConfig, SharedOptions
from outrider.config.tls import TlsOptions

KVCacheDType = Literal["auto", "bf16", "bfloat16", "fp8_e5m2", "fp8_e4m3"]
SchedulePolicy = Literal["fcfs", "lpm"]
AttentionBackend = Literal["auto", "native", "triton", "torch_native"]
Quantization = Literal["fp8", "int8", "int4"]
SelfDraft = Literal["auto", "text", "head", "int4", "int8", "off"]


@dataclass(frozen=True)
class KernelOptions:
    """How the target computes."""

    attention_backend: AttentionBackend = "auto"
    """Attention kernels: native (compiled, CPU), triton (CUDA), torch_native (PyTorch's), or the best there is."""
    deterministic: Annotated[bool, tyro.conf.arg(aliases=["--enable-deterministic-inference"])] = False
    """Compute every row with the same bits in any batch and draft, so that no text can depend on them; costs speed."""
    disable_cuda_graph: bool = False
    """Launch every kernel anew instead of replaying captured steps."""
    cuda_graph_max_bs: int | None = None
    """Most sessions of a captured step; by default as many as may run."""
    cuda_graph_bs: tuple[int, ...] | None = None
    """Numbers of sessions to capture steps for; with --speculative-num-draft-tokens N also with N rows each."""
    disable_cuda_graph_padding: bool = False
    """Replay captured steps of exactly the right size only."""
    disable_overlap_schedule: bool = False
    """Read each step before the next one is prepared; on CUDA the device else computes meanwhile."""
    enable_torch_compile: bool = False
    """Compile the layers for captured steps with torch.compile; takes minutes at start-up."""
    torch_compile_max_bs: int = 32
    """Most sessions of a compiled step."""


@dataclass(frozen=True)
class TargetOptions(KernelOptions):
    """The target service: verifies proposals with the large model."""

    model_path: Annotated[str, tyro.conf.arg(aliases=["--model"])] = DEFAULT_MODEL
    """Hugging Face id, local folder, or GGUF file of the model; "default" is SmolLM2-135M-Instruct."""
    device: str = "auto"
    """Device of the model: auto, cpu, cuda, cuda:1, ..."""
    dtype: DType = "auto"
    """Number format of the computation; auto is the checkpoint's, on a CPU float32 where no kernels serve it."""
    quantization: Quantization | None = None
    """Narrower weights than the checkpoint's: int8 or int4, or on CUDA, where the package torchao is needed, fp8."""
    tp_size: Annotated[int, tyro.conf.arg(aliases=["--tensor-parallel-size", "--tp"])] = 1
    """Devices that share every layer, each with a process of its own; on a CPU, processes."""
    weight_version: str = "default"
    """Label of the weights, told in every answer; a weight update may change it."""
    trust_remote_code: bool = False
    """Run model code that comes with the checkpoint."""
    context_length: int | None = None
    """Longest prompt plus answer in tokens; by default the model's."""
    page_size: int = 16
    """Size of a KV page in tokens."""
    max_total_tokens: int | None = None
    """Tokens in the KV cache, over all sessions; by default as many as the memory fraction holds."""
    mem_fraction_static: float = 0.5
    """Fraction of the device's memory for weights and KV cache."""
    feature_cache_bytes: int = 1 << 30
    """Host memory for hidden states of cached prefixes, in bytes; without them a head has prefixes computed again."""
    kv_cache_dtype: KVCacheDType = "auto"
    """Number format of the KV cache; auto is that of the model's keys. Narrower ones hold more tokens, less exactly."""
    speculative_accept_threshold_single: float = 1.0
    """Accept a draft token at least this probable, whatever was drawn; below 1 this changes sampled text."""
    speculative_accept_threshold_acc: float = 1.0
    """Accept draft tokens of probability p with probability p / threshold; below 1 this changes sampled text."""
    speculative_always: bool = False
    """Let every step wait for the drafter's answer, up to ten seconds, and verify all of it: to measure a drafter."""
    self_draft: SelfDraft = "auto"
    """Where measurements favour it, draft what a session's own text repeats, and with an EAGLE-3 head or a copy of the
    weights in int4 or int8; `text` does without. Auto takes a head, if --self-draft-head names one; else a copy in int4
    of weights wider than int8, for which the head guesses that comes along, and beside others that head alone. It is
    for models on CPUs that are larger than caches, unless `outrider serve` was told a --speculative-algorithm."""
    self_draft_head: str | None = None
    """Folder of an EAGLE-3 head that drafts, or guesses for a copy in int4 or int8; by default `head` takes the one
    that comes along for the default model, and a copy has none."""
    chunked_prefill_size: int | None = None
    """Tokens computed in one step, over all sessions; longer prompts are cut. By default 128 on CPUs and 2048 on CUDA;
    -1 computes every prompt in one piece."""
    max_prefill_tokens: int = 16384
    """Prompt tokens computed in one step, over all sessions; without cutting, a longer prompt is computed alone."""
    coalesce_seconds: Annotated[float, tyro.conf.arg(aliases=["--gather-seconds"])] = 0.016
    """Window in which streamed tokens are coalesced into one chunk, in seconds. The first and last chunk, and tokens a
    drafter waits for, are sent immediately."""
    max_queued_requests: int | None = None
    """Most sessions that wait for a place; further ones are refused. By default without limit."""
    schedule_policy: SchedulePolicy = "fcfs"
    """Which waiting session is next: first come, first served (fcfs), or longest prefix match (lpm), within limits."""


@dataclass(frozen=True)
class TargetConfig(TargetOptions, SharedOptions, TlsOptions, ServiceConfig):
    """The target service: verifies proposals with the large model."""

    listen: str = "127.0.0.1:30010"
    """Address of the gRPC service: host:port or unix:/path."""

    @property
    def fixed_tokens_per_session(self) -> int | None:
        """Rows of a session in a step, the root included, where a flag says so; a chain has as many as it needs."""
        rows, steps = self.speculative_num_draft_tokens, self.speculative_num_steps
        return steps + 1 if rows is not None and steps and self.speculative_eagle_topk == 1 else rows

    @property
    def verifies_all_draft_tokens(self) -> bool:
        """True if all hints are verified, whether they pay or not."""
        return self.speculative_num_draft_tokens is not None or self.speculative_always
