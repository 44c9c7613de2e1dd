"""The process: flags, cores, the port, then the drafter and its warm-up, then requests.

JAX is imported only once the process stands on its cores, and never for NGRAM.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import tyro

import outrider
from outrider import checkpoint
from outrider.config import BUILT_IN_ALGORITHMS, FED_ALGORITHMS, MODEL_ALGORITHMS, DraftConfig, plain_argv
from outrider.drafts import with_drafter
from outrider.errors import ConfigError
from outrider.serving import process
from outrider.serving.loop import EngineLoop
from outrider.serving.rpc import GrpcServer, serve_engine
from outrider.serving.stream import StreamHub
from outrider.speculation.shape import TreeShape, explicit_shape
from outrider.wire.codec import feature_spec_to_pb, propose_request_from_pb, propose_response_to_pb
from outrider.wire.v1 import common_pb2, draft_pb2
from services.draft.drafters.base import Drafter
from services.draft.drafters.ngram import NgramDrafter, store
from services.draft.engine import DraftEngine
from services.draft.frontier import TreeLimits
from services.draft.ngrams.base import NgramOptions
from services.draft.ngrams.corpus import files_of, read_corpus
from services.draft.online.options import check_online
from services.draft.service import DraftServicer
from services.draft.trunk import SCRATCH_SLOTS

log = logging.getLogger(__name__)

_MAX_NODES = 256
_DEFAULT_DEPTH = 16
_MODEL_CHILDREN = 4


def main(argv: Sequence[str]) -> int:
    """Run the service with flags. Returns the process's exit code; 2 for flags, files or a port that do not fit."""
    config = tyro.cli(DraftConfig, args=plain_argv(argv), prog="outrider draft")
    _collect_rarely()
    return process.run("draft", config, lambda: serve(config))


def _collect_rarely() -> None:
    # The trie's millions of nodes live long and hold no cycles once they are evicted; the collector would visit them
    # all again and again. With Python's own thresholds, storing a prompt takes ten times as long.
    gc.set_threshold(50_000, 20, 1000)


async def serve(config: DraftConfig) -> int:
    """Serve until a signal or a fault. Returns the process's exit code. Raises ConfigError."""
    config = with_drafter(config, config.model_path)
    check(config)
    servicers: list[DraftServicer] = []
    servers: list[GrpcServer] = []
    drafters: list[Drafter] = []

    def register(server: GrpcServer, hub: StreamHub[Any, Any], loop: EngineLoop) -> Sequence[str]:
        servers.append(server)
        servicers.append(DraftServicer(hub, loop))
        return servicers[0].register(server)

    def build_engine() -> DraftEngine:
        servers[0].tell("loading")
        engine, model = build(config)
        for drafter in engine.drafters:
            drafter.warm_up(lambda part, parts: servers[0].tell(f"compiling {part}/{parts}"))
        servicers[0].serve(describe(engine, model), engine)
        drafters.extend(engine.drafters)
        for drafter in drafters:
            drafter.start()
        return engine

    try:
        coders = propose_request_from_pb, propose_response_to_pb
        return await serve_engine(build_engine, config.listen, *coders, register)
    finally:
        for drafter in drafters:
            drafter.stop()


def describe(engine: DraftEngine, model: common_pb2.ModelInfo | None) -> draft_pb2.GetDraftInfoResponse:
    """Facts for the handshake."""
    wanted = engine.drafter.features
    return draft_pb2.GetDraftInfoResponse(
        protocol_version=outrider.PROTOCOL_VERSION,
        software_version=outrider.__version__,
        drafters=[drafter.name for drafter in engine.drafters],
        model=model,
        max_session_tokens=engine.drafter.max_session_tokens,
        max_running_sessions=engine.max_running,
        features=feature_spec_to_pb(wanted, engine.drafter.fusion) if wanted is not None else None,
    )


def build(config: DraftConfig) -> tuple[DraftEngine, common_pb2.ModelInfo | None]:
    """The engine of a configuration, not warmed up, and the facts of its model. Raises ConfigError."""
    config = with_drafter(config, config.model_path)
    check(config)
    drafter: Drafter
    model = None
    ngram = build_ngram(config) if uses_ngram(config) else None
    if config.speculative_algorithm == "NGRAM":
        assert ngram is not None
        if config.speculative_token_map is not None:
            log.warning("--speculative-token-map is ignored: NGRAM has no head that it could shorten")
        drafter, ngram = ngram, None
    else:
        from services.draft.loading import load_model_drafter

        drafter, model = load_model_drafter(config, tree_shape(config), _MODEL_CHILDREN)
    return DraftEngine(drafter, tree_limits(config), config.max_running_requests, beside=ngram), model


def build_ngram(config: DraftConfig) -> NgramDrafter:
    """NGRAM, with the corpus read if there is one. Raises ConfigError."""
    options = ngram_options(config)
    if config.speculative_ngram_external_corpus_path is None:
        return NgramDrafter(options)
    assert config.model_path is not None, "check has seen to that"
    budget = config.speculative_ngram_external_sam_budget
    corpus = store(replace(options, draft_token_num=budget + 1))
    path, folder = Path(config.speculative_ngram_external_corpus_path), checkpoint.resolve(config.model_path)
    most = config.speculative_ngram_external_corpus_max_tokens
    read_corpus(path, folder, corpus, options.capacity, most)
    own = replace(options, draft_token_num=options.draft_token_num - budget)
    return NgramDrafter(options, store(own), corpus)


def uses_ngram(config: DraftConfig) -> bool:
    """True if n-grams draft, alone or beside a model."""
    return config.speculative_algorithm == "NGRAM" or config.speculative_ngram_beside


def check(config: DraftConfig) -> None:
    """Refuse flags that do not fit together. Raises ConfigError saying which."""
    algorithm = config.speculative_algorithm
    if algorithm == "NONE":
        raise ConfigError("--speculative-algorithm NONE needs no draft service; name a drafter")
    own_model = algorithm in MODEL_ALGORITHMS and algorithm not in BUILT_IN_ALGORITHMS
    if own_model and config.speculative_draft_model_path is None:
        raise ConfigError(f"--speculative-algorithm {algorithm} needs --speculative-draft-model-path")
    if algorithm in FED_ALGORITHMS and config.model_path is None:
        raise ConfigError(
            f"--speculative-algorithm {algorithm} needs --model-path, the target's checkpoint, whose "
            "embedding and head it shares"
        )
    shape = tree_shape(config)
    if shape is not None:
        _check_shape(config, shape)
    positive = {
        "--max-running-requests": config.max_running_requests,
        "--draft-page-size": config.draft_page_size,
        "--speculative-num-steps": config.speculative_num_steps,
        "--speculative-eagle-topk": config.speculative_eagle_topk,
        "--draft-max-total-tokens": config.draft_max_total_tokens,
        "--speculative-ngram-capacity": config.speculative_ngram_capacity,
    }
    for flag, value in positive.items():
        if value is not None and value < 1:
            raise ConfigError(f"{flag} must be 1 or more, not {value}")
    part = config.draft_mem_fraction_static
    if part is not None and not 0.0 < part <= 1.0:
        raise ConfigError(f"--draft-mem-fraction-static must lie in (0, 1], not {part}")
    check_online(config)
    if config.speculative_num_draft_tokens is not None and config.speculative_num_draft_tokens < 2:
        raise ConfigError("--speculative-num-draft-tokens counts the root and must be 2 or more")
    if algorithm == "NGRAM" and config.speculative_ngram_beside:
        raise ConfigError(
            "--speculative-ngram-beside puts NGRAM beside another drafter; NGRAM alone needs no such flag"
        )
    if uses_ngram(config):
        _check_ngram(config)
    elif config.speculative_ngram_external_corpus_path is not None:
        raise ConfigError("--speculative-ngram-external-corpus-path is for NGRAM, alone or --speculative-ngram-beside")


def tree_shape(config: DraftConfig) -> TreeShape | None:
    """The shape of explicit trees; None for trees that adapt, and for NGRAM, whose own flags say how they grow."""
    if config.speculative_algorithm not in MODEL_ALGORITHMS:
        return None
    rows = config.speculative_num_draft_tokens
    return explicit_shape(config.speculative_num_steps, config.speculative_eagle_topk, rows)


def _check_shape(config: DraftConfig, shape: TreeShape) -> None:
    if config.speculative_ngram_beside:
        raise ConfigError(
            "--speculative-ngram-beside adds nodes to trees whose shape --speculative-num-steps, "
            "--speculative-eagle-topk and --speculative-num-draft-tokens fix; leave it out, or those three"
        )
    if shape.expansions > SCRATCH_SLOTS:
        raise ConfigError(
            f"--speculative-num-steps {shape.steps} and --speculative-eagle-topk {shape.topk} expand "
            f"{shape.expansions} nodes of a session at a time; there is room for {SCRATCH_SLOTS}"
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
    if config.speculative_ngram_external_corpus_path is not None:
        _check_corpus(config, config.speculative_ngram_external_corpus_path)


def _check_corpus(config: DraftConfig, path: str) -> None:
    budget, most = config.speculative_ngram_external_sam_budget, ngram_options(config).draft_token_num - 1
    if not 0 < budget <= most:
        raise ConfigError(
            "--speculative-ngram-external-corpus-path needs --speculative-ngram-external-sam-budget of 1 or more, and "
            f"at most the {most} nodes of a draft, not {budget}"
        )
    if config.model_path is None:
        raise ConfigError(
            "--speculative-ngram-external-corpus-path needs --model-path, the target's checkpoint, for its tokenizer"
        )
    files_of(Path(path))


def ngram_options(config: DraftConfig) -> NgramOptions:
    """The NGRAM flags. The default of nodes a lookup is SGLang's, the longest window."""
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


def tree_limits(config: DraftConfig) -> TreeLimits:
    """Limits of the trees: what was asked for, or what drafting ahead can use. NGRAM's breadth has flags of its own."""
    shape = tree_shape(config)
    if shape is not None:
        if shape.rows != config.speculative_num_draft_tokens:
            log.warning("a chain of %d steps has %d rows: --speculative-num-draft-tokens is %d",
                        shape.steps, shape.rows, shape.rows)  # fmt: skip
        nodes = max(_MAX_NODES, shape.candidates)
        return TreeLimits(nodes, shape.steps, shape.topk, floor=0.0, shape=shape)
    return TreeLimits(
        nodes=_MAX_NODES,
        depth=config.speculative_num_steps or _DEFAULT_DEPTH,
        children=config.speculative_eagle_topk or (_MAX_NODES if uses_ngram(config) else _MODEL_CHILDREN),
    )
