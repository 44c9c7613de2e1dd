"""Meaning of the flags of the draft service, and checks that they fit together."""

from __future__ import annotations

import logging
from pathlib import Path

from outrider.config import BUILT_IN_ALGORITHMS, FED_ALGORITHMS, MODEL_ALGORITHMS, DraftConfig, check_minimum
from outrider.errors import ConfigError
from outrider.placement.replicas import check_draft_devices
from outrider.speculation.shape import TreeShape, block_shape, explicit_shape
from services.draft.ngrams.base import NgramOptions
from services.draft.ngrams.corpus import files_of
from services.draft.online.options import check_online
from services.draft.sessions.frontier import TreeLimits
from services.draft.sessions.prefix_kv import SCRATCH_SLOTS

log = logging.getLogger(__name__)

MODEL_CHILDREN = 4  # largest number of children that a model proposes for a node
_MAX_NODES = 256
_DEFAULT_DEPTH = 16
_QUANTIZATIONS = ("int8", "int4", "fp8", "unquant")
_MAX_NGRAM_NODES = 1 << 31  # by the width of their indices


def check(config: DraftConfig) -> None:
    """Check that the flags fit together. Raises ConfigError with the offending flag."""
    algorithm = config.speculative_algorithm
    if algorithm == "NONE":
        raise ConfigError("--speculative-algorithm NONE needs no draft service; name a drafter")
    own_model = algorithm in MODEL_ALGORITHMS and algorithm not in BUILT_IN_ALGORITHMS
    if own_model and config.speculative_draft_model_path is None:
        raise ConfigError(f"--speculative-algorithm {algorithm} needs --speculative-draft-model-path")
    if algorithm in FED_ALGORITHMS and config.model_path is None:
        raise ConfigError(
            f"--speculative-algorithm {algorithm} needs --model-path, the target's checkpoint, for its "
            "embedding and head"
        )
    check_draft_devices(config.draft_device, config.draft_tp_size)
    shape = tree_shape(config)
    if shape is not None:
        _check_shape(shape, algorithm)
    elif algorithm != "DFLASH" and config.speculative_dflash_block_size is not None:
        log.warning("--speculative-dflash-block-size has no effect with %s; it is for DFLASH", algorithm)
    _check_numbers(config)
    check_online(config)
    if algorithm == "NGRAM" and config.speculative_ngram_beside:
        raise ConfigError(
            "--speculative-ngram-beside adds NGRAM to another drafter; leave it out with --speculative-algorithm NGRAM"
        )
    if uses_ngram(config):
        _check_ngram(config)
    elif config.speculative_ngram_external_corpus_path is not None:
        raise ConfigError(
            "--speculative-ngram-external-corpus-path needs NGRAM, as the algorithm or by --speculative-ngram-beside"
        )


_POSITIVE = (
    "max_running_requests",
    "draft_page_size",
    "speculative_num_steps",
    "speculative_eagle_topk",
    "draft_max_total_tokens",
    "draft_memory_bytes",
    "speculative_ngram_capacity",
)


def _check_numbers(config: DraftConfig) -> None:
    check_minimum(config, dict.fromkeys(_POSITIVE, 1))
    if config.precompile_bs_paddings is not None and min(config.precompile_bs_paddings, default=0) < 1:
        raise ConfigError("--precompile-bs-paddings needs batch sizes of 1 or more")
    if config.online and config.speculative_draft_load_format == "dummy":
        raise ConfigError(
            "--online trains the draft's weights, and --speculative-draft-load-format dummy has random ones; leave one "
            "of them out"
        )
    quantization = config.speculative_draft_model_quantization
    if quantization not in (None, *_QUANTIZATIONS):
        raise ConfigError(
            f"--speculative-draft-model-quantization {quantization} is not supported; expected one of "
            f"{', '.join(_QUANTIZATIONS)}"
        )
    fraction = config.draft_mem_fraction_static
    if fraction is not None and not 0.0 < fraction <= 1.0:
        raise ConfigError(f"--draft-mem-fraction-static must lie in (0, 1], not {fraction}")
    if config.speculative_num_draft_tokens is not None and config.speculative_num_draft_tokens < 2:
        raise ConfigError("--speculative-num-draft-tokens counts the root and must be 2 or more")


def _check_shape(shape: TreeShape, algorithm: str) -> None:
    if algorithm == "DFLASH":  # the block's positions take the scratch; its nodes are not expanded
        if (size := shape.steps + 1) > SCRATCH_SLOTS:
            raise ConfigError(f"a DFLASH block of {size} positions is too large; at most {SCRATCH_SLOTS} are supported")
        return
    if shape.expansions > SCRATCH_SLOTS:
        raise ConfigError(
            f"--speculative-num-steps {shape.steps} and --speculative-eagle-topk {shape.topk} expand "
            f"{shape.expansions} nodes of a session at a time; at most {SCRATCH_SLOTS} are supported"
        )


def _check_ngram(config: DraftConfig) -> None:
    windows = (config.speculative_ngram_min_match_window_size, config.speculative_ngram_max_match_window_size)
    breadths = (config.speculative_ngram_min_bfs_breadth, config.speculative_ngram_max_bfs_breadth)
    length = config.speculative_ngram_branch_length
    if length <= 1:
        raise ConfigError(f"--speculative-ngram-branch-length must be 2 or more, not {length}")
    if not 0 < windows[0] <= windows[1] < length:
        raise ConfigError(
            "the NGRAM windows must satisfy 0 < --speculative-ngram-min-match-window-size <= "
            "--speculative-ngram-max-match-window-size < --speculative-ngram-branch-length, "
            f"not {windows[0]}, {windows[1]}, {length}"
        )
    if not 0 < breadths[0] <= breadths[1]:
        raise ConfigError(
            "the NGRAM breadths must satisfy 0 < --speculative-ngram-min-bfs-breadth <= "
            f"--speculative-ngram-max-bfs-breadth, not {breadths[0]}, {breadths[1]}"
        )
    if config.speculative_ngram_capacity > _MAX_NGRAM_NODES:
        raise ConfigError(
            f"--speculative-ngram-capacity must be {_MAX_NGRAM_NODES} or less, not {config.speculative_ngram_capacity}"
        )
    if config.speculative_ngram_external_corpus_path is not None:
        _check_corpus(config, config.speculative_ngram_external_corpus_path)


def _check_corpus(config: DraftConfig, path: str) -> None:
    budget, limit = config.speculative_ngram_external_sam_budget, ngram_options(config).draft_token_num - 1
    if not 0 < budget <= limit:
        raise ConfigError(
            "--speculative-ngram-external-corpus-path needs --speculative-ngram-external-sam-budget of 1 or more, and "
            f"at most the {limit} nodes of a lookup, not {budget}"
        )
    if config.model_path is None:
        raise ConfigError(
            "--speculative-ngram-external-corpus-path needs --model-path, the target's checkpoint, for its tokenizer"
        )
    files_of(Path(path))


def tree_shape(config: DraftConfig) -> TreeShape | None:
    """The shape of explicit trees; None for adaptive trees, and for NGRAM, which has flags of its own."""
    if config.speculative_algorithm not in MODEL_ALGORITHMS:
        return None
    flags = config.speculative_num_steps, config.speculative_eagle_topk, config.speculative_num_draft_tokens
    if config.speculative_algorithm == "DFLASH":
        return block_shape(*flags, config.speculative_dflash_block_size)
    return explicit_shape(*flags)


def tree_limits(config: DraftConfig) -> TreeLimits:
    """Limits of the trees: those of the flags, or what drafting ahead can use. NGRAM's breadth has flags of its own."""
    shape = tree_shape(config)
    if shape is not None:
        asked = config.speculative_num_draft_tokens
        if asked is not None and asked != shape.rows:
            log.warning("%s", shape.note(asked))
        nodes = max(_MAX_NODES, shape.candidates)
        if uses_ngram(config):  # its paths are longer, and its nodes are added first
            return TreeLimits(2 * nodes, max(shape.steps, _DEFAULT_DEPTH), 2 * nodes, floor=0.0, shape=shape)
        return TreeLimits(nodes, shape.steps, shape.topk, floor=0.0, shape=shape)
    if config.speculative_algorithm == "DFLASH":  # its flags may be 1, of SGLang's chains, and then set no shape
        return TreeLimits(_MAX_NODES, SCRATCH_SLOTS, _MAX_NODES if uses_ngram(config) else MODEL_CHILDREN)
    return TreeLimits(
        nodes=_MAX_NODES,
        depth=config.speculative_num_steps or _DEFAULT_DEPTH,
        children=config.speculative_eagle_topk or (_MAX_NODES if uses_ngram(config) else MODEL_CHILDREN),
    )


def uses_ngram(config: DraftConfig) -> bool:
    """True if NGRAM drafts, alone or beside a model."""
    return config.speculative_algorithm == "NGRAM" or config.speculative_ngram_beside


def ngram_options(config: DraftConfig) -> NgramOptions:
    """The NGRAM flags. As in SGLang, a lookup has by default as many nodes as the longest window has tokens."""
    return NgramOptions(
        match_type=config.speculative_ngram_match_type,
        min_match_window_size=config.speculative_ngram_min_match_window_size,
        max_match_window_size=config.speculative_ngram_max_match_window_size,
        min_bfs_breadth=config.speculative_ngram_min_bfs_breadth,
        max_bfs_breadth=config.speculative_ngram_max_bfs_breadth,
        branch_length=config.speculative_ngram_branch_length,
        capacity=config.speculative_ngram_capacity,
        draft_token_num=config.speculative_num_draft_tokens or max(config.speculative_ngram_max_match_window_size, 2),
        insert_prompts=config.speculative_ngram_insert_prompts,
    )
