"""Flags of the draft service."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import tyro

from outrider.config.access.token import ServicePortOptions
from outrider.config.common import DType, MachineShareOptions, RequireDraftOptions, ServiceConfig, SharedOptions

Algorithm = Literal["AUTO", "NGRAM", "STANDALONE", "EAGLE", "EAGLE3", "NEXTN", "DFLASH", "NONE"]
MtpState = Literal["auto", "normed", "raw"]
LoadFormat = Literal["auto", "safetensors", "pt", "dummy"]
FeatureDType = Literal["auto", "bfloat16", "float32", "float8_e4m3"]
DraftAhead = Literal["auto", "on", "off"]
DraftAttentionBackend = Literal["auto", "plain", "cpu", "pallas"]

# Drafters with a checkpoint of their own, and those of them that read the target's hidden states.
MODEL_ALGORITHMS = ("STANDALONE", "EAGLE", "EAGLE3", "NEXTN", "DFLASH")
FED_ALGORITHMS = ("EAGLE", "EAGLE3", "NEXTN", "DFLASH")
# Drafters that can learn while they serve.
ONLINE_ALGORITHMS = ("EAGLE", "EAGLE3", "NEXTN")
# Two names of one algorithm, as in SGLang: an EAGLE head, or MTP layers of the target's own checkpoint or another one.
BUILT_IN_ALGORITHMS = ("EAGLE", "NEXTN")


@dataclass(frozen=True)
class DrafterOptions:
    """Which drafter proposes tokens."""

    topic: ClassVar[str] = "speculation"

    speculative_algorithm: Algorithm = "AUTO"
    """Drafter. AUTO: what the files of --speculative-draft-model-path are; without it, where the draft service has a
    device or cores of its own, the bundled EAGLE3 head beside NGRAM or the model's MTP layers; else NGRAM. NONE: no
    draft service."""
    speculative_draft_model_path: Annotated[str | None, tyro.conf.arg(aliases=["--speculative-draft-model"])] = None
    """Hugging Face id, local folder or GGUF file of the draft model; NGRAM needs none, NEXTN reads the target's
    checkpoint."""
    speculative_draft_model_revision: str | None = None
    """Branch, tag or commit of a draft model on the Hugging Face hub, also as REPOSITORY@REVISION. Default: main."""
    speculative_dflash_block_size: int | None = None
    """DFLASH: draft chains of this many tokens, the root included, as --speculative-num-draft-tokens does. Default:
    adaptive trees over the block of the checkpoint's size."""
    speculative_ngram_beside: bool = False
    """Run NGRAM beside a model-based drafter and merge both proposals into one tree."""
    speculative_token_map: str | None = None
    """File of the only token ids that are proposed (FR-Spec), a list written by torch.save or in JSON, or
    REPOSITORY/FILE on the Hugging Face hub; not for EAGLE3 and NGRAM. Default: token_map.json beside the draft's
    weights, else the whole vocabulary."""


@dataclass(frozen=True)
class DraftModelOptions:
    """How the draft model is computed."""

    topic: ClassVar[str] = "draft model"

    draft_dtype: DType = "auto"
    """Number format of the draft model. auto: bfloat16; float32 on CPUs without the compiled kernels."""
    speculative_draft_model_quantization: str | None = None
    """Weight quantization of the draft model: int8 or fp8 with a scale per output channel, int4 with one per 32 inputs
    (compiled CPU kernels only), or unquant for none. Default: with compiled CPU kernels int4 with --draft-ahead off and
    int8 for the bundled head; else none, with `serve` that of --quantization (int8 for int4)."""
    speculative_draft_load_format: LoadFormat = "auto"
    """Weight files of the draft model: safetensors, files of torch.save (pt), or none, with random weights (dummy).
    auto: safetensors, else pt."""
    precompile_bs_paddings: tuple[int, ...] | None = None
    """Batch sizes that the draft model's steps are compiled for at start-up; 1 is added. Default: 1, 4, 16 and 64, up
    to --max-running-requests."""
    draft_device: Annotated[str, tyro.conf.arg(aliases=["--draft-devices"])] = "auto"
    """Device of the draft model: auto, cpu, cuda, cuda:1, tpu, ...; with --draft-tp-size or --draft-replicas the first
    of several, or a list with one for each part of each replica: cuda:2,cuda:3."""
    draft_tp_size: int = 1
    """Tensor-parallel devices of the draft model: from --draft-device on, or those that it lists."""
    draft_attention_backend: DraftAttentionBackend = "auto"
    """Kernels of the draft model: plain (XLA operations), cpu (compiled C++, matrix products included), pallas
    (attention on GPUs and TPUs). auto: the fastest available."""
    draft_ahead: DraftAhead = "auto"
    """STANDALONE and heads (EAGLE, EAGLE3, NEXTN): whether adaptive trees grow while the target verifies (on), or once
    after each commit (off). A head grows on its own states until the target's arrive, and then anew. auto: on; with
    `serve` off for STANDALONE where the draft computes on the target's cores."""
    draft_feature_dtype: FeatureDType = "auto"
    """Number format in which the target sends hidden states to a feature-based drafter. auto: bfloat16."""
    enable_multi_layer_eagle: bool = False
    """NEXTN: draft with all MTP layers, one token further each, instead of the first layer alone; always on for
    MiMo-V2 and Step-3.5."""
    speculative_mtp_feature: MtpState = "auto"
    """NEXTN: whether the target's last hidden state is taken after its final norm (normed) or before it (raw). auto:
    the model's own choice."""
    speculative_mtp_own_state: MtpState = "auto"
    """NEXTN: whether a layer passes its state to its next step after the final norm (normed) or before it (raw). auto:
    normed."""


@dataclass(frozen=True)
class DraftCacheOptions:
    """KV cache of the draft model."""

    topic: ClassVar[str] = "KV cache and memory"

    draft_page_size: int = 16
    """Tokens per KV page of the draft model."""
    draft_max_total_tokens: int | None = None
    """Capacity of the draft model's KV cache in tokens, over all sessions. Default: what the sessions can use, at most
    65,536 and their drafts, within a tenth of the memory or --draft-mem-fraction-static."""
    draft_mem_fraction_static: float | None = None
    """Fraction of each draft device's memory for weights and KV cache. Default: the cache has at most a tenth."""
    draft_memory_bytes: int | None = None
    """Memory of each draft device for the whole draft service, in bytes; JAX is limited to twice that, for moments with
    two copies of the weights. Default: with `serve` its share of a GPU that the target uses, too; else no limit but
    JAX's own, three quarters."""


@dataclass(frozen=True)
class NgramOptions:
    """The NGRAM drafter."""

    topic: ClassVar[str] = "NGRAM drafter"

    speculative_ngram_min_match_window_size: int = 1
    """Shortest suffix that is looked up, in tokens."""
    speculative_ngram_max_match_window_size: int = 12
    """Longest suffix that is looked up, in tokens."""
    speculative_ngram_min_bfs_breadth: int = 1
    """Children per node after the longest match."""
    speculative_ngram_max_bfs_breadth: int = 10
    """Children per node after the shortest match."""
    speculative_ngram_match_type: Literal["BFS", "PROB"] = "BFS"
    """Rank continuations by recency (BFS) or by frequency (PROB)."""
    speculative_ngram_branch_length: int = 18
    """Length of the stored paths, in tokens."""
    speculative_ngram_capacity: int = 10_000_000
    """Maximum number of stored nodes."""
    speculative_ngram_insert_prompts: bool = True
    """Store prompts, so that answers can copy from them; SGLang stores answers only."""
    speculative_ngram_external_corpus_path: str | None = None
    """Corpus to copy from as well: JSON lines with a "text" each, another text file, or a folder of such files.
    Default: none."""
    speculative_ngram_external_sam_budget: int = 0
    """Draft nodes reserved for the corpus, out of --speculative-num-draft-tokens - 1."""
    speculative_ngram_external_corpus_max_tokens: int = 10_000_000
    """Maximum tokens of the corpus; a longer corpus is refused."""


@dataclass(frozen=True)
class OnlineOptions:
    """Learning while serving."""

    topic: ClassVar[str] = "online learning"

    online: bool = False
    """EAGLE, EAGLE3, NEXTN: train the draft model in the background on served sessions; generated text stays the
    same."""
    online_share: float = 0.2
    """Maximum fraction of the draft device's time for online learning, above 0 and at most 0.9."""
    online_learning_rate: float = 2e-4
    """Learning rate of online learning."""
    online_bytes: int = 1 << 30
    """Memory for the hidden states that online learning reads, in bytes: half for sessions in progress, half for the
    latest ones and a held-out sample of all."""
    online_versions: int = 8
    """Updates of the target's weights for which online learning uses hidden states that were computed before."""
    online_output: str | None = None
    """Folder where online learning saves its weights, in the draft's own format, and its state, and resumes from.
    Default: not saved."""


@dataclass(frozen=True)
class DraftOptions(OnlineOptions, NgramOptions, DraftCacheOptions, DraftModelOptions, DrafterOptions):
    """The draft service: proposes tokens ahead of the target."""


@dataclass(frozen=True)
class DraftTargetOptions:
    """The target model that the draft service drafts for."""

    topic: ClassVar[str] = "model"

    model_path: Annotated[str | None, tyro.conf.arg(aliases=["--model"])] = None
    """Hugging Face id, local folder or GGUF file of the target model, whose embedding and LM head feature-based
    drafters use."""


@dataclass(frozen=True)
class DraftListenOptions:
    """Address of the draft service."""

    topic: ClassVar[str] = "network"

    listen: str = "127.0.0.1:30020"
    """Address that the gRPC service listens on: host:port or unix:/path."""


@dataclass(frozen=True)
class NetworkCoreOptions:
    """CPU cores of the draft service's network threads."""

    topic: ClassVar[str] = "cores"

    network_cores: str | None = None
    """CPU cores of the network threads, while the drafter computes on --cores. Default: --cores."""


@dataclass(frozen=True)
class DraftConfig(
    NetworkCoreOptions, DraftListenOptions, DraftTargetOptions, RequireDraftOptions, DraftOptions, SharedOptions,
    ServicePortOptions, MachineShareOptions, ServiceConfig,
):  # fmt: skip
    """The draft service: proposes tokens ahead of the target (JAX)."""

    common: ClassVar[tuple[str, ...]] = (
        "model_path", "speculative_algorithm", "speculative_draft_model_path", "draft_dtype", "draft_device",
        "speculative_num_steps", "speculative_eagle_topk", "speculative_num_draft_tokens", "max_running_requests",
        "listen",
    )  # fmt: skip
