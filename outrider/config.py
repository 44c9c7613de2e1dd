"""Flags of the processes, as frozen dataclasses; parsed once at the start of a process, never read from anywhere else.

Options that only one process has stand in a class of their own (`TargetOptions`, ...); a process's configuration adds
what depends on where it runs (`TargetConfig`, ...); `ServeConfig` takes every option once and makes all three.

Flags that SGLang users know keep SGLang's names and meaning. A field's docstring is the flag's help text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal, TypeVar

import tyro

from outrider.errors import ConfigError

Algorithm = Literal["AUTO", "NGRAM", "STANDALONE", "EAGLE", "EAGLE3", "NEXTN", "NONE"]
MtpState = Literal["auto", "normed", "raw"]
FeatureDType = Literal["auto", "bfloat16", "float32", "float8_e4m3"]
DType = Literal["auto", "float32", "bfloat16", "float16"]
KVCacheDType = Literal["auto", "bf16", "bfloat16", "fp8_e5m2", "fp8_e4m3"]
SchedulePolicy = Literal["fcfs", "lpm"]
AttentionBackend = Literal["auto", "native", "triton", "torch_native"]
DraftAttentionBackend = Literal["auto", "plain", "cpu", "pallas"]
Quantization = Literal["fp8", "int8", "int4"]
ToolCallParser = Literal["auto", "none", "hermes", "qwen25", "llama3", "deepseekv3"]
ReasoningParser = Literal["auto", "none", "deepseek-r1", "qwen3"]
TrainedAlgorithm = Literal["EAGLE", "EAGLE3", "NEXTN", "STANDALONE"]
LogLevel = Literal["debug", "info", "warning", "error"]

DEFAULT_MODEL = "default"


@dataclass(frozen=True)
class ProcessConfig:
    """What every process has."""

    cores: str | None = None
    """CPU cores of this process, such as "0-3,6"; all by default. Its threads are as many."""
    niceness: int = 0
    """How far this process gives way to others on its cores, 0 to 19."""
    log_level: LogLevel = "info"
    """Least severe log lines that are shown."""


@dataclass(frozen=True)
class SharedOptions:
    """What the target and the draft service are told alike."""

    max_running_requests: int = 48
    """Most sessions that run together."""
    speculative_num_steps: int | None = None
    """Depth of a draft: most draft tokens that one step can accept in a session. A drafter with a model grows exactly
    SGLang's tree if this and the next two are set, and a tree that adapts if none is."""
    speculative_eagle_topk: int | None = None
    """Most children of a draft node, and nodes of a level that get children."""
    speculative_num_draft_tokens: int | None = None
    """Rows verified per session and step, the root included; for a chain (--speculative-eagle-topk 1) its depth + 1."""
    disable_radix_cache: bool = False
    """Keep no KV pages for later sessions that begin with the same tokens."""


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
    """Host memory for hidden states of cached prefixes, where a drafter feeds on them, in bytes; 0 keeps none."""
    kv_cache_dtype: KVCacheDType = "auto"
    """Number format of the KV cache; auto is that of the model's keys. Narrower ones hold more tokens, less exactly."""
    speculative_accept_threshold_single: float = 1.0
    """Accept a draft token at least this probable, whatever was drawn; below 1 this changes sampled text."""
    speculative_accept_threshold_acc: float = 1.0
    """Accept draft tokens of probability p with probability p / threshold; below 1 this changes sampled text."""
    speculative_always: bool = False
    """Let every step wait for the drafter's answer, up to ten seconds, and verify all of it: to measure a drafter."""
    chunked_prefill_size: int | None = None
    """Tokens computed in one step, over all sessions; longer prompts are cut. By default 128 on CPUs and 2048 on CUDA;
    -1 computes every prompt in one piece."""
    max_prefill_tokens: int = 16384
    """Prompt tokens computed in one step, over all sessions; without cutting, a longer prompt is computed alone."""
    max_queued_requests: int | None = None
    """Most sessions that wait for a place; further ones are refused. By default without limit."""
    schedule_policy: SchedulePolicy = "fcfs"
    """Which waiting session is next: first come, first served (fcfs), or longest prefix match (lpm), within limits."""


@dataclass(frozen=True)
class TargetConfig(TargetOptions, SharedOptions, ProcessConfig):
    """The target service: verifies proposals with the large model."""

    listen: str = "127.0.0.1:30010"
    """Address of the gRPC service: host:port or unix:/path."""


@dataclass(frozen=True)
class DraftOptions:
    """The draft service: proposes tokens ahead of the target."""

    speculative_algorithm: Algorithm = "AUTO"
    """The drafter; AUTO is the EAGLE3 head that comes along for the model, if one does, and else NGRAM."""
    speculative_draft_model_path: Annotated[str | None, tyro.conf.arg(aliases=["--speculative-draft-model"])] = None
    """Hugging Face id, local folder, or GGUF file of the draft; NGRAM needs none, NEXTN finds it in the target."""
    draft_dtype: DType = "auto"
    """Number format of the draft model; auto is bfloat16, but float32 on CPUs that lack the compiled kernels."""
    speculative_draft_model_quantization: str | None = None
    """Narrower weights than the draft's number format: int8 or fp8, a scale for each output; unquant for none. By
    default none, but with `serve` what --quantization says (int8 for int4)."""
    draft_device: str = "auto"
    """Device of the draft model: auto, cpu, cuda, cuda:1, tpu, ..."""
    draft_tp_size: int = 1
    """Devices, from --draft-device on, that share every layer of the draft model."""
    draft_feature_dtype: FeatureDType = "auto"
    """Number format in which the target's hidden states travel to a head that feeds on them; auto is bfloat16."""
    enable_multi_layer_eagle: bool = False
    """NEXTN: draft with all MTP layers, each a token further, and not with the first alone; always so for MiMo-V2."""
    speculative_mtp_feature: MtpState = "auto"
    """NEXTN: the target's last state that it hands over, behind its final norm or before; auto is the model's own."""
    speculative_mtp_own_state: MtpState = "auto"
    """NEXTN: the state that a layer hands on to its next step, behind its final norm or before; auto is normed."""
    speculative_token_map: str | None = None
    """File of frequent token ids, as torch.save writes a list, which alone are proposed (FR-Spec); or its place on the
    Hugging Face hub, REPOSITORY/FILE. Not for EAGLE3 and NGRAM."""
    draft_attention_backend: DraftAttentionBackend = "auto"
    """Kernels of the draft model: plain (XLA's operations), cpu (compiled C++, for products, too), pallas (attention on
    GPUs and TPUs), or the best there are."""
    draft_page_size: int = 16
    """Size of a KV page of the draft's cache in tokens."""
    draft_max_total_tokens: int | None = None
    """Tokens in the draft's KV cache, over all sessions; by default what they can use, but no more than 65,536 and what
    they write ahead, nor than a tenth of the memory holds, or the rest of --draft-mem-fraction-static."""
    draft_mem_fraction_static: float | None = None
    """Fraction of the memory of each of the draft's devices for its weights and KV cache."""
    speculative_ngram_beside: bool = False
    """Let NGRAM draft beside a drafter with a model; what both propose merges in one tree."""
    speculative_ngram_min_match_window_size: int = 1
    """NGRAM: shortest suffix that is looked up, in tokens."""
    speculative_ngram_max_match_window_size: int = 12
    """NGRAM: longest suffix that is looked up, in tokens."""
    speculative_ngram_min_bfs_breadth: int = 1
    """NGRAM: children per node after the longest match."""
    speculative_ngram_max_bfs_breadth: int = 10
    """NGRAM: children per node after the shortest match."""
    speculative_ngram_match_type: Literal["BFS", "PROB"] = "BFS"
    """NGRAM: rank continuations by recency (BFS) or by frequency (PROB)."""
    speculative_ngram_branch_length: int = 18
    """NGRAM: length of the paths that are stored, in tokens."""
    speculative_ngram_capacity: int = 10_000_000
    """NGRAM: most nodes that are stored."""
    speculative_ngram_insert_prompts: bool = True
    """NGRAM: store prompts too, so that answers can copy from them; SGLang stores answers only."""
    speculative_ngram_external_corpus_path: str | None = None
    """NGRAM: texts to copy from as well: JSON lines with a "text" each, another text file, or a folder of such."""
    speculative_ngram_external_sam_budget: int = 0
    """NGRAM: draft nodes that are kept for the corpus, of --speculative-num-draft-tokens less one."""
    speculative_ngram_external_corpus_max_tokens: int = 10_000_000
    """NGRAM: most tokens of the corpus; a longer one is refused."""
    online: bool = False
    """EAGLE, EAGLE3, NEXTN: learn in the background from the sessions that are served. Texts stay what they are."""
    online_share: float = 0.2
    """Most of the draft device's time that learning while serving may take, above 0 and at most 0.9."""
    online_learning_rate: float = 1e-4
    """Learning rate while serving."""
    online_bytes: int = 1 << 30
    """Memory for the target's hidden states that are learnt from while serving, in bytes; the latest are kept."""
    online_output: str | None = None
    """Folder that what was learnt while serving is kept in, in the draft's own format; the next start goes on there."""


@dataclass(frozen=True)
class DraftConfig(DraftOptions, SharedOptions, ProcessConfig):
    """The draft service: proposes tokens ahead of the target."""

    model_path: Annotated[str | None, tyro.conf.arg(aliases=["--model"])] = None
    """Hugging Face id, local folder, or GGUF file of the target, whose embedding and head fed drafters share."""
    listen: str = "127.0.0.1:30020"
    """Address of the gRPC service: host:port or unix:/path."""
    network_cores: str | None = None
    """CPU cores of the threads that speak with others, while the drafter computes on --cores; by default the same."""


@dataclass(frozen=True)
class GatewayOptions:
    """The gateway: speaks OpenAI-style REST and gRPC with clients, and streams between the services."""

    host: str = "127.0.0.1"
    """Host that clients connect to."""
    port: int = 30000
    """Port of the REST service."""
    grpc_port: int = 30001
    """Port of the gRPC service."""
    served_model_name: str | None = None
    """Name of the model in requests and answers; by default the model path."""
    max_body_bytes: int = 4 << 20
    """Largest request body."""
    api_key: tuple[str, ...] = ()
    """Keys that clients must show one of, but for health and metrics; also those in OUTRIDER_API_KEY, with spaces
    between them. Without any, every client is served."""
    admin_api_key: str | None = None
    """Key that routes which control the targets ask for; without one, they are open to every client."""
    allowed_origins: tuple[str, ...] = ()
    """Origins whose pages may ask from browsers (CORS), or *; none by default."""
    request_timeout: float | None = None
    """Seconds that any answer may take, from its request to its end; by default without limit."""
    max_pending_requests: int = 4096
    """Most generations under way, waiting ones included; further ones are refused with 503 and Retry-After."""
    max_requests_per_key: int | None = None
    """Most requests of one key under way; further ones are refused with 429 and Retry-After. By default unlimited."""
    drain_timeout: float = 5.0
    """Seconds that requests under way get to end when the gateway is told to stop; new ones are refused meanwhile."""
    tool_call_parser: ToolCallParser = "auto"
    """How the model writes calls of tools; auto looks at its chat template."""
    reasoning_parser: ReasoningParser = "auto"
    """How the model marks its reasoning: with <think> and </think>, of which deepseek-r1 leaves the first out; auto
    looks at its chat template and at the prompt."""
    disable_vllm_metrics: bool = False
    """Tell of speculation under our own names alone in the metrics, and not under vLLM's, which its dashboards read."""
    per_request_spec_decode_metrics: Literal["off", "summary", "detailed"] = "summary"
    """What answers tell of their speculation and times, in the shapes of vLLM (`metrics`) and llama.cpp (`timings`)."""
    disable_draft_self_test: bool = False
    """Ask no questions when a draft with a model comes up, to see whether it knows the target."""
    connect_timeout: float = 600.0
    """Seconds to wait for the services at start-up."""


@dataclass(frozen=True)
class GatewayConfig(GatewayOptions, ProcessConfig):
    """The gateway: speaks OpenAI-style REST and gRPC with clients, and streams between the services."""

    target: tuple[str, ...] = ("127.0.0.1:30010",)
    """Addresses of target services."""
    draft: tuple[str, ...] = ()
    """Addresses of draft services; without any, text is decoded plainly."""


@dataclass(frozen=True)
class ServeConfig:
    """All three processes on this machine, under one supervisor."""

    shared: tyro.conf.OmitArgPrefixes[SharedOptions] = SharedOptions()
    target: tyro.conf.OmitArgPrefixes[TargetOptions] = TargetOptions()
    draft: tyro.conf.OmitArgPrefixes[DraftOptions] = DraftOptions()
    gateway: tyro.conf.OmitArgPrefixes[GatewayOptions] = GatewayOptions()
    cores: str | None = None
    """CPU cores that the processes divide among themselves, such as "0-3,6"; all by default."""
    cores_target: str | None = None
    """CPU cores of the target service; by default a share of --cores."""
    cores_draft: str | None = None
    """CPU cores of the draft service; by default a share of --cores."""
    cores_gateway: str | None = None
    """CPU cores of the gateway; by default a share of --cores."""
    listen_target: str | None = None
    """Address of the target service, host:port or unix:/path; by default a private Unix domain socket."""
    listen_draft: str | None = None
    """Address of the draft service, host:port or unix:/path; by default a private Unix domain socket."""
    log_level: LogLevel = "info"
    """Least severe log lines that are shown."""


@dataclass(frozen=True)
class TrainConfig(ProcessConfig):
    """Train a draft for a target: the target writes answers, and a head learns to foretell them."""

    model_path: Annotated[str, tyro.conf.arg(aliases=["--model"])] = DEFAULT_MODEL
    """Hugging Face id, local folder, or GGUF file of the target; "default" is SmolLM2-135M-Instruct."""
    algorithm: TrainedAlgorithm = "EAGLE3"
    """What is trained: a head of a kind (NEXTN: an MTP layer), or a small decoder."""
    initial: str | None = None
    """Folder of an EAGLE or EAGLE3 head to go on from; what is said of its shape is not heeded then."""
    output: str = "draft"
    """Folder that the draft is written into, in its published format, with a report of the training."""
    answers: str | None = None
    """Folder of what the target wrote, which several trainings may share; by default OUTPUT.answers."""
    data: tuple[str, ...] = ()
    """Files of prompts, JSON lines: "prompt", "text", "turns" or "messages". Without any, the target asks itself."""
    data_limit: int | None = None
    """Prompts taken of each file; by default all."""
    free_prompts: int | None = None
    """Conversations that the target begins, too, the user's turn included; by default none if there is data, and else
    as many as are needed."""
    free_openings: str | None = None
    """File of first words that these conversations begin with in turn, a line each; by default those that come along,
    which ask for tasks of many kinds."""
    tokens: int = 1_000_000
    """Tokens that the target writes."""
    temperature: tuple[float, ...] = (0.0, 1.0)
    """Temperatures of the answers, in turn."""
    max_new_tokens: int = 256
    """Tokens of an answer, at most."""
    max_length: int = 1024
    """Tokens of a prompt and its answer, at most; longer prompts are left out."""
    max_running_requests: int = 64
    """Answers that are written at a time."""
    max_bytes: int = 32 << 30
    """Largest size of what the target wrote, hidden states included, in bytes."""
    target: str | None = None
    """Address of a target service that runs already, host:port or unix:/path; by default one is started."""
    epochs: float = 2.0
    """Times that the head sees every answer."""
    steps: int | None = None
    """Steps of the optimizer; by default as many as --epochs needs."""
    batch_tokens: int = 4096
    """Tokens of answers that a step of the optimizer learns from, about."""
    learning_rate: float = 5e-4
    """Highest learning rate; it warms up, and falls along a cosine."""
    warmup: float = 0.03
    """Part of the steps in which the learning rate rises."""
    weight_decay: float = 0.01
    """Decay of matrices (AdamW)."""
    unroll: int = 6
    """Tokens ahead that a head learns to look, from its own states behind the first."""
    unroll_decay: float = 0.8
    """Part of the tokens from which the head looks a further one ahead, of those from which it looked so far."""
    draft_vocab_size: int = 8192
    """EAGLE3: tokens that the head can propose, the most frequent ones of the answers. EAGLE and NEXTN propose all, and
    learn from these. STANDALONE learns all."""
    intermediate_size: int | None = None
    """Width of the draft's feed-forward part; by default the target's, of a STANDALONE one 8/3 of its own width."""
    num_layers: int | None = None
    """Decoder layers of the draft; by default 1, of a STANDALONE one 4."""
    hidden_size: int | None = None
    """STANDALONE: width of the decoder; by default 256, or the target's if that is less."""
    aux_layers: tuple[int, ...] | None = None
    """Three layers of the target whose outputs the head is fed with, counted from 0; by default 1, L/2-1 and L-4."""
    held_out: float = 0.02
    """Part of the prompts that are kept for the evaluation."""
    evaluate: int = 64
    """Held-out answers on which the finished draft is replayed."""
    train_device: str = "auto"
    """Device of the training: auto, cpu, cuda, cuda:1, tpu, ..."""
    train_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Number format of matrix products; auto is bfloat16. Weights and sums are float32."""
    checkpoint_seconds: float = 120.0
    """Seconds between checkpoints."""
    seed: int = 0
    """Seed of answers, of the order in which they are learnt, and of the head's first weights."""


Config = TypeVar("Config", bound=ProcessConfig)

# Drafters with a checkpoint of their own, and those of them that the target feeds.
MODEL_ALGORITHMS = ("STANDALONE", "EAGLE", "EAGLE3", "NEXTN")
FED_ALGORITHMS = ("EAGLE", "EAGLE3", "NEXTN")
# Those that can learn while they serve.
ONLINE_ALGORITHMS = ("EAGLE", "EAGLE3", "NEXTN")
# Those that may come with the target's own checkpoint; EAGLE is another name of NEXTN there, as in SGLang.
BUILT_IN_ALGORITHMS = ("EAGLE", "NEXTN")


def plain_argv(argv: Sequence[str]) -> list[str]:
    """Arguments with the algorithm's name as it is written here: in SGLang it may be in small letters, or nothing."""
    flag = "--speculative-algorithm"
    plain = list(argv)
    for i, word in enumerate(plain):
        if word == flag and i + 1 < len(plain):
            plain[i + 1] = plain[i + 1].upper() or "NONE"
        elif word.startswith(f"{flag}="):
            plain[i] = f"{flag}={word.partition('=')[2].upper() or 'NONE'}"
    return plain


def parse_cores(text: str) -> list[int]:
    """Core numbers of a list such as "0-3,6". Raises ConfigError."""
    try:
        cores: list[int] = []
        for part in text.split(","):
            first, _, last = part.partition("-")
            cores += range(int(first), int(last or first) + 1)
        if not cores:
            raise ValueError("an empty range")
    except ValueError:
        raise ConfigError(f'"{text}" is no list of cores; write for example 0-3,6') from None
    return sorted(set(cores))


def format_cores(cores: Sequence[int]) -> str:
    """Core numbers as a list that `parse_cores` reads."""
    return ",".join(map(str, cores))


def to_argv(config: ProcessConfig) -> list[str]:
    """Flags that make this configuration: the fields that differ from their defaults."""
    argv: list[str] = []
    for field in fields(config):
        value: Any = getattr(config, field.name)
        if value == field.default:
            continue
        flag = "--" + field.name.replace("_", "-")
        if isinstance(value, bool):
            argv.append(flag if value else flag.replace("--", "--no-", 1))
        elif isinstance(value, Sequence) and not isinstance(value, str):
            argv += [flag, *map(str, value)]
        else:
            argv += [flag, str(value)]
    return argv
