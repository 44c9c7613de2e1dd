"""Flags of the draft service."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import tyro

from outrider.config.common import DType, ServiceConfig, SharedOptions
from outrider.config.tls import TlsOptions

Algorithm = Literal["AUTO", "NGRAM", "STANDALONE", "EAGLE", "EAGLE3", "NEXTN", "NONE"]
MtpState = Literal["auto", "normed", "raw"]
FeatureDType = Literal["auto", "bfloat16", "float32", "float8_e4m3"]
DraftAttentionBackend = Literal["auto", "plain", "cpu", "pallas"]

# Drafters with a checkpoint of their own, and those of them that the target feeds.
MODEL_ALGORITHMS = ("STANDALONE", "EAGLE", "EAGLE3", "NEXTN")
FED_ALGORITHMS = ("EAGLE", "EAGLE3", "NEXTN")
# Those that can learn while they serve.
ONLINE_ALGORITHMS = ("EAGLE", "EAGLE3", "NEXTN")
# Those that may come with the target's own checkpoint; EAGLE is another name of NEXTN there, as in SGLang.
BUILT_IN_ALGORITHMS = ("EAGLE", "NEXTN")


@dataclass(frozen=True)
class DraftOptions:
    """The draft service: proposes tokens ahead of the target."""

    speculative_algorithm: Algorithm = "AUTO"
    """The drafter; AUTO is the EAGLE3 head that comes along for the model, beside NGRAM, if one does; else NGRAM."""
    speculative_draft_model_path: Annotated[str | None, tyro.conf.arg(aliases=["--speculative-draft-model"])] = None
    """Hugging Face id, local folder, or GGUF file of the draft; NGRAM needs none, NEXTN finds it in the target."""
    draft_dtype: DType = "auto"
    """Number format of the draft model; auto is bfloat16, but float32 on CPUs that lack the compiled kernels."""
    speculative_draft_model_quantization: str | None = None
    """Narrower weights than the draft's number format: int8 or fp8, a scale for each output; unquant for none. By
    default int8 for the head that comes along, where compiled kernels of a CPU read it, and else none; with `serve`
    what --quantization says (int8 for int4)."""
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
class DraftConfig(DraftOptions, SharedOptions, TlsOptions, ServiceConfig):
    """The draft service: proposes tokens ahead of the target."""

    model_path: Annotated[str | None, tyro.conf.arg(aliases=["--model"])] = None
    """Hugging Face id, local folder, or GGUF file of the target, whose embedding and head fed drafters share."""
    listen: str = "127.0.0.1:30020"
    """Address of the gRPC service: host:port or unix:/path."""
    network_cores: str | None = None
    """CPU cores of the threads that speak with others, while the drafter computes on --cores; by default the same."""
