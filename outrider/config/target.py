"""Flags of the target service."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import tyro

from outrider.config.access.token import ServicePortOptions
from outrider.config.common import (
    DEFAULT_MODEL,
    DType,
    MachineShareOptions,
    ServiceConfig,
    SharedOptions,
    check_minimum,
    flag_of,
)
from outrider.config.ranks import check_ranks
from outrider.errors import ConfigError

# Minimum of each number, by field.
_LEAST = {
    "page_size": 1,
    "max_running_requests": 1,
    "max_prefill_tokens": 1,
    "max_queued_requests": 0,
    "coalesce_seconds": 0,
    "decode_log_interval": 1,
    "draft_headroom_bytes": 0,
    "max_total_tokens": 1,
    "speculative_num_steps": 0,
    "speculative_eagle_topk": 1,
    "speculative_num_draft_tokens": 1,
}

KVCacheDType = Literal["auto", "bf16", "bfloat16", "fp8_e5m2", "fp8_e4m3"]
SchedulePolicy = Literal["fcfs", "lpm"]
AttentionBackend = Literal["auto", "native", "triton", "torch_native"]
Quantization = Literal["fp8", "int8", "int4"]
SelfSpeculationSource = Literal["auto", "off", "lookup", "head", "quantized"]
SelfSpeculationFormat = Literal["auto", "int4", "int8"]


@dataclass(frozen=True)
class ModelOptions:
    """The target model."""

    topic: ClassVar[str] = "model"

    model_path: Annotated[str, tyro.conf.arg(aliases=["--model"])] = DEFAULT_MODEL
    """Hugging Face id, local folder or GGUF file of the model; "default" is SmolLM2-135M-Instruct."""
    dtype: DType = "auto"
    """Number format of the computation. auto: the checkpoint's; on a CPU without kernels for it, float32. float16 on a
    CPU: bfloat16, or float32 for models without kernels for it."""
    quantization: Quantization | None = None
    """Weight quantization: int8, int4, or fp8 (CUDA, needs torchao; on a CPU int8). Default: the checkpoint's
    format."""
    tp_size: Annotated[int, tyro.conf.arg(aliases=["--tensor-parallel-size", "--tp"])] = 1
    """Tensor-parallel ranks, one process each: devices, or processes on a CPU."""
    nnodes: int = 1
    """Machines that the tensor-parallel ranks are divided among."""
    node_rank: int = 0
    """Number of this machine, from 0. Machine 0 serves; on each other one, `outrider target` with the same flags
    computes its share of the ranks."""
    dist_init_addr: Annotated[str | None, tyro.conf.arg(aliases=["--nccl-init-addr"])] = None
    """With several machines: host:port of machine 0 where their ranks meet."""
    device: Annotated[str, tyro.conf.arg(aliases=["--target-devices"])] = "auto"
    """Device of the model: auto, cpu, cuda, cuda:1, ...; with --tp-size or --target-replicas the first of several, or a
    list with one for each rank of each replica: cuda:2,cuda:3. `serve` reads tpu as: the draft service on the TPU, the
    target on auto."""
    context_length: int | None = None
    """Maximum tokens of prompt and answer together. Default: the model's."""
    weight_version: str = "default"
    """Label of the weights that every answer reports; a weight update may change it."""
    weight_update_roots: tuple[str, ...] = ()
    """Folders below which weight updates may read checkpoints. Default: the folder that the model's own lies in, unless
    every user may write there; then the model's own alone."""
    weight_update_timeout: float = 300.0
    """Seconds that a weight update waits for all members of a trainer's process group to join, and for each tensor."""
    trust_remote_code: bool = False
    """Run the model code in the checkpoint; never that of a weight update."""


def check_device(name: str) -> None:
    """Raise ConfigError for the device of another service: PyTorch does not compute on TPUs here."""
    if name.partition(":")[0] == "tpu":
        raise ConfigError(
            f"--device {name}: the target service computes on CUDA devices and CPUs; a TPU runs the draft service, "
            "`outrider draft --draft-device tpu`, with the target on another device or machine"
        )


@dataclass(frozen=True)
class AcceptanceOptions:
    """Rules by which draft tokens are accepted."""

    topic: ClassVar[str] = "speculation"

    speculative_accept_threshold_single: float = 1.0
    """Accept a draft token of at least this probability, whatever token was sampled; below 1 changes sampled text."""
    speculative_accept_threshold_acc: float = 1.0
    """Accept a draft token of probability p with probability p / threshold; below 1 changes sampled text."""
    speculative_always: bool = False
    """Make every step wait up to 10 s for the draft service and verify its whole proposal, to measure a drafter."""


@dataclass(frozen=True)
class SelfSpeculationOptions:
    """Draft tokens made by the target process itself."""

    topic: ClassVar[str] = "self-speculation"

    self_speculation: SelfSpeculationSource = "auto"
    """Draft source in the target process: prompt lookup alone (lookup), or with a local EAGLE-3 head (head) or a
    quantized copy of the weights (quantized), used while measurements favour it. auto: on a CPU, for models larger than
    its caches: the head of --self-speculation-head; else a quantized copy, or for int8 and int4 weights the bundled
    head, if any; off if `serve` has a --speculative-algorithm other than AUTO."""
    self_speculation_format: SelfSpeculationFormat = "auto"
    """Weight format of the quantized copy: int4 or int8. auto: int4."""
    self_speculation_head: Annotated[str | None, tyro.conf.arg(aliases=["--self-draft-head"])] = None
    """Folder of an EAGLE-3 head that drafts in the target process, instead of a quantized copy. Default: the default
    model's bundled head."""


@dataclass(frozen=True)
class CacheOptions:
    """KV cache of the target."""

    topic: ClassVar[str] = "KV cache and memory"

    mem_fraction_static: float | None = None
    """Fraction of the device's memory for weights and KV cache. Default: what CUDA graphs, activations and a draft on
    the same device leave; on a CPU half of the free memory, at most 65,536 tokens."""
    max_total_tokens: int | None = None
    """Capacity of the KV cache in tokens, over all sessions. Default: what the memory holds."""
    draft_headroom_bytes: int | None = None
    """Memory of the target's device that stays free for a draft service, in bytes, without --mem-fraction-static.
    Default: with `serve` what the draft on the same device needs, else 0."""
    page_size: int = 16
    """Tokens per KV page."""
    kv_cache_dtype: KVCacheDType = "auto"
    """Number format of the KV cache; narrower formats hold more tokens and are less exact. auto: that of the model's
    keys."""
    feature_cache_bytes: int = 1 << 30
    """Host memory for hidden states of cached prefixes, in bytes; without them the target computes the prefix again
    for a feature-based drafter."""


@dataclass(frozen=True)
class SchedulingOptions:
    """What the target computes in a step, and for which sessions."""

    topic: ClassVar[str] = "scheduling"

    chunked_prefill_size: int | None = None
    """Maximum tokens per step, over all sessions; longer prompts are computed in chunks. -1: no chunks. Default: 128
    on CPUs, 2048 on CUDA."""
    max_prefill_tokens: int = 16384
    """Maximum prompt tokens per step, over all sessions; with --chunked-prefill-size -1 a longer prompt is computed
    alone."""
    max_queued_requests: int | None = None
    """Maximum sessions that wait for admission; the target refuses further ones. Default: no limit."""
    schedule_policy: SchedulePolicy = "fcfs"
    """Order of waiting sessions: first come, first served (fcfs), or longest prefix match (lpm)."""
    coalesce_seconds: Annotated[float, tyro.conf.arg(aliases=["--gather-seconds"])] = 0.016
    """Window in which streamed tokens are coalesced into one chunk, in seconds. The first and last chunk, and tokens a
    drafter waits for, are sent immediately."""


@dataclass(frozen=True)
class KernelOptions:
    """Kernels and compiled steps of the target."""

    topic: ClassVar[str] = "kernels"

    attention_backend: AttentionBackend = "auto"
    """Attention kernels: native (compiled C++, CPU), triton (CUDA), torch_native (PyTorch). auto, and names of other
    engines' kernels (fa, fa3, flashinfer, ...): the fastest available."""
    deterministic: Annotated[bool, tyro.conf.arg(aliases=["--enable-deterministic-inference"])] = False
    """Compute each token with the same bits in every batch and draft (batch invariance); costs speed."""
    disable_cuda_graph: bool = False
    """Launch every kernel separately instead of replaying captured CUDA graphs."""
    cuda_graph_max_bs: int | None = None
    """Largest batch size captured as a CUDA graph. Default: --max-running-requests."""
    cuda_graph_bs: tuple[int, ...] | None = None
    """Batch sizes captured as CUDA graphs; with --speculative-num-draft-tokens N also with N tokens per session."""
    disable_cuda_graph_padding: bool = False
    """Replay a CUDA graph only for exactly its batch size."""
    disable_overlap_schedule: bool = False
    """Read each step before preparing the next one; by default the CUDA device computes meanwhile."""
    enable_torch_compile: bool = False
    """Compile the layers of captured steps with torch.compile; takes minutes at start-up."""
    torch_compile_max_bs: int = 32
    """Largest batch size compiled with --enable-torch-compile."""


@dataclass(frozen=True)
class TargetLogOptions:
    """What the target logs about its steps."""

    topic: ClassVar[str] = "observability"

    decode_log_interval: int = 40
    """Decoding steps between two log lines about the running batch; lines about prompts are as far apart, too."""


@dataclass(frozen=True)
class TargetOptions(
    TargetLogOptions,
    KernelOptions,
    SchedulingOptions,
    CacheOptions,
    SelfSpeculationOptions,
    AcceptanceOptions,
    ModelOptions,
):
    """The target service: verifies proposals with the large model."""


@dataclass(frozen=True)
class TargetListenOptions:
    """Address of the target service."""

    topic: ClassVar[str] = "network"

    listen: str = "127.0.0.1:30010"
    """Address that the gRPC service listens on: host:port or unix:/path."""


@dataclass(frozen=True)
class DrainOptions:
    """What happens to sessions when the target stops."""

    topic: ClassVar[str] = "scheduling"

    drain_timeout: float = 5.0
    """Time that sessions have when the target is stopped, in seconds. Gateways move them to other targets at once;
    those that no other target can take go on here until then."""


@dataclass(frozen=True)
class TargetConfig(
    TargetListenOptions,
    DrainOptions,
    TargetOptions,
    SharedOptions,
    ServicePortOptions,
    MachineShareOptions,
    ServiceConfig,
):
    """The target service: verifies proposals with the large model (PyTorch)."""

    common: ClassVar[tuple[str, ...]] = (
        "model_path", "dtype", "quantization", "tp_size", "device", "context_length", "self_speculation",
        "mem_fraction_static", "max_running_requests", "listen",
    )  # fmt: skip

    def check(self) -> None:
        """Raise ConfigError for a number out of range."""
        chunk = self.chunked_prefill_size
        if chunk is not None and chunk < 1 and chunk != -1:
            raise ConfigError(f"--chunked-prefill-size must be 1 or more, or -1 for no cutting, not {chunk}")
        check_minimum(self, _LEAST)
        check_ranks(self)
        if not self.drain_timeout >= 0:
            raise ConfigError(f"--drain-timeout must be 0 or more, not {self.drain_timeout}")
        fraction = self.mem_fraction_static
        if fraction is not None and not 0.0 < fraction <= 1.0:
            raise ConfigError(f"--mem-fraction-static must lie in (0, 1], not {fraction}")
        if not self.weight_update_timeout > 0:
            raise ConfigError(f"--weight-update-timeout must be more than 0, not {self.weight_update_timeout}")
        for name in ("speculative_accept_threshold_single", "speculative_accept_threshold_acc"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ConfigError(f"{flag_of(name)} must lie in [0, 1], not {getattr(self, name)}")

    @property
    def fixed_tokens_per_session(self) -> int | None:
        """Tokens of a session in a step, the root included, where flags fix it; a chain has its depth + 1."""
        tokens, steps = self.speculative_num_draft_tokens, self.speculative_num_steps
        return steps + 1 if tokens is not None and steps and self.speculative_eagle_topk == 1 else tokens

    @property
    def verifies_all_draft_tokens(self) -> bool:
        """True if the target verifies all draft tokens, whether that is profitable or not."""
        return self.speculative_num_draft_tokens is not None or self.speculative_always
